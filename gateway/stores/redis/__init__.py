"""Stores in Redis, which all replicas share."""
