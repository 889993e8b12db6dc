"""The templates from which scripts/make-os-tasks draws tasks. They are not part of a worker."""
