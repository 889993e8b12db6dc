"""The gate as an ASGI application.

Containers of others do not exist here: they are not listed, their events are not heard, and asking for one by id is
answered as the engine answers for one that was never there. What is passed on names the container by the full id that
was looked at, so that a name that changes hands in between leads nowhere.

Bodies in, answers out: whole ones, and streams that end when either side hangs up.
"""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from starlette.types import Receive, Scope, Send

from gateway.backends.docker.container import LABEL_ENVIRONMENT, LABEL_INSTANCE, LABEL_ROLE, LABEL_WORKER, Role
from gateway.backends.folders import SocketFolders
from gateway.core.errors import BackendError, ConfigError
from gateway.core.ids import WorkerId
from gateway.node.policy import Rules, mounts_custom_tasks, refusal, rewritten, shared_with
from gateway.node.routes import (
    GateRefusal,
    Malformed,
    Operation,
    RouteKind,
    find,
    own_containers,
    own_events,
    parse,
    shown_info,
)

logger = logging.getLogger(__name__)
BODY_MAX_BYTES = 2**20
"""A create body of ours has 2 KiB; a seccomp profile in it some 20."""
SILENCE_S = 120.0
"""The longest wait for the head of an answer: at six starts a second, the last of a burst of 250 waits for 40 s."""
CONNECTIONS = 256
Answer = Callable[[Receive, Send], Awaitable[None]]
"""Sends itself."""
Treatment = Callable[[Operation], Awaitable[Answer]]


def engine_client(engine: str) -> httpx.AsyncClient:
    """A client for the engine at *engine* (``unix:///…``).

    Raises:
        ConfigError: it is not an engine on this machine.
    """
    if not engine.startswith("unix://"):
        raise ConfigError(f"the engine gate talks to an engine on its own machine, unix://…, not {engine}")
    transport = httpx.AsyncHTTPTransport(
        uds="/" + engine.removeprefix("unix://").lstrip("/"),
        limits=httpx.Limits(max_connections=CONNECTIONS, keepalive_expiry=30),
        verify=False,  # a Unix socket has no TLS, and reading the machine's certificates takes 28 ms
    )
    timeout = httpx.Timeout(SILENCE_S, connect=10.0)
    return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=timeout, trust_env=False)


