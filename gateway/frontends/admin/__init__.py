"""Operators' API: health, metrics, and ``/admin/v1``."""
