"""Defines curricula, records outcomes of tasks, and draws tasks."""
