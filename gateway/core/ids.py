"""Names and ids; each has a type of its own, so that none is taken for another."""

from __future__ import annotations

from typing import NewType

EnvironmentName = NewType("EnvironmentName", str)
WorkerId = NewType("WorkerId", str)
SessionId = NewType("SessionId", str)
Owner = NewType("Owner", str)
"""The name of the key that a session belongs to; ``""`` where no keys are configured."""
