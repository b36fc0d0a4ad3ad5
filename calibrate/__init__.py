"""`perfmodel calibrate`: microbenchmarks of this machine, and what they say of it as a hardware profile."""
