"""Inspects NeMo Gym's resources servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.catalog.inspect.findings import Capacity, Finding, Findings
from gateway.core.environment import ServerProtocol
from gateway.upstreams.nemo.codec import REPLY, TEXT, server_info

SLOTS = 16
"""Assumed capacity: the API does not report it."""


def look(openapi: Mapping[str, Any]) -> Findings:
    """Read *openapi*, the server's description of its routes. An episode needs a row of the server's data set."""
    told = server_info(openapi)
    return Findings(
        protocol=ServerProtocol.NEMO,
        version="a NeMo Gym server with steps" if told.is_gym else "a NeMo Gym resources server",
        capacity=Capacity(SLOTS, Finding.ASSUMED),
        tools=tuple(tool.name for tool in told.tools),
        terminal="" if told.is_gym else f"{REPLY}.{TEXT}",
        remarks=(
            "NeMo Gym servers do not report how many episodes they can hold: 16 is a guess.",
            "Its tasks are the rows of its data set: `gateway tasks import nemo-gym data/example.jsonl` makes them, "
            "for the folder that [tasks] names.",
        ),
    )
