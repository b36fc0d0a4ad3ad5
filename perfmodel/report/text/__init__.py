"""Reports for the terminal: of a prediction, a profile, a sweep, and of settings with which a step would fit."""
