"""Tasks as data: splits read from files, looked up by split and index."""
