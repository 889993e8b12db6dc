"""An environment's own tasks: task files, task modules, and look-up by id."""
