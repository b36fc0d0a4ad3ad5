"""The parallel strategies as torch runs them, by strategy."""
