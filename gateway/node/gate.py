"""The gate as an ASGI application, which forwards allowed requests to the engine.

Containers of other instances stay hidden: the gate omits them from lists and events, and answers a request for one with
the engine's 404. Forwarded requests name a container by the full id that the gate has inspected. So a name that moves
to another container in between has no effect.

Responses are complete bodies, or streams that end when either side disconnects.
"""

from __future__ import annotations

import asyncio
import json
import logging
import stat
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
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
"""Maximum bytes of a create body. The gateway's have 2 KiB, or about 20 KiB more with a seccomp profile."""
SILENCE_S = 120.0
"""Maximum seconds until a response's head. At 6 starts per second, the last of a burst of 250 waits 40 s."""
CONNECTIONS = 256
_PASSED_ON = frozenset(["content-type", "content-length", "api-version", "server"])
NEVER = "0001-01-01T00:00:00Z"
"""The engine's ``StartedAt`` of a container that was never started."""
Answer = Callable[[Receive, Send], Awaitable[None]]
"""A response that sends itself when called."""
Treatment = Callable[[Operation], Awaitable[Answer]]


def engine_client(engine: str) -> httpx.AsyncClient:
    """Return a client for the engine at *engine* (``unix:///…``).

    Raises:
        ConfigError: The engine is not on this machine.
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
    """Forwards the requests that the rules allow to the engine."""

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
        """Set up the gate without connecting.

        Args:
            engine: The engine's socket, ``unix:///…``.
            rules: The rules for new containers.
            socket_volume: The volume of the workers' sockets, whose Mountpoint clients may request.
            socket_view: This process's path of ``rules.socket_root``. If given, the gate creates and removes the
                workers' folders there, and the gateway must not be able to write to it. Otherwise the gateway could
                replace a folder with a symbolic link. The engine follows the link, and so could mount any path of the
                machine into a container. Without *socket_view* the gateway is trusted not to do this.
            custom_tasks_volume: The volume of custom tasks, whose Mountpoint clients may request.
            custom_tasks_view: This process's path of ``rules.custom_tasks_root``. If given, each mount from there must
                be a folder, not a link, that only its owner can write to. This is effective only if the gateway cannot
                write there, as above.
        """
        self._own_volumes = frozenset(filter(None, (socket_volume, custom_tasks_volume)))
        self.take(rules)
        self._custom_tasks = custom_tasks_view.absolute() if custom_tasks_view is not None else None
        self._folders = SocketFolders(socket_view.absolute(), mode=0o777) if socket_view is not None else None
        self._creating = 0
        self._started: set[str] = set()
        """Ids of containers whose start this gate has forwarded, until it removes them."""
        self._engine = engine_client(engine)
        self._treatments: Mapping[RouteKind, Treatment] = {
            RouteKind.PLAIN: self._plain,
            RouteKind.INFO: self._info,
            RouteKind.LIST: self._filtered,
            RouteKind.EVENTS: self._filtered,
            RouteKind.INSPECT: self._inspect,
            RouteKind.START: self._start,
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
                await refuse_body(receive)  # older engines accept a complete HostConfig in the body of "start"
                found = await self._treatments[operation.kind](operation)
        except GateRefusal as refused:
            logger.warning("gate_refused method=%s path=%.200r reason=%s", scope["method"], scope["path"], refused)
            found = answer(refused.status, {"message": str(refused)})
        except (httpx.TransportError, TimeoutError) as error:
            logger.warning("gate_engine_silent error=%r", error)
            found = answer(HTTPStatus.SERVICE_UNAVAILABLE, {"message": f"the engine does not answer: {error!r}"})
        await found(receive, send)

    def take(self, rules: Rules) -> None:
        """Replace the rules with *rules*."""
        self.rules = rules
        self._volumes = rules.volumes | self._own_volumes

    async def check(self) -> None:
        """Check the engine and the folders.

        Raises:
            BackendError: The engine does not answer, or the folders are not safe. The message says how to fix it.
        """
        if self._folders is not None:
            await asyncio.to_thread(self._folders.check, 1)
        try:
            response = await self._engine.get("/_ping")
        except httpx.TransportError as error:
            raise BackendError(f"the engine does not answer: {error}") from error
        if response.status_code != HTTPStatus.OK:
            raise BackendError(f"the engine answers its ping with {response.status_code}")

    async def aclose(self) -> None:
        """Close the connections to the engine."""
        await self._engine.aclose()

    # -- one treatment per kind of request

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

    async def _start(self, operation: Operation) -> Answer:
        # A stopped container keeps what its program wrote to its root, or to a volume. Its entry point must not run on
        # that as the container's first user. The set covers concurrent starts, which all read "never started".
        container = await self._own(operation)
        if container["Id"] in self._started or has_run(container):
            raise GateRefusal(
                f"container {operation.reference} was started before: create a new one", status=HTTPStatus.CONFLICT
            )
        self._started.add(container["Id"])
        return await self._pass(operation, f"/containers/{container['Id']}/start", operation.query)

    async def _remove(self, operation: Operation) -> Answer:
        container = await self._own(operation)
        labels = container["Config"]["Labels"]
        if labels.get(LABEL_ROLE) != Role.SERVER:  # a server's container does not use the folder
            # The folder first: a container that the engine fails to remove is found again, a lone folder is not.
            await self._remove_folder(labels.get(LABEL_WORKER, ""))
        response = await self._engine.delete(
            operation.target(f"/containers/{container['Id']}"), params=dict(operation.query)
        )
        if response.is_success:
            self._started.discard(container["Id"])
        return answer(response.status_code, response.content)

    async def _image(self, operation: Operation) -> Answer:
        if operation.reference not in self.rules.images:
            raise GateRefusal(f"image {operation.reference} is not in the catalog")
        return await self._pass(operation, f"/images/{quote(operation.reference, safe='/:')}/json", {})

    async def _volume_of_ours(self, operation: Operation) -> Answer:
        if operation.reference not in self._volumes:
            raise GateRefusal(
                f"volume {operation.reference} belongs neither to the gateway (workers' sockets, custom tasks) nor to "
                "the catalog"
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
        # Counted before the first await, so that concurrent creates cannot exceed the limit.
        self._creating += 1
        try:
            await self._refuse_too_many(operation)
            return await self._created(operation, rewritten(wanted), name)
        finally:
            self._creating -= 1

    # -- shared helpers

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
        """Refuse a forwarder that shares the network of any container but its own worker's server."""
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
        """Inspect the container that *operation* names. Raises ``GateRefusal`` (404) for one of another instance."""
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
        # The body may pause for long: events, followed logs and waits send nothing while nothing happens.
        request = self._engine.build_request(
            operation.method,
            operation.target(path),
            params=dict(query),
            timeout=httpx.Timeout(SILENCE_S, connect=10.0, read=None),
        )
        async with asyncio.timeout(SILENCE_S):
            response = await self._engine.send(request, stream=True)
        return passed_on(response)


