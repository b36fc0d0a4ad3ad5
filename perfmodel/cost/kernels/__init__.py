"""Kernel times: looked up where they were measured, else from fitted curves, else estimated; scaled for what-ifs."""
