"""Running an environment's code: event loops and threads of its own, with deadlines."""
