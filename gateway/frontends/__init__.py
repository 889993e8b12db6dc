"""Protocols towards trainers and operators: one frontend for each protocol."""
