"""Fits from measured samples to what a profile keeps: cost curves, couplings of kernels and collectives, power."""
