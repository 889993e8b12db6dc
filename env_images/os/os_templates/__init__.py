"""The templates that scripts/make-os-tasks draws tasks from. No part of a worker."""
