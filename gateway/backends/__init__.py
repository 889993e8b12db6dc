"""What starts and stops workers: a Docker engine, or local processes."""
