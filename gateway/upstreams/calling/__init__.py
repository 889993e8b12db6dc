"""What upstreams share: calls that run once, and ORS bytes for servers that speak something else."""
