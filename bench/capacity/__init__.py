"""A model of what a cluster must have."""
