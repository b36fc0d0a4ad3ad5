"""Reports of one prediction: text, JSON, plots, traces for other tools, and its difference from a recorded step."""
