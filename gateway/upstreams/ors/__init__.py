"""ORS towards workers: our own images, and standard servers."""
