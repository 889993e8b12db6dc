"""Runs an unknown image as the gateway would run it: hardened, and with more privileges only if it needs them.

Each started container is removed again, also after an interrupt. A trial never grants a network or a capability: an
operator who needs these adds them to the file.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio

from gateway.catalog.inspect.detect import NotRecognised, detect
from gateway.catalog.inspect.findings import Findings, Ran, TrialRequest, one_line
from gateway.catalog.inspect.image import Image, ImageInspector
from gateway.catalog.inspect.probe import Probe, Unanswered, probing, until_up
from gateway.core.environment import Environment, Limits, Relaxations, Server
from gateway.core.errors import ConfigError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.ports.backend import Backend
from gateway.core.worker import Worker

USUAL_PORTS = (8000, 8080, 5000)
"""Usual ports of OpenEnv images, of ORS servers, and of AReaL's examples."""
STOP_S = 30.0
"""Maximum seconds that an interrupted inspection waits for the container's removal."""
LOOK_EVERY_S = 1.0
"""Seconds between two checks of a container whose server does not answer."""
SETTLED = 3
"""Consecutive checks that must find the server on other ports only, before the trial uses these ports."""
LIMITS = Limits(memory_bytes=4 * 2**30, cpus=2.0, pids=1024, tmp_bytes=256 * 2**20)
"""Generous limits of a trial, because it measures what the image uses."""
LOG_LINES = 15


class _ListensElsewhere(Exception):
    def __init__(self, ports: frozenset[int]) -> None:
        super().__init__(", ".join(map(str, sorted(ports))))
        self.ports = ports


class _Silent(Unanswered):
    def __init__(self, message: str, listening: frozenset[int] | None) -> None:
        super().__init__(message)
        self.listening = listening
        """Ports on which the container listens; None: they cannot be determined."""


class _Ended(Exception):
    """The container ended by itself. The message has the end of its log."""


