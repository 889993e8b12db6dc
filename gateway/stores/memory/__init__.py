"""Stores of a gateway without Redis: all data is in this process."""
