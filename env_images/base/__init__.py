"""TODO env_images/base."""
