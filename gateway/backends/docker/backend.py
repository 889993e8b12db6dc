"""Workers as containers of a Docker engine, or of the engine gate in front of one; hardened as DESIGN 8 says.

A worker's only door is a Unix socket in a folder that it shares with the gateway, so its container needs no network.
A worker of a third-party image listens on TCP. A second container (`container`) makes a Unix socket of its port. The
two live and die together.

The engine must see that folder: under the same path (a gateway on the engine's machine), or as a volume that is also
mounted at the gateway (``socket_volume``). The folder is made for everybody, as the worker is another user than the
gateway; nobody else can reach it, because the folder above lets nobody list it and worker ids are not guessable.

What a worker puts into its socket folder can be removed by root and by the user that workers run as
(``Loosened.user``): a gateway that is neither leaves the folders behind in which a worker made folders of its own, and
says so (``worker_folder_left``).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from docker import APIClient

from gateway.backends.docker import calls
from gateway.backends.docker.calls import shortcomings, with_splits
from gateway.backends.docker.container import (
    FORWARDER_IMAGE,
    LABEL_DIGEST,
    LABEL_ENVIRONMENT,
    LABEL_ROLE,
    LABEL_WORKER,
    Role,
    container_body,
    container_name,
    forwarder_body,
    forwarder_name,
    owned_filter,
    server_body,
)
from gateway.backends.docker.deaths import REASON_S, DeathWatcher
from gateway.backends.docker.engine import LOOK_S, TIMEOUT_S, Engine, EngineError
from gateway.backends.docker.images import Images
from gateway.backends.docker.mounts import HostPaths, Sources
from gateway.backends.folders import SOCKET_NAME, Folders, RemoteFolders, SocketFolders
from gateway.backends.launch import CancelToken, Launches, raise_first
from gateway.core.addresses import FOREIGN_SOCKET
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.worker import BackendWorker, Death, Worker

logger = logging.getLogger(__name__)

PULL_THREADS = 2
"""Threads that only pull: a pull takes minutes, and the threads that stop workers must not wait for it."""
KILL_S = 5.0
"""From SIGKILL to the end; more means that the kernel cannot end a process."""
STOP_PAUSE_S = 0.05
"""Between two looks whether a worker that was asked to end has ended (a look costs the engine 1 ms)."""
DEAD_LOG_LINES = 20
CLOSE_S = 10.0
"""How long ``aclose`` waits for launches to be undone."""
_RUNNING = frozenset(["running", "paused", "restarting"])
_ROLES = frozenset(Role)


@dataclass(slots=True)
class _Made:
    """What a launch has made so far, that is what its undo has to remove."""

    folder: bool = False
    containers: list[str] = field(default_factory=list)
    unsure: set[str] = field(default_factory=set)
    """Names of those whose making the engine was asked for, and did not answer: they may come to be yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePace:
    """How much an engine is asked at once, and how long its answers may take."""

    threads: int = 8
    """Calls on the engine at once. It starts 5 to 7 containers a second at any parallelism."""
    stop_grace_s: float = 2.0
    """From SIGTERM to SIGKILL. Sessions have ended by then: what still runs is a step that overran, and the worker's
    successor may wait for its place."""
    silence_s: float = TIMEOUT_S
    """The engine's longest silence within a call."""
    reason_s: float = REASON_S
    """How long a death may be kept back for its reason."""


