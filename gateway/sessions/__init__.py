"""Sessions: their opening, calls and closing, and this replica's cache of them."""
