"""Backends that start and stop workers: a Docker engine, several engines as a cluster, or local processes."""
