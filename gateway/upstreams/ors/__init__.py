"""The ORS protocol towards workers: the gateway's own images, and standard servers."""
