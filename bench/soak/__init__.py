"""Two replicas under load during faults."""
