"""Sessions: their setup, their calls in order, and outcomes that are kept for repeated calls."""
