"""AReaL's task server API."""
