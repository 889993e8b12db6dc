"""Execution of an environment's code on separate event loops and threads."""
