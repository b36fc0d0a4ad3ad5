"""The models that scenarios name, as torch modules, and one training step of each. Importing these loads torch."""
