"""What a terminal shows of a prediction, a profile, a sweep, and of what would fit."""