class TrialRuns:
    """Runs an image with more and more privileges until it works."""

    def __init__(self, *, backend: Backend, looking: ImageInspector, tell: Callable[[str], None]) -> None:
        """*tell* shows the progress to the operator, one line per call."""
        self._backend = backend
        self._looking = looking
        self._tell = tell

    async def run(self, wish: TrialRequest) -> tuple[Findings, Ran]:
        """Run the image hardened, add privileges after each failure, and inspect its server.

        If only the trial session fails in every run, return the first such run: more privileges did not help.

        Raises:
            ConfigError: The image is missing, does not start with any privileges, or is not a known kind of server.
            BackendError: The engine does not answer.
        """
        image = await self._looking.image(wish.image)
        troubled: tuple[Findings, Ran] | None = None
        failures: list[str] = []
        for loosened in ladder(image):
            how = ", ".join(loosened.words()) or "hardened"
            self._tell(f"starting {wish.image} ({how})")
            try:
                findings, ran = await self._run_at_a_port(wish, image, loosened)
            except (_Ended, Unanswered, StartFailed) as error:
                failures.append(last_line(str(error)))
                self._tell(f"  it does not work so: {failures[-1]}")
                continue
            ran = replace(ran, reason=failures[0] if failures else "")
            if not findings.trouble:
                return findings, ran
            failures.append(findings.trouble)
            self._tell(f"  its session of trial failed: {failures[-1]}")
            troubled = troubled or (findings, ran)
        if troubled is not None:
            return troubled
        raise ConfigError(f"{wish.image} did not work in any of its trials:\n" + "\n".join(_numbered(failures)))

    async def _run_at_a_port(self, wish: TrialRequest, image: Image, loosened: Relaxations) -> tuple[Findings, Ran]:
        ports = [wish.port] if wish.port else list(dict.fromkeys([*image.ports, *USUAL_PORTS]))
        tried: list[int] = []
        while True:
            port = ports.pop(0)
            tried.append(port)
            try:
                return await self._run_once(wish, port, loosened, may_move=not wish.port)
            except _ListensElsewhere as error:
                ports = sorted(error.ports - set(tried))
                self._tell(f"  nothing listens at port {port}, but at {error}")
            except _Silent as error:
                if error.listening is not None:  # a request to any other port would be without result
                    ports = sorted(error.listening - set(tried))
                if not ports or wish.port:
                    raise
            if not ports:
                raise Unanswered(f"it answers at none of its ports ({', '.join(map(str, tried))})")

    async def _run_once(
        self, wish: TrialRequest, port: int, loosened: Relaxations, *, may_move: bool
    ) -> tuple[Findings, Ran]:
        environment = Environment(
            name=EnvironmentName("inspection"),
            image=wish.image,
            directory=Path(),
            command=(),
            variables=wish.variables,
            limits=LIMITS,
            loosened=loosened,
            server=Server(port=port),
        )
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self._running(environment) as (worker, address), probing(address) as server:
            await self._until_up(server, worker, port, timeout_s=wish.timeout_s, may_move=may_move)
            start_s = loop.time() - begun
            self._tell(f"  it answers at port {port} after {start_s:.1f} s")
            try:
                findings = await detect(server, environment=wish.environment)
            except NotRecognised:
                raise
            except Unanswered as error:
                await self._check(worker)
                raise Unanswered(f"{error}; {await self._log(worker)}") from error
            use = await self._looking.use(worker)
        return findings, Ran(
            image=wish.image,
            port=port,
            loosened=loosened,
            memory_bytes=use.memory_bytes,
            pids=use.pids,
            start_s=start_s,
            variables=wish.variables,
        )

    async def _until_up(self, server: Probe, worker: WorkerId, port: int, *, timeout_s: float, may_move: bool) -> None:
        loop = asyncio.get_running_loop()
        next_look = loop.time() + LOOK_EVERY_S
        elsewhere: list[frozenset[int]] = []

        async def look() -> None:
            nonlocal next_look
            if loop.time() < next_look:
                return
            await self._check(worker)
            if may_move:
                ports = await self._looking.listening(worker)
                elsewhere.append(ports if ports and port not in ports else frozenset())
                # A server may open another port first, for example for its metrics.
                if len(elsewhere) >= SETTLED and all(elsewhere[-SETTLED:]):
                    raise _ListensElsewhere(elsewhere[-1])
            next_look = loop.time() + LOOK_EVERY_S

        try:
            await until_up(server, timeout_s=timeout_s, check=look)
        except Unanswered as error:
            ports = await self._looking.listening(worker)
            where = ", ".join(map(str, sorted(ports))) if ports else "no port"
            listens = "" if ports is None else f"; it listens at {where}"
            raise _Silent(f"no answer at port {port}: {error}{listens}; {await self._log(worker)}", ports) from error

    async def _check(self, worker: WorkerId) -> None:
        """Raise ``_Ended`` if the worker's container no longer runs."""
        if not any(found.id == worker and found.running for found in await self._backend.found()):
            raise _Ended(f"it ended by itself; {await self._log(worker)}")

    async def _log(self, worker: WorkerId) -> str:
        lines = [line.strip() for line in (await self._backend.logs(worker, lines=LOG_LINES)).splitlines()]
        return f"the end of its log: {one_line(next((line for line in reversed(lines) if line), 'nothing'))}"

    @asynccontextmanager
    async def _running(self, environment: Environment) -> AsyncIterator[tuple[WorkerId, str]]:
        id = WorkerId(f"inspection-{secrets.token_hex(6)}")
        worker = Worker(id=id, environment=environment.name, digest=environment.digest(), slots=1)
        address = await self._backend.start(worker, environment)
        try:
            yield id, address
        finally:
            # Also after a cancellation: the operator pressed Ctrl-C.
            with anyio.move_on_after(STOP_S, shield=True):
                await self._backend.stop(id)


def ladder(image: Image) -> Iterator[Relaxations]:
    """Yield the privileges to try for an image, from the hardened default upwards."""
    hardened = Relaxations()
    yield hardened
    yield replace(hardened, writable_root=True)
    if image.user != hardened.user:
        yield replace(hardened, user=image.user)
        yield replace(hardened, user=image.user, writable_root=True)


def last_line(text: str) -> str:
    """Return the last line of an error. For a failed start, this is the end of the container's log."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else "it reported no reason"


def _numbered(failures: Sequence[str]) -> Iterator[str]:
    for number, failure in enumerate(dict.fromkeys(failures), 1):
        yield f"  {number}. {failure}"
