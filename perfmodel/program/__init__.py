"""What each rank does in a step: a trace with the instructions that its parallel strategies insert."""