class Gate:
    """Passes on what the rules allow, to the engine and no further."""

    def __init__(
        self,
        *,
        engine: str,
        rules: Rules,
        socket_volume: str | None = None,
        socket_view: Path | None = None,
        custom_tasks_volume: str | None = None,
        custom_tasks_view: Path | None = None,
    ) -> None:
        """Make no connection yet.

        Args:
            engine: The engine's socket, ``unix:///…``.
            rules: What may be created.
            socket_volume: The volume whose Mountpoint may be asked for.
            socket_view: Where this process sees ``rules.socket_root``. Given, the gate makes and removes the workers'
                folders in it, and the gateway must not be able to write there: a gateway that can may put a symbolic
                link in a folder's place, which the engine follows, and so mount anything of the machine into a
                container. Without it the gateway is trusted not to.
            custom_tasks_volume: Another volume whose Mountpoint may be asked for.
            custom_tasks_view: Where this process sees ``rules.custom_tasks_root``. Given, what is mounted from there
                must be a folder, and no link, that nobody but its owner can write to; which holds only where the
                gateway cannot write there, as above.
        """
        self._own_volumes = frozenset(filter(None, (socket_volume, custom_tasks_volume)))
        self.take(rules)
        self._custom_tasks = custom_tasks_view.absolute() if custom_tasks_view is not None else None
        self._folders = SocketFolders(socket_view.absolute(), mode=0o777) if socket_view is not None else None
        self._creating = 0
        self._engine = engine_client(engine)
        self._treatments: Mapping[RouteKind, Treatment] = {
            RouteKind.PLAIN: self._plain,
            RouteKind.INFO: self._info,
            RouteKind.LIST: self._filtered,
            RouteKind.EVENTS: self._filtered,
            RouteKind.INSPECT: self._inspect,
            RouteKind.CONTAINER: self._container,
            RouteKind.REMOVE: self._remove,
            RouteKind.IMAGE: self._image,
            RouteKind.VOLUME: self._volume_of_ours,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the ASGI interface."""
        if scope["type"] != "http":
            return
        try:
            operation = find(scope["method"], scope["raw_path"], scope["query_string"])
            if operation.kind is RouteKind.CREATE:
                found = await self._create(operation, await read_body(receive, BODY_MAX_BYTES))
            else:
                await refuse_body(receive)  # engines took a complete HostConfig with "start" once
                found = await self._treatments[operation.kind](operation)
        except GateRefusal as refused:
            logger.warning("gate_refused method=%s path=%.200r reason=%s", scope["method"], scope["path"], refused)
            found = answer(refused.status, {"message": str(refused)})
        except (httpx.TransportError, TimeoutError) as error:
            logger.warning("gate_engine_silent error=%r", error)
            found = answer(HTTPStatus.SERVICE_UNAVAILABLE, {"message": f"the engine does not answer: {error!r}"})
        await found(receive, send)

    def take(self, rules: Rules) -> None:
        """Use *rules* from now on."""
        self.rules = rules
        self._volumes = rules.volumes | self._own_volumes

    async def check(self) -> None:
        """Raise ``BackendError`` with what to do if the engine does not answer, or the folders are not safe."""
        if self._folders is not None:
            await asyncio.to_thread(self._folders.check, 1)
        try:
            response = await self._engine.get("/_ping")
        except httpx.TransportError as error:
            raise BackendError(f"the engine does not answer: {error}") from error
        if response.status_code != HTTPStatus.OK:
            raise BackendError(f"the engine answers its ping with {response.status_code}")

    async def aclose(self) -> None:
        """Let go of the connections to the engine."""
        await self._engine.aclose()

    # -- one treatment a kind

    async def _plain(self, operation: Operation) -> Answer:
        return await self._pass(operation, operation.path, operation.query)

    async def _info(self, operation: Operation) -> Answer:
        return answer(HTTPStatus.OK, shown_info(await self._json(operation, "/info")))

    async def _filtered(self, operation: Operation) -> Answer:
        own = own_events if operation.kind is RouteKind.EVENTS else own_containers
        filters = own(operation.query.get("filters", ""), self.rules.instance)
        return await self._pass(operation, operation.path, {**operation.query, "filters": json.dumps(filters)})

    async def _inspect(self, operation: Operation) -> Answer:
        return answer(HTTPStatus.OK, await self._own(operation))

    async def _container(self, operation: Operation) -> Answer:
        container = await self._own(operation)
        act = operation.path.rpartition("/")[2]
        return await self._pass(operation, f"/containers/{container['Id']}/{act}", operation.query)

    async def _remove(self, operation: Operation) -> Answer:
        container = await self._own(operation)
        labels = container["Config"]["Labels"]
        if labels.get(LABEL_ROLE) != Role.SERVER:  # that one has no part in the folder
            # First: a container that an engine does not remove now is found again, a folder without one is not.
            await self._remove_folder(labels.get(LABEL_WORKER, ""))
        response = await self._engine.delete(
            operation.target(f"/containers/{container['Id']}"), params=dict(operation.query)
        )
        return answer(response.status_code, response.content)

    async def _image(self, operation: Operation) -> Answer:
        if operation.reference not in self.rules.images:
            raise GateRefusal(f"image {operation.reference} is not of the catalog")
        return await self._pass(operation, f"/images/{quote(operation.reference, safe='/:')}/json", {})

    async def _volume_of_ours(self, operation: Operation) -> Answer:
        if operation.reference not in self._volumes:
            raise GateRefusal(
                f"volume {operation.reference} holds neither the workers' sockets nor custom tasks, and is none of the "
                "catalog's"
            )
        return await self._pass(operation, operation.path, {})

    async def _create(self, operation: Operation, body: bytes) -> Answer:
        try:
            wanted = parse(body)
        except Malformed as error:
            raise GateRefusal(str(error), status=HTTPStatus.BAD_REQUEST) from error
        reason = refusal(wanted, self.rules)
        if reason is not None:
            raise GateRefusal(reason)
        await asyncio.to_thread(self._refuse_strange_tasks, wanted)
        await self._refuse_strange_network(operation, wanted)
        name = operation.query.get("name", "")
        if not name.startswith(f"{self.rules.instance}-"):
            raise GateRefusal(f"the container's name must begin with {self.rules.instance}-")
        # Counted before the first wait: of many creates at once none slips past the limit.
        self._creating += 1
        try:
            await self._refuse_too_many(operation)
            return await self._created(operation, rewritten(wanted), name)
        finally:
            self._creating -= 1

    # -- what they share

    def _refuse_strange_tasks(self, body: Mapping[str, Any]) -> None:
        tasks = self.rules.environments[body["Labels"][LABEL_ENVIRONMENT]].custom_tasks
        if self._custom_tasks is None or tasks is None or not mounts_custom_tasks(body):
            return
        folder = self._custom_tasks / tasks.folder
        try:
            mode = folder.lstat().st_mode
        except OSError as error:
            raise GateRefusal(f"custom tasks: {folder}: {error.strerror}") from error
        if not stat.S_ISDIR(mode) or mode & 0o022:
            raise GateRefusal(f"custom tasks: {folder} is not a folder that only its owner can write to: {mode:o}")

    async def _refuse_strange_network(self, operation: Operation, body: Mapping[str, Any]) -> None:
        """Let a forwarder share the network of its own worker's server, and of nothing else."""
        beside = shared_with(body)
        if not beside:
            return
        response = await self._engine.get(operation.target(f"/containers/{beside}/json"))
        found = response.json() if response.status_code == HTTPStatus.OK else {}
        theirs, ours = (found.get("Config") or {}).get("Labels") or {}, body["Labels"]
        same = all(theirs.get(label) == ours.get(label) for label in (LABEL_INSTANCE, LABEL_ENVIRONMENT, LABEL_WORKER))
        if found.get("Id") != beside or not same or theirs.get(LABEL_ROLE) != Role.SERVER:
            raise GateRefusal(f"HostConfig.NetworkMode: {beside[:12]} is not the server of worker {ours[LABEL_WORKER]}")

    async def _refuse_too_many(self, operation: Operation) -> None:
        filters = json.dumps(own_containers("", self.rules.instance))
        there = await self._json(operation, "/containers/json", {"all": "1", "filters": filters})
        if len(there) + self._creating > self.rules.max_containers:
            raise GateRefusal(f"there are {len(there)} containers, and {self.rules.max_containers} are allowed")

    async def _created(self, operation: Operation, body: dict[str, Any], name: str) -> Answer:
        labels = body["Labels"]
        has_folder = labels.get(LABEL_ROLE) != Role.SERVER
        if has_folder:
            await self._make_folder(labels[LABEL_WORKER])
        created = False
        try:
            response = await self._engine.post(operation.target(), params={"name": name}, json=body)
            created = response.status_code == HTTPStatus.CREATED
        finally:
            if not created and has_folder:
                await self._remove_folder(labels[LABEL_WORKER])
        if created:
            logger.info("gate_created environment=%s worker=%s", labels[LABEL_ENVIRONMENT], labels[LABEL_WORKER])
        return answer(response.status_code, response.content)

    async def _own(self, operation: Operation) -> dict[str, Any]:
        """Inspect the container that *operation* is about; there is none that is not of our instance."""
        path = operation.target(f"/containers/{operation.reference}/json")
        response = await self._engine.get(path)
        container = response.json() if response.status_code == HTTPStatus.OK else {}
        labels = (container.get("Config") or {}).get("Labels") or {}
        if labels.get(LABEL_INSTANCE) != self.rules.instance:
            raise GateRefusal(f"No such container: {operation.reference}", status=HTTPStatus.NOT_FOUND)
        found: dict[str, Any] = container
        return found

    async def _make_folder(self, worker: str) -> None:
        if self._folders is None:
            return
        try:
            await asyncio.to_thread(self._folders.make, WorkerId(worker))
        except BackendError as error:
            raise GateRefusal(f"{error} (the gate makes these folders, and the gateway must not)") from error

    async def _remove_folder(self, worker: str) -> None:
        if self._folders is None:
            return
        try:
            await asyncio.to_thread(self._folders.remove, WorkerId(worker))
        except BackendError as error:
            logger.error("gate_folder_left worker=%s error=%s", worker, error)

    async def _json(self, operation: Operation, path: str, query: Mapping[str, str] | None = None) -> Any:
        response = await self._engine.get(operation.target(path), params=dict(query or {}))
        if response.status_code != HTTPStatus.OK:
            raise GateRefusal(f"the engine answers {response.status_code}", status=HTTPStatus.BAD_GATEWAY)
        return response.json()

    async def _pass(self, operation: Operation, path: str, query: Mapping[str, str]) -> Answer:
        # The body may be silent for long: events, logs that are followed, and waits are while nothing happens.
        request = self._engine.build_request(
            operation.method,
            operation.target(path),
            params=dict(query),
            timeout=httpx.Timeout(SILENCE_S, connect=10.0, read=None),
        )
        async with asyncio.timeout(SILENCE_S):
            response = await self._engine.send(request, stream=True)
        return passed_on(response)


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """Read the request's body.

    Raises:
        GateRefusal: it has more than *limit_bytes*, or its sender hung up.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise GateRefusal("the request was not sent to its end", status=HTTPStatus.BAD_REQUEST)
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise GateRefusal(f"the body has more than {limit_bytes} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if not message.get("more_body", False):
            return bytes(body)


async def refuse_body(receive: Receive) -> None:
    """Read the body of a request that has none; some clients send an empty object.

    Raises:
        GateRefusal: it has one.
    """
    if (await read_body(receive, 64)).strip() not in (b"", b"{}", b"null"):
        raise GateRefusal("this request takes no body")


def answer(status: int, content: object, *, closes: bool = False) -> Answer:
    """Answer with JSON: *content*, or bytes that are JSON already (or nothing at all); *closes* the connection."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def send_it(receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(body)).encode())] if status != HTTPStatus.NO_CONTENT else []
        if body:
            headers.append((b"content-type", b"application/json"))
        if closes or status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            headers.append((b"connection", b"close"))  # else the rest would be read, to no end
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return send_it


def passed_on(response: httpx.Response) -> Answer:
    """Pass the engine's answer on as it comes; ends the engine's side when the client hangs up, and closes it."""

    async def send_it(receive: Receive, send: Send) -> None:
        pumping = asyncio.create_task(_pump(response, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({pumping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if pumping.done():
                pumping.result()
        finally:
            for task in (pumping, leaving):
                task.cancel()
            await asyncio.wait({pumping, leaving})
            await response.aclose()

    return send_it


async def _pump(response: httpx.Response, send: Send) -> None:
    headers: list[tuple[bytes, bytes]] = [
        (name.lower().encode(), value.encode())
        for name, value in response.headers.items()
        if name.lower() in ("content-type", "content-length", "api-version", "server")
    ]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for chunk in response.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    message: dict[str, Any] = {}
    while message.get("type") != "http.disconnect":
        message = dict(await receive())
