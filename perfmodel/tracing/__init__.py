"""Tracing of training steps without a GPU. Importing this loads torch."""

from perfmodel.tracing.step import trace_step

__all__ = ["trace_step"]
