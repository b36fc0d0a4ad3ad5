"""Tracing of training steps without a GPU, as if on CUDA. Importing these loads torch."""
