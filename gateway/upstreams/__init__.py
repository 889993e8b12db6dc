"""The protocols that the gateway speaks to workers."""
