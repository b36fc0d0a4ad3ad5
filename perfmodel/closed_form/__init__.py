"""Formulas of data parallelism, sharding and pipelines in closed form, which the simulator is held against."""
