"""The operators' API: health, metrics, and ``/admin/v1``."""
