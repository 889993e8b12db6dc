"""TODO env_images."""
