"""The ORS protocol."""
