"""A task that was found, and what its worker is told of it.

Openings that no trainer gives a seed get one of their group: the same for all members, so that they begin alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.session import Group, GroupMembership, SessionSetup
from gateway.tasks.curricula.model import Curriculum

LABEL_MAX: Final = 200
"""Characters of a task's name for people."""


@dataclass(frozen=True, slots=True)
class CurriculumIndex:
    """An index of a curriculum's split; None: whatever is drawn next."""

    scope: Curriculum
    index: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRef:
    """One task, and where it stands."""

    spec: Mapping[str, Any]
    split: str = ""
    """Empty: nobody knows where, as only the image has it."""
    index: int | None = None
    is_images: bool = False
    """The image has it by itself: split and index are its own words, and nothing of it is the gateway's."""
    handle: CurriculumIndex | None = None
    """It stands for a task that is to be drawn."""
    ticket: GroupMembership | None = None
    """Of a task that was drawn: to be given back if nothing is opened with it."""
    policy: str = ""
    """The tag of the policy that a curriculum's trainer plays now."""

    @property
    def id(self) -> str | None:
        """The id that it bears, if any."""
        id = self.spec.get("id")
        return id if isinstance(id, str) else None

    @property
    def place(self) -> str:
        """Its name for people: ``split/index``."""
        return f"{self.split}/{self.index}" if self.split else str(self.spec.get("id", ""))[:LABEL_MAX]

    @property
    def label(self) -> str:
        """Its name for people who know it by its id: that, else ``split/index``."""
        return self.place if self.id is None else self.id[:LABEL_MAX]

    def setup(
        self,
        *,
        seed: int | None = None,
        config: Mapping[str, Any] | None = None,
        secrets: Mapping[str, str] = MappingProxyType({}),
        toolset: str = "",
        episode: str = "",
        policy: str = "",
        group: Group | None = None,
    ) -> SessionSetup:
        """Return what its worker is told, with what the trainer asks for besides; see ``SessionSetup``.

        *policy* goes before the one that the curriculum's trainer plays.
        """
        return SessionSetup(
            spec=self.spec,
            seed=seed,
            config=config,
            secrets=secrets,
            split=self.split if self.is_images else "",  # the worker knows no other splits
            index=self.index if self.is_images else None,
            toolset=toolset,
            episode=episode,
            of_split=self.split,
            policy=policy or self.policy,
            group=group,
            ticket=self.ticket,
        )


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
    """Whether a third-party server finds a seed in the task or the configuration, which another would replace.

    Our own environments are told both.
    """
    places = (setup.spec, setup.spec.get("config"), setup.spec.get("environment_config"), setup.config)
    return environment.server.is_foreign and any(isinstance(place, Mapping) and "seed" in place for place in places)
