"""Sessions: opening, calls, closing, and what this replica remembers of them."""
