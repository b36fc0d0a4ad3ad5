"""Kernel times: which operator calls are measured (the grid, or a scenario's own), with what arguments, and how."""
