"""Run workers as hardened containers of a Docker engine, directly or through the engine gate in front of it.

A worker listens only on a Unix socket in a folder that it shares with the gateway, so its container needs no network.
The server of a third-party image listens on TCP. A second container (`container`) offers its port as a Unix socket. The
two containers start and stop together.

The engine must see the socket folder. A gateway on the engine's machine uses the same path. Otherwise a volume must be
mounted at the gateway too (``socket_volume``). Every user may write to the folder, because the worker runs as another
user than the gateway. No other user can reach it: the parent folder can't be listed, and worker ids are not guessable.

Only root and the workers' user (``Relaxations.user``) can remove the folders that a worker creates in its socket
folder. A gateway that runs as neither leaves such socket folders behind, and logs ``worker_folder_left``.
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
"""Number of threads that only pull: a pull takes minutes, and the threads that stop workers must not wait for it."""
KILL_S = 5.0
"""Seconds from SIGKILL to the container's end. A longer time means that the kernel cannot end a process."""
STOP_PAUSE_S = 0.05
"""Seconds between two checks whether a stopping worker has ended. A check costs the engine 1 ms."""
DEAD_LOG_LINES = 20
CLOSE_S = 10.0
"""Seconds that ``aclose`` waits for launches and their undos."""
_RUNNING = frozenset(["running", "paused", "restarting"])
_ROLES = frozenset(Role)


@dataclass(slots=True)
class _Made:
    """The objects that a launch has created so far, and that its undo must remove."""

    folder: bool = False
    containers: list[str] = field(default_factory=list)
    unsure: set[str] = field(default_factory=set)
    """Names of containers whose create request got no answer: the engine may still create them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePace:
    """Limits on concurrent calls to an engine, and its timeouts."""

    threads: int = 8
    """Number of concurrent calls to the engine. An engine starts 5 to 7 containers per second at any parallelism."""
    stop_grace_s: float = 2.0
    """Seconds from SIGTERM to SIGKILL. Sessions have ended by then: only a step that overran still runs, and the
    worker's successor may wait for its place."""
    silence_s: float = TIMEOUT_S
    """Seconds of silence after which a call to the engine times out."""
    reason_s: float = REASON_S
    """Seconds for which a death's announcement may wait for the reason."""


