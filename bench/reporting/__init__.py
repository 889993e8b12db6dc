"""Results as JSON, tables and plots, and the machine of a run."""
