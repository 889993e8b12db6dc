"""Frontend of the ORS protocol."""
