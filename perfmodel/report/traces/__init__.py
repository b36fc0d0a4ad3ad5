"""Files of other tools: Chrome traces, written and read, and memory snapshots."""
