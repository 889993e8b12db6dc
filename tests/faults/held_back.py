"""A world whose first replica reaches Redis through a socket that holds back its requests, from a given word on.

A test can so stop a leader exactly between a decision and its write. The write is sent already, and reaches Redis when
the test releases it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from gateway.settings import Settings
from tests.faults.world import World, started
from tests.wire.gateways import Gateway
from tests.wire.stack import Redis

CHUNK = 2**16


class HoldingSocket:
    """Passes bytes between its own Unix socket and *target*, until a request contains the word that it waits for."""

    def __init__(self, path: Path, target: Path) -> None:
        self.url = f"unix://{path}"
        self.is_holding = threading.Event()
        self.answer = b""
        """Redis' answer after the release, on the connection on which the word was sent."""
        self._target = target
        self._word = b""
        self._is_free = threading.Event()
        self._is_free.set()
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(128)

    def start(self) -> None:
        _begin(self._accept)

    def hold_from(self, word: bytes) -> None:
        """Hold back the request that contains *word*, and every later request on any connection."""
        self._word = word

    def release(self) -> None:
        """Pass on the requests held back, and all later ones."""
        self._word = b""
        self._is_free.set()

    def stop(self) -> None:
        """Close the listener and all connections."""
        self.release()
        for one in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                self._connections += [near, far]
                with contextlib.suppress(OSError):
                    far.connect(str(self._target))
                heard = threading.Event()
                _begin(self._say, near, far, heard)
                _begin(self._answer, near, far, heard)

    def _say(self, near: socket.socket, far: socket.socket, heard: threading.Event) -> None:
        last = b""
        with _ends(far), contextlib.suppress(OSError):
            while data := near.recv(CHUNK):
                if self._word and self._word in last + data and not self.is_holding.is_set():
                    self._is_free.clear()
                    heard.set()
                    self.is_holding.set()
                last = data[-100:]
                self._is_free.wait()
                far.sendall(data)

    def _answer(self, near: socket.socket, far: socket.socket, heard: threading.Event) -> None:
        with _ends(near), contextlib.suppress(OSError):
            while data := far.recv(CHUNK):
                if heard.is_set():
                    self.answer += data
                near.sendall(data)


def _begin(work: object, *arguments: object) -> None:
    threading.Thread(target=work, args=arguments, daemon=True).start()  # type: ignore[arg-type]


@contextlib.contextmanager
def _ends(other: socket.socket) -> Iterator[None]:
    """Shut down the sending side of *other* when this side ends."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


class HeldWorld(World):
    """Two replicas. A test may hold back the first replica's requests to Redis."""

    held: HoldingSocket

    def start(self) -> None:
        self.held.start()
        super().start()

    def close(self) -> None:
        self.held.stop()
        super().close()

    def _gateway(self, name: str, settings: Mapping[str, str]) -> Gateway:
        if name != "gateway-0":
            return super()._gateway(name, settings)
        self.held = HoldingSocket(self.folder / "held.sock", self.redis.socket)
        # Gateways that share a state folder would take these two URLs for two stores.
        apart = {
            "GATEWAY_STORE": self.held.url,
            "GATEWAY_STATE_DIR": str(self.folder / "held-state"),
            "GATEWAY_SECRET": Settings(state_dir=self.folder / "state").read_secret().decode(),
        }
        return super()._gateway(name, {**settings, **apart})


@contextlib.contextmanager
def running_held(name: str, text: str) -> Iterator[HeldWorld]:
    """Run such a world with one environment. It is always removed at the end."""
    with started(HeldWorld({name: text}, replicas=2, redis=Redis, settings={})) as world:
        yield world
