"""Pictures of one prediction or sweep: each draws on the Axes that it is given, with one palette."""
