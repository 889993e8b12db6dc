"""Finds the external servers of ``gateway serve --static``: each is inspected, and offered as soon as it answers.

A start waits a while for all of them, and goes on without servers that do not answer, if there is another one. They
are inspected again and again until they are found.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from gateway.catalog.reload import retry_s
from gateway.core.environment import Environment
from gateway.core.errors import ConfigError

logger = logging.getLogger(__name__)

WAIT_S: Final = 30.0
"""Seconds that a start waits for all servers, and that a server has to answer its first request."""


class StaticServers:
    """The external servers of the settings, and those of them that are not found yet."""

    def __init__(self, servers: Mapping[str, str], *, step_s: float = 0.0) -> None:
        """Check names and URLs, and start nothing yet.

        Args:
            servers: URL by name of the environment. ``URL#NAME`` chooses one of a server's environments.
            step_s: Time limit of a reset and of a step, in seconds; 0: it follows from the measured times.

        Raises:
            ConfigError: A name is not allowed.
        """
        from gateway.catalog.inspect.toml_writer import check_name

        self._urls = {check_name(name): url for name, url in servers.items()}
        self._step_s = step_s
        self._inspections: dict[str, asyncio.Task[Environment]] = {}
        self.missing: dict[str, str] = {}
        """Why a server is not offered yet, by name."""

    async def find(self) -> list[Environment]:
        """Inspect all servers, and return the environments of all that are found. After `WAIT_S`, one is enough.

        Raises:
            ConfigError: None was found; the message has each server's reason.
        """
        self._inspections = {name: asyncio.create_task(self._inspect(name)) for name in self._urls}
        running = set(self._inspections.values())
        _, running = await asyncio.wait(running, timeout=WAIT_S)
        while running and not any(_is_found(one) for one in self._inspections.values()):
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        found = [one.result() for one in self._inspections.values() if _is_found(one)]
        self._inspections = {name: one for name, one in self._inspections.items() if not _is_found(one)}
        self.missing = {name: self._why(one) for name, one in self._inspections.items()}
        if not found:
            raise ConfigError("; ".join(self.missing.values()))
        for name in self.missing:
            logger.warning("static_server_missing environment=%s url=%s retried=True", name, self._urls[name])
        return found

    async def run(self, offer: Callable[[Environment], None]) -> None:
        """Inspect the missing servers until all are found, and *offer* each."""
        await asyncio.gather(*(self._follow(name, one, offer) for name, one in self._inspections.items()))

    async def _follow(
        self, name: str, inspection: asyncio.Task[Environment], offer: Callable[[Environment], None]
    ) -> None:
        failures = 0
        while True:
            try:
                environment = await inspection
                break
            except ConfigError:
                failures += 1
                await asyncio.sleep(retry_s(failures))
                inspection = asyncio.create_task(self._inspect(name))
        try:
            offer(environment)
        except ConfigError as error:  # a file offers another one of this name by now
            logger.error("static_server_refused environment=%s error=%s", name, error.detail)

    def _why(self, inspection: asyncio.Task[Environment]) -> str:
        return str(inspection.exception()) if inspection.done() else "the gateway still inspects its server"

    async def _inspect(self, name: str) -> Environment:
        """Inspect a server, and log the result. Raises ``ConfigError``."""
        # Imported here, because detect needs httpx, which takes 40 ms to import.
        from gateway.catalog.inspect.detect import detect_url
        from gateway.catalog.inspect.toml_writer import environment_of

        url, _, wanted = self._urls[name].partition("#")
        try:
            findings = await detect_url(url, timeout_s=WAIT_S, environment=wanted)
            environment = environment_of(name, url, findings)
        except ConfigError as error:
            logger.warning("static_server_failed environment=%s url=%s error=%s", name, url, error.detail)
            raise
        except Exception as error:  # a strange answer of one server must not end the gateway
            logger.exception("static_server_failed environment=%s url=%s", name, url)
            raise ConfigError(f"{url}: a fault of the gateway, see its log") from error
        if self._step_s:
            environment = _with_limit(environment, self._step_s)
        logger.info(
            "static_server environment=%s url=%s protocol=%s slots=%s step_s=%g others=%s",
            name,
            environment.server.url,
            environment.protocol.value,
            "learned" if environment.pool.learns_slots else environment.pool.slots,
            environment.openenv.step_s,
            ",".join(one for one in findings.environments if one != findings.chosen),
        )
        return environment


def _is_found(inspection: asyncio.Task[Environment]) -> bool:
    return inspection.done() and not inspection.cancelled() and inspection.exception() is None


def _with_limit(environment: Environment, step_s: float) -> Environment:
    """Return *environment* with the time limit *step_s* for each reset, start and step."""
    timeouts = environment.timeouts
    return replace(
        environment,
        openenv=replace(environment.openenv, reset_s=step_s, step_s=step_s),
        areal=replace(environment.areal, start_s=step_s, step_s=step_s),
        timeouts=replace(timeouts, setup_s=max(timeouts.setup_s, step_s)),
    )
