"""Calls with an idempotency key that run once, on servers that do not see to it themselves."""
