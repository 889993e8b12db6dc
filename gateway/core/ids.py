"""Names and ids; each has its own type, so that type checks find confused ids."""

from __future__ import annotations

from typing import Final, NewType

EnvironmentName = NewType("EnvironmentName", str)
WorkerId = NewType("WorkerId", str)
SessionId = NewType("SessionId", str)
Owner = NewType("Owner", str)
"""The name of the key that a session belongs to; ``""`` if no keys are configured."""

PROBER: Final = Owner("(probe)")
"""Owner of the episodes in which the gateway tries whether tasks can be opened."""
REPLAYER: Final = Owner("(replay)")
"""Owner of the episodes in which the gateway repeats recorded episodes."""
GATEWAYS_OWN: Final = frozenset((PROBER, REPLAYER))
"""Owners of episodes that no trainer plays. Their results say nothing about a policy, so they are not counted."""