class DockerBackend(Backend):
    """Starts and stops containers.

    Args:
        url: The engine's socket, or the gate's: ``unix:///…``.
        instance: Label of everything that this backend makes.
        paths: Where the files of workers are.
        owner: The gateway's identity, another label. The backend sees, counts and removes only what has both labels.
            Replicas that share a store have the same owner. Empty: *instance* alone decides.
        environments: `check` tries the engine with the first one whose images are there.
        forwarder_image: The image beside third-party images: one of ours, for its ``envserver``.
        pace: How the engine is asked.
    """

    def __init__(
        self,
        *,
        url: str,
        instance: str,
        paths: HostPaths,
        owner: str = "",
        environments: Collection[Environment] = (),
        forwarder_image: str = FORWARDER_IMAGE,
        pace: EnginePace = EnginePace(),
    ) -> None:
        """Make no connection yet."""
        self._instance = instance
        self._owner = owner
        self._own = owned_filter(instance, owner)
        self._grace_s = pace.stop_grace_s
        self._environments = tuple(environments)
        self._forwarder_image = forwarder_image
        here = SocketFolders(paths.socket_dir.absolute(), mode=0o777)
        self._folders: Folders = here if paths.node is None else RemoteFolders(paths.socket_dir, paths.node)
        self._engine = Engine(url, threads=pace.threads, silence_s=pace.silence_s)
        self._sources = Sources(self._engine, self._folders, paths)
        self._puller = Engine(url, threads=PULL_THREADS, silence_s=pace.silence_s)
        self._images = Images(self._engine, self._puller, forwarder_image=forwarder_image)
        self._launches = Launches()
        self._endings = DeathWatcher(url, self._own, reason_s=pace.reason_s)
        self._closed = False

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start a container; see ``Backend.start``.

        An image that is missing is pulled only if its name says where from (a registry, or a digest).
        """
        if self._closed:
            raise StartFailed("the backend is closed")
        made = _Made()
        try:
            return await self._launches.run(
                partial(self._launch, worker, environment, made), partial(self._undo, worker.id, made), lease
            )
        except EngineError as error:
            told = self._sources.explained(error, worker.id, environment)
            if error.is_silence:  # no fault of the image's
                raise BackendError(f"{environment.image}: {told}") from error
            raise StartFailed(f"{environment.image}: {told}") from error

    async def stop(self, id: WorkerId) -> None:
        """Send SIGTERM, SIGKILL after the grace, and remove container and folder; see ``Backend.stop``."""
        entries = await self._containers(id)
        # In this order, whatever fails or is cancelled between: containers are found again, a folder alone is not.
        raise_first(await asyncio.gather(*[self._end(entry) for entry in entries], return_exceptions=True))
        await self._remove_folder(id)
        removals = [self._engine.call(partial(calls.remove, container=entry["Id"])) for entry in entries]
        raise_first(await asyncio.gather(*removals, return_exceptions=True))

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """See ``Backend.logs``."""
        # A forwarder says nothing, unless it fails.
        entries = sorted(await self._containers(id), key=lambda entry: _role(entry) is Role.FORWARDER)
        return "".join([await self._log(entry["Id"], lines) for entry in entries])

    async def found(self) -> list[BackendWorker]:
        """List by label in one call; a worker that is being created counts as not running."""
        entries = await self._engine.call(partial(calls.listed, labels=self._own), silence_s=LOOK_S)
        workers: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            if LABEL_WORKER in entry["Labels"]:
                workers.setdefault(entry["Labels"][LABEL_WORKER], []).append(entry)
        return [self._found(WorkerId(id), parts) for id, parts in workers.items()]

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """Freeze all of its containers, or none; see ``Backend.pause``."""

        async def steps(wanted: CancelToken) -> None:
            await self._all_of(id, wanted.guarded(calls.pause))

        async def undo() -> None:
            await self._thaw(await self._containers(id))

        await self._launches.run(steps, undo, lease)

    async def resume(self, id: WorkerId) -> None:
        """Let all of its containers go on; see ``Backend.resume``."""
        await self._all_of(id, calls.unpause)

    async def prepare(self, environment: Environment) -> str:
        """Pull what is missing of the images that it needs; see ``Backend.prepare``.

        An image that is there is taken as it is, also where its registry has a newer one of that name.
        """
        if self._closed:
            raise StartFailed("the backend is closed")
        return await self._launches.run(partial(self._images.prepare, environment), _nothing)

    def deaths(self) -> AsyncIterator[Death]:
        """Follow the engine's ``oom`` and ``die`` events; see ``Backend.deaths``."""
        return self._endings.follow()

    async def check(self) -> None:
        """Ask whether the engine answers, has enough for one worker each, and sees the socket folder.

        The latter needs an image that is there.
        """
        await asyncio.to_thread(self._folders.check, len(secrets.token_hex(8)))
        await self._engine.call(APIClient.ping, silence_s=LOOK_S)
        if lacks := shortcomings(self._environments, await self._engine.call(APIClient.info, silence_s=LOOK_S)):
            raise BackendError("; ".join(lacks))
        for environment in with_splits(self._environments):
            if await self._images.are_there(environment):
                await self._probe(environment)
                return
        logger.info("backend_probe_skipped reason=no_image_of_an_environment_is_here")

    async def aclose(self) -> None:
        """Let go of threads and clients; containers go on."""
        if self._closed:
            return
        self._closed = True
        await self._launches.drain(CLOSE_S)
        # At once: each may wait for an engine that hangs.
        await asyncio.gather(self._endings.aclose(), self._puller.aclose(), self._engine.aclose())

    async def _launch(self, worker: Worker, environment: Environment, made: _Made, wanted: CancelToken) -> str:
        if environment.server.is_foreign:
            return await self._launch_foreign(worker, environment, made, wanted)
        container = await self._create(worker, environment, made, wanted)
        await self._start(container, wanted)
        await self._expect_running(container, environment.image)
        return self._folders.address(worker.id)

    async def _launch_foreign(self, worker: Worker, environment: Environment, made: _Made, wanted: CancelToken) -> str:
        server = await self._create(worker, environment, made, wanted)
        # At once; and both are waited for, whatever becomes of one, as neither can be called back.
        started, forwarder = await asyncio.gather(
            self._start(server, wanted),
            self._create_forwarder(worker, environment, server, made, wanted),
            return_exceptions=True,
        )
        raise_first([started])
        if isinstance(forwarder, BaseException):
            raise forwarder
        try:
            await self._start(forwarder, wanted)
        except EngineError:  # as of a server that has died: there is nothing to share then
            await self._expect_running(server, environment.image)
            raise
        await self._expect_running(server, environment.image)
        await self._expect_running(forwarder, self._forwarder_image)
        return self._folders.address(worker.id, FOREIGN_SOCKET)

    async def _create(self, worker: Worker, environment: Environment, made: _Made, wanted: CancelToken) -> str:
        """Make folder and container; returns the container's id."""
        await asyncio.to_thread(wanted.guarded(self._folders.make), worker.id)
        made.folder = True
        await self._sources.expect_volumes(environment)
        if environment.server.is_foreign:
            body = server_body(worker, environment, instance=self._instance, owner=self._owner)
        else:
            body = container_body(
                worker,
                environment,
                instance=self._instance,
                owner=self._owner,
                source=await self._sources.sockets(worker.id),
                custom_tasks_source=await self._sources.custom_tasks(environment),
            )
        return await self._make(body, container_name(self._instance, environment.name, worker.id), made, wanted)

    async def _create_forwarder(
        self, worker: Worker, environment: Environment, beside: str, made: _Made, wanted: CancelToken
    ) -> str:
        body = forwarder_body(
            worker,
            environment,
            instance=self._instance,
            owner=self._owner,
            source=await self._sources.sockets(worker.id),
            beside=beside,
            image=self._forwarder_image,
        )
        return await self._make(body, forwarder_name(self._instance, environment.name, worker.id), made, wanted)

    async def _make(self, body: dict[str, Any], name: str, made: _Made, wanted: CancelToken) -> str:
        create = wanted.guarded(partial(calls.create, body=body, name=name))
        made.containers.append(name)  # even without an answer it may come to be
        try:
            try:
                created = await self._engine.call(create)
            except EngineError as error:
                if not error.is_image_missing:
                    raise
                await self._images.fetch(body["Image"], wanted)
                created = await self._engine.call(create)
        except EngineError as error:
            if 400 <= error.status < 500:
                made.containers.remove(name)  # a refusal: what bears that name, if anything, is not ours to undo
            elif error.is_silence:
                made.unsure.add(name)
            raise
        made.containers[made.containers.index(name)] = created
        return created

    async def _start(self, container: str, wanted: CancelToken) -> None:
        await self._engine.call(wanted.guarded(partial(APIClient.start, container=container)))

    async def _expect_running(self, container: str, image: str) -> None:
        state = await self._engine.call(partial(calls.state, container=container), silence_s=LOOK_S)
        if not state["Running"]:
            log = await self._log(container, DEAD_LOG_LINES)
            raise StartFailed(f"{image} died at once ({calls.cause(state)})\n{log}".rstrip())

    async def _log(self, container: str, lines: int) -> str:
        return await self._engine.call(partial(calls.logs, container=container, lines=lines), silence_s=LOOK_S)

    async def _all_of(self, id: WorkerId, act: Callable[..., None]) -> None:
        """Do *act* with each container of worker *id*.

        Raises:
            BackendError: it has none, or the engine refused.
        """
        entries = await self._containers(id)
        if not entries:
            raise BackendError(f"there is no worker {id}")
        acts = [self._engine.call(partial(act, container=entry["Id"]), silence_s=LOOK_S) for entry in entries]
        raise_first(await asyncio.gather(*acts, return_exceptions=True))

    async def _thaw(self, entries: Iterable[dict[str, Any]]) -> None:
        for entry in entries:
            if entry["State"] != "paused":
                continue
            try:
                await self._engine.call(partial(calls.unpause, container=entry["Id"]), silence_s=LOOK_S)
            except EngineError as error:  # it is dead, or gone
                if error.is_silence:
                    raise

    async def _undo(self, id: WorkerId, made: _Made) -> None:
        try:
            removals = [self._engine.call(partial(calls.remove, container=one)) for one in made.containers]
            outcomes = await asyncio.gather(*removals, return_exceptions=True)
            raise_first(outcomes)
            absent = {name for name, was_there in zip(made.containers, outcomes, strict=True) if was_there is False}
            if missing := absent & made.unsure:
                made.unsure -= missing  # looked for once more: an engine that hung does what it was asked for later
                raise BackendError(f"{', '.join(sorted(missing))}: not there, and may come to be yet")
        finally:  # a container that is left is found by its label; a folder without one is not
            if made.folder:
                await self._remove_folder(id)

    async def _remove_folder(self, id: WorkerId) -> None:
        try:
            await asyncio.to_thread(self._folders.remove, id)
        except BackendError as error:
            # The worker is gone, which is what matters; to try again would end the same.
            logger.error("worker_folder_left worker=%s error=%s", id, error)

    async def _containers(self, id: WorkerId) -> list[dict[str, Any]]:
        labels = [*self._own, f"{LABEL_WORKER}={id}"]
        return await self._engine.call(partial(calls.listed, labels=labels), silence_s=LOOK_S)

    async def _end(self, entry: dict[str, Any]) -> None:
        """Let a container end, by force after the grace; a forwarder has nothing to tidy up, and is just removed."""
        if _role(entry) is Role.FORWARDER:
            return
        await self._thaw([entry])  # else it would not hear that it is to end
        if not await self._has_ended_of("SIGTERM", entry["Id"], self._grace_s):
            logger.info("worker_killed container=%s grace_s=%.1f", entry["Id"][:12], self._grace_s)
            await self._has_ended_of("SIGKILL", entry["Id"], KILL_S)

    async def _has_ended_of(self, signal: str, container: str, within_s: float) -> bool:
        """Send *signal* and wait for the end, without holding a thread meanwhile."""
        ended = await self._engine.call(partial(calls.send_signal, container=container, signal=signal))
        try:
            async with asyncio.timeout(within_s):
                while not ended:
                    await asyncio.sleep(STOP_PAUSE_S)
                    ended = not (await self._engine.call(partial(calls.state, container=container)))["Running"]
        except TimeoutError:
            return False
        return True

    async def _probe(self, environment: Environment) -> None:
        """Create a container, without starting it, whose folder was made by us just now.

        Found by `found` like any worker, so that even one that is left by a crash here is removed by the next audit.
        """
        id = WorkerId(f"probe-{secrets.token_hex(4)}")
        worker = Worker(id=id, environment=environment.name, digest=environment.digest(), slots=1)
        made = _Made()

        async def steps(wanted: CancelToken) -> None:
            container = await self._create(worker, environment, made, wanted)
            if environment.server.is_foreign:
                await self._create_forwarder(worker, environment, container, made, wanted)

        undo = partial(self._undo, id, made)
        try:
            await self._launches.run(steps, undo)
        except EngineError as error:
            raise BackendError(self._sources.explained(error, id, environment)) from error
        await undo()

    def _found(self, id: WorkerId, parts: list[dict[str, Any]]) -> BackendWorker:
        labels: dict[str, str] = parts[0]["Labels"]
        roles = {role for part in parts if (role := _role(part)) is not None}
        return BackendWorker(
            id=id,
            environment=EnvironmentName(labels.get(LABEL_ENVIRONMENT, "")),
            digest=labels.get(LABEL_DIGEST, ""),
            address=self._folders.address(id, FOREIGN_SOCKET if roles else SOCKET_NAME),
            running=(not roles or roles == _ROLES) and all(part["State"] in _RUNNING for part in parts),
        )


async def _nothing() -> None:
    """Undo nothing: an image that was pulled may stay."""


def _role(entry: dict[str, Any]) -> Role | None:
    given = entry["Labels"].get(LABEL_ROLE)
    return Role(given) if given in _ROLES else None
