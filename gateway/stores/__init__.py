"""Stores of sessions, workers, leases and deadlines: in Redis, or in the memory of one process."""
