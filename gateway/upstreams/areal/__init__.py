"""AReaL's task server API towards workers."""
