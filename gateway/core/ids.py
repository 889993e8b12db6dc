"""Names and ids; each has its own type, so that type checks find confused ids."""

from __future__ import annotations

from typing import NewType

EnvironmentName = NewType("EnvironmentName", str)
WorkerId = NewType("WorkerId", str)
SessionId = NewType("SessionId", str)
Owner = NewType("Owner", str)
"""The name of the key that a session belongs to; ``""`` if no keys are configured."""
