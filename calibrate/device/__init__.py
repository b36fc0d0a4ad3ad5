"""The device's own constants: launches, the second-level cache, waiting streams, power and clock."""
