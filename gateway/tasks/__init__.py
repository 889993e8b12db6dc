"""Finds, registers, signs, imports and draws tasks."""
