"""Sessions: their setup, calls in order, and outcomes that are kept for repeated calls."""
