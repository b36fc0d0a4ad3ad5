"""One prediction: from scenario and profile to step time, memory, bottleneck and interval; sweeps and what-ifs."""
