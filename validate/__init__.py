"""`perfmodel validate`: scenarios run for real on this machine, and what they took, written down as measurements."""
