"""The scenario: its keys, families of models, how a model is cut into stages, and the YAML file that it stands in."""
