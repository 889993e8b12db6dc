"""Seeds of openings that no trainer gives one: the same for all members of a group, so that they begin alike."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from gateway.core.environment import Environment
from gateway.core.session import SessionSetup


def seed_of(name: str) -> int:
    """A seed for *name*, in [0, 2**31): the same in every process, so that all members of a group agree."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:4], "big") >> 1


def seeded(environment: Environment, setup: SessionSetup) -> SessionSetup:
    """Return *setup* with a seed made of its group, unless it has no group or somebody gave a seed."""
    group = setup.ticket.group if setup.ticket is not None else setup.group
    if setup.seed is not None or group is None or _says_a_seed(environment, setup):
        return setup
    return replace(setup, seed=seed_of(group.name))


def _says_a_seed(environment: Environment, setup: SessionSetup) -> bool:
    """Whether a foreign server finds a seed in the task or the trainer's configuration, which another would replace.

    Our own environments are told both.
    """
    places = (setup.spec, setup.spec.get("config"), setup.spec.get("environment_config"), setup.config)
    return environment.server.is_foreign and any(isinstance(place, Mapping) and "seed" in place for place in places)
