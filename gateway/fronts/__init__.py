"""Protocols towards trainers and people."""
