"""The `perfmodel` command: one module a subcommand, with the options, the help and the errors that they share."""
