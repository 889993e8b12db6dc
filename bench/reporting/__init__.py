"""Results as JSON, tables and plots, and the machine that they are from."""
