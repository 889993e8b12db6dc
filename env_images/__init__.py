"""The sources of the environment images."""
