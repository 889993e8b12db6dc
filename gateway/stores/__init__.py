"""Where sessions, workers, leases and deadlines live: Redis, or memory in one process."""
