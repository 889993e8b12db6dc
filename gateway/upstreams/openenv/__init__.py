"""Call workers by the OpenEnv protocol."""
