"""Tracing of training steps without a GPU. Importing this loads torch."""

from perfmodel.workload.trace.session import trace_step

__all__ = ["trace_step"]
