"""OpenEnv towards workers."""