class DockerBackend(Backend):
    """Starts and stops workers as containers.

    Args:
        url: Address of the engine's socket, or of the engine gate's: ``unix:///…``.
        instance: Label of every container of this backend.
        paths: Places of workers' files.
        owner: Label with the gateway's identity. The backend lists and removes only containers with both labels.
            Replicas that share a store have the same owner. If it is empty, *instance* alone selects containers.
        environments: All environments. `check` tests the engine with the first one whose images are present.
        forwarder_image: The gateway's own image that runs the forwarder of third-party images with its ``envserver``.
        pace: Concurrency and timeouts of calls to the engine.
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
        """Create the backend without connecting to the engine."""
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
        """Start a worker's container or containers; see ``Backend.start``.

        A missing image is pulled only if its name contains a registry or a digest.
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
            if error.is_silence:  # the image is not at fault
                raise BackendError(f"{environment.image}: {told}") from error
            raise StartFailed(f"{environment.image}: {told}") from error

    async def stop(self, id: WorkerId) -> None:
        """Send SIGTERM, then SIGKILL after the grace period; remove containers and folder. See ``Backend.stop``."""
        entries = await self._containers(id)
        # The folder goes before the containers: after a failure, `found` lists containers, but not a folder alone.
        raise_first(await asyncio.gather(*[self._end(entry) for entry in entries], return_exceptions=True))
        await self._remove_folder(id)
        removals = [self._engine.call(partial(calls.remove, container=entry["Id"])) for entry in entries]
        raise_first(await asyncio.gather(*removals, return_exceptions=True))

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """Return the output of the worker's containers, the forwarder's last; see ``Backend.logs``."""
        # A forwarder writes output only when it fails.
        entries = sorted(await self._containers(id), key=lambda entry: _role(entry) is Role.FORWARDER)
        return "".join([await self._log(entry["Id"], lines) for entry in entries])

    async def found(self) -> list[BackendWorker]:
        """Return the workers with this backend's labels, in one call; an incomplete worker counts as not running."""
        entries = await self._engine.call(partial(calls.listed, labels=self._own), silence_s=LOOK_S)
        workers: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            if LABEL_WORKER in entry["Labels"]:
                workers.setdefault(entry["Labels"][LABEL_WORKER], []).append(entry)
        return [self._found(WorkerId(id), parts) for id, parts in workers.items()]

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """Freeze all containers of the worker, or none; see ``Backend.pause``."""

        async def steps(wanted: CancelToken) -> None:
            await self._all_of(id, wanted.guarded(calls.pause))

        async def undo() -> None:
            await self._thaw(await self._containers(id))

        await self._launches.run(steps, undo, lease)

    async def resume(self, id: WorkerId) -> None:
        """Resume all containers of the worker; see ``Backend.resume``."""
        await self._all_of(id, calls.unpause)

    async def prepare(self, environment: Environment) -> str:
        """Pull the missing images of *environment*; see ``Backend.prepare``.

        An image on the engine is used as it is, even if its registry has a newer image of that name.
        """
        if self._closed:
            raise StartFailed("the backend is closed")
        return await self._launches.run(partial(self._images.prepare, environment), _nothing)

    def deaths(self) -> AsyncIterator[Death]:
        """Yield deaths from the engine's ``oom`` and ``die`` events; see ``Backend.deaths``."""
        return self._endings.follow()

    async def check(self) -> None:
        """Check that the engine answers, has resources for a worker of each environment, and sees the socket folder.

        The last check needs an environment whose images are present.
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
        """Release threads and clients; containers keep running."""
        if self._closed:
            return
        self._closed = True
        await self._launches.drain(CLOSE_S)
        # Concurrently, because each may wait for an engine that hangs.
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
        # Both run concurrently. Both are awaited even if one fails, because neither request can be cancelled.
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
        except EngineError:  # a dead server has no network namespace to share
            await self._expect_running(server, environment.image)
            raise
        await self._expect_running(server, environment.image)
        await self._expect_running(forwarder, self._forwarder_image)
        return self._folders.address(worker.id, FOREIGN_SOCKET)

    async def _create(self, worker: Worker, environment: Environment, made: _Made, wanted: CancelToken) -> str:
        """Create the worker's folder and container; return the container's id."""
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
        made.containers.append(name)  # the engine may create it even without an answer
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
                made.containers.remove(name)  # refused: a container of that name is not this launch's to remove
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
        """Call *act* for each container of worker *id*.

        Raises:
            BackendError: The worker has no container, or the engine refuses.
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
            except EngineError as error:  # the container is dead or gone
                if error.is_silence:
                    raise

    async def _undo(self, id: WorkerId, made: _Made) -> None:
        try:
            removals = [self._engine.call(partial(calls.remove, container=one)) for one in made.containers]
            outcomes = await asyncio.gather(*removals, return_exceptions=True)
            raise_first(outcomes)
            absent = {name for name, was_there in zip(made.containers, outcomes, strict=True) if was_there is False}
            if missing := absent & made.unsure:
                made.unsure -= missing  # retried once: an engine that hung may execute the request later
                raise BackendError(f"{', '.join(sorted(missing))}: not there, and may come to be yet")
        finally:  # `found` lists a leftover container by its label, but not a leftover folder
            if made.folder:
                await self._remove_folder(id)

    async def _remove_folder(self, id: WorkerId) -> None:
        try:
            await asyncio.to_thread(self._folders.remove, id)
        except BackendError as error:
            # The worker is gone, and a retry would fail the same way.
            logger.error("worker_folder_left worker=%s error=%s", id, error)

    async def _containers(self, id: WorkerId) -> list[dict[str, Any]]:
        labels = [*self._own, f"{LABEL_WORKER}={id}"]
        return await self._engine.call(partial(calls.listed, labels=labels), silence_s=LOOK_S)

    async def _end(self, entry: dict[str, Any]) -> None:
        """End a container, by SIGKILL after the grace period. A forwarder needs no cleanup, so it is only removed."""
        if _role(entry) is Role.FORWARDER:
            return
        await self._thaw([entry])  # a frozen container does not handle SIGTERM
        if not await self._has_ended_of("SIGTERM", entry["Id"], self._grace_s):
            logger.info("worker_killed container=%s grace_s=%.1f", entry["Id"][:12], self._grace_s)
            await self._has_ended_of("SIGKILL", entry["Id"], KILL_S)

    async def _has_ended_of(self, signal: str, container: str, within_s: float) -> bool:
        """Send *signal* and wait for the container's end without holding a thread; return False on a timeout."""
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
        """Create a worker's folder and container without starting it, then remove both.

        `found` lists the container like any worker, so the next audit removes it if the gateway crashes here.
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
    """Undo nothing: a pulled image may stay."""


def _role(entry: dict[str, Any]) -> Role | None:
    given = entry["Labels"].get(LABEL_ROLE)
    return Role(given) if given in _ROLES else None