def has_run(container: Mapping[str, Any]) -> bool:
    """Return True unless the engine states that *container*, as it inspects it, was never started."""
    return (container.get("State") or {}).get("StartedAt") != NEVER


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """Read the request's body.

    Raises:
        GateRefusal: The body has more than *limit_bytes*, or the client disconnected.
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
    """Check that a request has no body. An empty object is accepted, because some clients send it.

    Raises:
        GateRefusal: The request has a body.
    """
    if (await read_body(receive, 64)).strip() not in (b"", b"{}", b"null"):
        raise GateRefusal("this request must not have a body")


def answer(status: int, content: object, *, closes: bool = False) -> Answer:
    """Return a JSON response. *content*: an object, or encoded JSON, possibly empty. *closes* ends the connection."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def send_it(receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(body)).encode())] if status != HTTPStatus.NO_CONTENT else []
        if body:
            headers.append((b"content-type", b"application/json"))
        if closes or status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            headers.append((b"connection", b"close"))  # otherwise the server reads the rest of the body for nothing
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return send_it


def passed_on(response: httpx.Response, headers: Mapping[str, str] = MappingProxyType({})) -> Answer:
    """Forward the engine's response as it arrives, and close it at its end or when the client disconnects.

    *headers* are added to the response.
    """

    async def send_it(receive: Receive, send: Send) -> None:
        pumping = asyncio.create_task(_pump(response, headers, send))
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


async def _pump(response: httpx.Response, headers: Mapping[str, str], send: Send) -> None:
    given = [(name.lower(), value) for name, value in response.headers.items() if name.lower() in _PASSED_ON]
    start = [(name.encode(), value.encode()) for name, value in (*given, *headers.items())]
    await send({"type": "http.response.start", "status": response.status_code, "headers": start})
    async for chunk in response.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    message: dict[str, Any] = {}
    while message.get("type") != "http.disconnect":
        message = dict(await receive())
