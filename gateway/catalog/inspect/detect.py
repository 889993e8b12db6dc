"""Which protocol a server speaks, decided by what it says of itself, from the surest sign to the weakest.

OpenEnv servers since 0.4.1 answer ORS' ``/list_environments`` and ``/{env}/splits`` too, so these alone decide nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.catalog.inspect import areal, openenv, ors
from gateway.catalog.inspect.findings import Findings
from gateway.catalog.inspect.probe import Probe, ProbeAnswer, Unanswered, probing, until_up
from gateway.core.errors import ConfigError

API_PATHS = ("/api", "")
"""Where an AReaL task server has its routes: the written API says ``/api``, some serve without."""


class NotRecognised(ConfigError):
    """It answers, but as none of the servers that are known here."""


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


async def detect(server: Probe, *, environment: str = "") -> Findings:
    """Find out what *server*, which is up, is; opens and ends sessions of trial.

    *environment* is the one to look at, by the server's own name; empty: its first.

    Raises:
        NotRecognised: it is none of the three, or one that no client of today could use; with what was seen.
        Unanswered: it ceased to answer.
    """
    openapi = (await server.get("/openapi.json")).object()
    paths = _paths(openapi)
    if openenv.has_form(paths):
        return await openenv.look(server, openapi, environment=environment)
    if ors.has_form(paths):
        return await ors.look(server, openapi, environment=environment)
    for prefix in API_PATHS:
        info = (await _asked(server, f"{prefix}/task/info")).object()
        if areal.is_info(info):
            return await areal.look(server, info, prefix=prefix)
    health = await _asked(server, "/health")
    # Without an OpenAPI document (one can be switched off) the answers themselves decide.
    if health.object().get("status") == "healthy" and (await _asked(server, "/schema")).object().get("action"):
        return await openenv.look(server, openapi, environment=environment)
    if isinstance((await _asked(server, "/list_environments")).json(), list):
        return await ors.look(server, openapi, environment=environment)
    raise NotRecognised(_unknown(paths, health))


def _paths(openapi: Mapping[str, Any]) -> frozenset[str]:
    paths = openapi.get("paths")
    return frozenset(paths) if isinstance(paths, dict) else frozenset()


async def _asked(server: Probe, path: str) -> ProbeAnswer:
    try:
        return await server.get(path)
    except Unanswered:
        return ProbeAnswer(0, b"")


def _unknown(paths: frozenset[str], health: ProbeAnswer) -> str:
    shown = ", ".join(sorted(paths)[:12]) or "no /openapi.json"
    return (
        "it answers HTTP, but as no ORS, OpenEnv or AReaL server: "
        f"GET /health is {health.status or 'unanswered'} {health.text()!r}; its routes: {shown}"
    )
