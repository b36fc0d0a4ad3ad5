"""A trace: operators, tensors, storages and modules of one training step, as data; no seconds and no torch."""
