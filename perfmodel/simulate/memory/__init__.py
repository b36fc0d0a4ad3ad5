"""Interpreter 2, memory: requests of a step in order, through a replica of PyTorch's caching allocator."""
