"""Curricula: definitions, weights, statistics of tasks, and draws."""
