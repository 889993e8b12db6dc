"""Interfaces (ports) between the gateway's parts and their implementations."""
