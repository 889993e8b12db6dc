"""The stores of a gateway without Redis: everything is in this process."""
