"""Protocols towards workers."""
