"""Workers as containers of one Docker engine."""
