"""The sources of the base image for environments."""
