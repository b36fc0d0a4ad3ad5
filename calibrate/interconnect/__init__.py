"""`perfmodel calibrate --interconnect`: collectives, messages, transfers and their contention with kernels."""
