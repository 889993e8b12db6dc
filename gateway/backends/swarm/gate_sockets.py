"""The nodes' engine gates as Unix sockets of this process: the Docker SDK knows sockets, and no moving addresses.

A connection to one of these sockets is spliced to the node's gate, at wherever that is now. It is begun with the first
byte: to look whether anybody listens costs no handshake. If nobody answers, the connection is closed at once.

Bytes both ways between two connections; who reads slowly slows the writer down, and nothing piles up here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, cast

from gateway.backends.folders import PATH_MAX_BYTES
from gateway.backends.swarm.nodes import Nodes
from gateway.core.errors import BackendError
from gateway.core.placement import NodeId

logger = logging.getLogger(__name__)
CONNECT_S: Final = 5.0
BACKLOG: Final = 128
MAX_CONNECTIONS: Final = 128
"""Of one node: several times the threads that speak to it."""
PREFIX: Final = "gates-"
STALE_S: Final = 60.0
"""A folder of another process that has no socket yet is left alone for so long."""
_NAME_MAX: Final = 40


class GateSockets:
    """Listens for each node in a folder of its own, which goes with it."""

    def __init__(self, directory: Path, nodes: Nodes) -> None:
        """*directory*: below it the folder is made, for this user only."""
        self._directory = directory
        self._nodes = nodes
        self._folder: Path | None = None
        self._servers: dict[NodeId, asyncio.Server] = {}
        self._pipes: dict[NodeId, set[Pipe]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, id: NodeId) -> str:
        """The URL of the gate of node *id*, for an engine's client.

        Raises:
            BackendError: the socket can't be made.
        """
        if self._folder is None:
            self._folder = self._made()
        path = self._folder / f"{id if len(id) <= _NAME_MAX else sha256(id.encode()).hexdigest()[:_NAME_MAX]}.sock"
        if id not in self._servers:
            listener = _listening(path)
            self._pipes[id] = set()
            loop = asyncio.get_running_loop()
            self._servers[id] = await loop.create_unix_server(lambda: self._accepted(id), sock=listener)
        return f"unix://{path}"

    def cut(self, id: NodeId) -> None:
        """Drop the connections to node *id*: those that wait there for an answer hear that none will come."""
        for pipe in list(self._pipes.get(id, ())):
            pipe.abort()

    async def aclose(self) -> None:
        """Drop all connections and remove the sockets."""
        for server in self._servers.values():
            server.close()
        for id in self._pipes:
            self.cut(id)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=CONNECT_S)
        self._servers.clear()
        if self._folder is not None:
            _remove(self._folder)

    def _accepted(self, id: NodeId) -> Pipe:
        pipes = self._pipes[id]
        pipe = Pipe(began=lambda: self._begin(id, pipe), ended=pipes.discard)
        pipes.add(pipe)
        return pipe

    def _begin(self, id: NodeId, near: Pipe) -> None:
        if len(self._pipes[id]) > 2 * MAX_CONNECTIONS:
            logger.error("node_gate_full node=%s most=%s", id, MAX_CONNECTIONS)
            near.abort()
            return
        self._spawn(self._connect(id, near))

    async def _connect(self, id: NodeId, near: Pipe) -> None:
        endpoint = self._nodes.endpoint(id)
        pipes = self._pipes[id]
        far = Pipe(ended=pipes.discard)
        try:
            if endpoint is None:
                raise OSError("it is not there")
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: far,
                    endpoint.host,
                    endpoint.port,
                    ssl=self._nodes.tls,
                    server_hostname=self._nodes.tls_name,
                )
        except OSError as error:
            logger.debug("node_gate_silent node=%s error=%s", id, error or "timed out")
            near.abort()
        except BaseException:
            near.abort()
            far.abort()
            raise
        else:
            pipes.add(far)
            near.join(far)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _made(self) -> Path:
        try:
            self._directory.mkdir(mode=0o711, parents=True, exist_ok=True)
            _sweep(self._directory)
            return Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._directory))  # mode 0700
        except OSError as error:
            raise BackendError(f"cannot make a folder in {self._directory}: {error.strerror}") from error


def _listening(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > PATH_MAX_BYTES:
        raise BackendError(f"{path} is too long for a Unix socket: choose a shorter socket_dir")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise BackendError(f"cannot listen on {path}: {error.strerror}") from error
    return listener


def _sweep(directory: Path) -> None:
    """Remove the folders of processes that were killed: nobody listens on the sockets in them."""
    for folder in directory.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > STALE_S and not any(map(_listens, folder.glob("*.sock"))):
                _remove(folder)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
        visitor.settimeout(1.0)
        try:
            visitor.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # it may
        return True


def _remove(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


FLUSH_S: Final = 10.0
"""How long what was written may still take to leave once the other end is gone."""


class Pipe(asyncio.Protocol):
    """One end. What comes before it is joined with another is held: one piece, then it is not read any more."""

    def __init__(self, *, began: Callable[[], None] | None = None, ended: Callable[[Pipe], None] | None = None) -> None:
        """*began* is called when the first bytes came, *ended* when the connection is gone."""
        self._began = began
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._other: Pipe | None = None
        self._held = bytearray()
        self.is_lost = False

    def join(self, other: Pipe) -> None:
        """Pass all that comes to *other*, and all that comes there to this end."""
        for one, peer in ((self, other), (other, self)):
            one._other = peer
        for one, peer in ((self, other), (other, self)):
            peer._write(one._held)
            one._held.clear()
            if one.is_lost:
                peer.close()
            else:
                one._read(True)

    def close(self) -> None:
        """Close when what was written has left, or after `FLUSH_S`."""
        if self._transport is not None and not self.is_lost:
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self.abort)

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None and not self.is_lost:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other._write(data)
            return
        self._held += data
        self._read(False)
        began, self._began = self._began, None
        if began is not None:
            began()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other._read(False)

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other._read(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._other is not None:
            self._other.close()
        if self._ended is not None:
            self._ended(self)

    def _write(self, data: bytes | bytearray) -> None:
        if data and self._transport is not None and not self.is_lost:
            self._transport.write(bytes(data))

    def _read(self, wanted: bool) -> None:
        if self._transport is None or self.is_lost or self._transport.is_closing():
            return
        with suppress(RuntimeError):  # it is as wanted, or closes just now
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
