"""The torch side of the model families: a module for each row of ``perfmodel.scenario.families``, under its name."""
