"""AReaL's Task Server API towards workers."""
