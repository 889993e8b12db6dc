"""Benchmarks of the gateway: every figure as JSON, ratios first. ``README.md`` says how to run and to read them."""
