"""The catalog of environments: their files, what changes in them, and how they are inspected."""
