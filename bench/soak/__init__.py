"""Two replicas under load while things break."""
