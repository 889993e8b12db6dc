"""Detects a server's protocol from its answers, from the surest sign to the weakest.

OpenEnv servers since 0.4.1 also answer ``/list_environments`` and ``/{env}/splits`` of ORS, so these paths alone do not
decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.catalog.inspect import areal, nemo, openenv, ors
from gateway.catalog.inspect.findings import Findings
from gateway.catalog.inspect.probe import Probe, ProbeAnswer, Unanswered, probing, until_up
from gateway.core.errors import ConfigError
from gateway.upstreams.nemo.codec import is_server

API_PATHS = ("/api", "")
"""Prefixes of an AReaL task server's routes: ``/api`` in the API's documentation, none in some servers."""


class NotRecognised(ConfigError):
    """The server answers, but not as a known ORS, OpenEnv, AReaL or NeMo Gym server."""


async def detect_url(url: str, *, timeout_s: float, environment: str = "") -> Findings:
    """Inspect the server at *url*. Wait at most *timeout_s* seconds for a server that is not up yet.

    *environment* is the server's own name of the environment to inspect; empty: its first environment.

    Raises:
        ConfigError: No server answers, or the server is not usable; the message has the URL and the reason.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not a URL: http://host:port, or https://…")
    async with probing(url) as server:
        try:
            await until_up(server, timeout_s=timeout_s)
            return await detect(server, environment=environment)
        except (Unanswered, ConfigError) as error:
            raise ConfigError(f"{url}: {error}") from error


async def detect(server: Probe, *, environment: str = "") -> Findings:
    """Inspect *server*, which is up. Open and end trial sessions on it.

    *environment* is the server's own name of the environment to inspect; empty: its first environment.

    Raises:
        NotRecognised: The server speaks none of the four protocols; the message has its answers.
        ConfigError: The server is too old, or does not have *environment*.
        Unanswered: The server stopped answering.
    """
    openapi = (await server.get("/openapi.json")).object()
    paths = _paths(openapi)
    if openenv.has_form(paths):
        return await openenv.look(server, openapi, environment=environment)
    if ors.has_form(paths):
        return await ors.look(server, openapi, environment=environment)
    if is_server(paths):
        return nemo.look(openapi)
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
        "it answers HTTP, but as no ORS, OpenEnv, AReaL or NeMo Gym server: "
        f"GET /health is {health.status or 'unanswered'} {health.text()!r}; its routes: {shown}"
    )
