"""Servers that somebody else runs: what they are, and the environments made of them (``--static NAME=URL``)."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.catalog.inspect.detect import detect
from gateway.catalog.inspect.findings import Findings
from gateway.catalog.inspect.probe import Unanswered, probing, until_up
from gateway.catalog.toml import STATIC_IMAGE
from gateway.core.environment import (
    ActionMapping,
    ActionType,
    Areal,
    Environment,
    ObservationType,
    OpenEnv,
    PoolPolicy,
    ResetMapping,
    Server,
    ServerProtocol,
)
from gateway.core.errors import ConfigError
from gateway.core.ids import EnvironmentName

PLACES = ("split", "index")
"""Reset arguments of OpenEnv's Task API."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


async def detect_url(url: str, *, timeout_s: float, environment: str = "") -> Findings:
    """Find out what is behind *url*, waiting at most *timeout_s* for a server that is not up yet.

    *environment* is the one of several to look at, by the server's own name; empty: its first.

    Raises:
        ConfigError: nothing answers there, or what does is no server that can be used; with the URL and the reason.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL: http://host:port, or https://…")
    async with probing(url) as server:
        try:
            await until_up(server, timeout_s=timeout_s)
            return await detect(server, environment=environment)
        except (Unanswered, ConfigError) as error:
            raise ConfigError(f"{url}: {error}") from error


def environment_of(name: str, url: str, findings: Findings) -> Environment:
    """Make an environment of a server that somebody else runs; *name* is what trainers call it."""
    return Environment(
        name=EnvironmentName(name),
        image=STATIC_IMAGE,
        directory=Path(),
        command=(),
        description=findings.description,
        protocol=findings.protocol,
        upstream_name=upstream_name(name, findings),
        pool=PoolPolicy(slots=findings.capacity.slots, max_workers=1),
        server=Server(url=url.rstrip("/"), ready=findings.ready),
        actions=ActionMapping(default_tool=findings.default_tool, text_field=findings.text_field),
        resets=ResetMapping(keys=reset_keys(findings)),
        areal=Areal(
            split=first_split(findings) or Areal().split,
            max_turns=findings.max_turns or Areal().max_turns,
            observation_type=findings.observation_type or ObservationType.TEXT,
            action_type=findings.action_type or ActionType.TEXT,
        ),
        openenv=OpenEnv(split=first_split(findings) or OpenEnv().split),
    )


def upstream_name(name: str, findings: Findings) -> str:
    """What the server calls it, where that is not *name*, and its protocol has names at all."""
    is_named = findings.protocol is not ServerProtocol.AREAL and _NAME.fullmatch(findings.chosen)
    return findings.chosen if is_named and findings.chosen != name else ""


def reset_keys(findings: Findings) -> tuple[str, ...]:
    """The arguments that its reset is taken to look at."""
    usual = ResetMapping().keys
    return (*usual, *PLACES) if findings.places else usual


def first_split(findings: Findings) -> str:
    """The split that is meant where none is named, if it is not the usual one."""
    names = [split.name for split in findings.splits]
    return names[0] if names and Areal().split not in names else ""
