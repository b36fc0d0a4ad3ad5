"""Host costs: Python calls, autograd nodes, modules and optimizers, in units of a reference piece of host work."""
