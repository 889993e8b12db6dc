"""Runs each call with an idempotency key once, on servers that do not support idempotency keys."""
