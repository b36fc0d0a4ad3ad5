"""Predict how distributed PyTorch training behaves: step time, memory, timeline and bottleneck."""

__version__ = "0.1.0"
