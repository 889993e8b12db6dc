"""The command line: ``gateway serve`` and the commands for operators."""
