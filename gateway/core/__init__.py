"""Domain types, errors, interfaces and pure decisions; imports only the standard library."""
