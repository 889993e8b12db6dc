"""Expose nodes' engine gates as local Unix sockets, because the Docker SDK does not support changing addresses.

Each connection to a socket is spliced to the node's gate at its current address. The connection to the gate starts with
the first byte, so a probe of the socket costs no handshake. If the gate does not answer, the local connection is
closed immediately.

`Pipe` copies bytes both ways. A slow reader slows the writer down, so no data accumulates in this process.
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
"""Maximum number of connections per node: several times the number of threads that call its engine."""
PREFIX: Final = "gates-"
STALE_S: Final = 60.0
"""Minimum age in seconds of a folder that is removed: another process' new folder may have no socket yet."""
_NAME_MAX: Final = 40


class GateSockets:
    """Listens on a local socket for each node, in a folder that is removed on `aclose`."""

    def __init__(self, directory: Path, nodes: Nodes) -> None:
        """Create the object; the folder is created later in *directory*, with access for this user only."""
        self._directory = directory
        self._nodes = nodes
        self._folder: Path | None = None
        self._servers: dict[NodeId, asyncio.Server] = {}
        self._pipes: dict[NodeId, set[Pipe]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, id: NodeId) -> str:
        """Listen for node *id*, and return the socket's URL for an engine's client.

        Raises:
            BackendError: The socket can't be created.
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
        """Drop the connections to node *id*, so that waiting requests fail immediately."""
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
    """Remove the folders of killed processes: no process listens on the sockets in them."""
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
            return True  # a process may listen
        return True


def _remove(folder: Path) -> None:
    for path in folder.glob("*.sock"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


FLUSH_S: Final = 10.0
"""Seconds that buffered output may take to be sent after the other end is closed."""


class Pipe(asyncio.Protocol):
    """One of two connections that are spliced. Before `join` it buffers the first chunk and then pauses reading."""

    def __init__(self, *, began: Callable[[], None] | None = None, ended: Callable[[Pipe], None] | None = None) -> None:
        """Create the pipe; *began* is called after the first bytes, *ended* after the connection is lost."""
        self._began = began
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._other: Pipe | None = None
        self._held = bytearray()
        self.is_lost = False

    def join(self, other: Pipe) -> None:
        """Forward all bytes of this connection to *other*, and all bytes of *other* to this connection."""
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
        """Close after buffered output is sent, at the latest after `FLUSH_S`."""
        if self._transport is not None and not self.is_lost:
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self.abort)

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None and not self.is_lost:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass

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
        with suppress(RuntimeError):  # the transport is in that state already, or is closing
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
