"""A world whose first replica speaks to Redis through a socket that holds back what it says, from a word on.

So a test can stop a leader exactly between a decision and its write: the write is on its way, and arrives when the test
lets it.
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
    """Passes bytes between a Unix socket of its own and *target*, until it hears the word that it waits for."""

    def __init__(self, path: Path, target: Path) -> None:
        self.url = f"unix://{path}"
        self.is_holding = threading.Event()
        self.answer = b""
        """What came back, after the release, on the connection on which the word was said."""
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
        """Hold back what has *word* in it, and from then on all that is said, on whatever connection."""
        self._word = word

    def release(self) -> None:
        """Pass on what was held back, and all that comes."""
        self._word = b""
        self._is_free.set()

    def stop(self) -> None:
        """Close everything."""
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
    """Tell the other side that this one has ended."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


class HeldWorld(World):
    """Two replicas; what the first one says to Redis may be held back."""

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
        # To gateways with one state folder these were two stores.
        apart = {
            "GATEWAY_STORE": self.held.url,
            "GATEWAY_STATE_DIR": str(self.folder / "held-state"),
            "GATEWAY_SECRET": Settings(state_dir=self.folder / "state").read_secret().decode(),
        }
        return super()._gateway(name, {**settings, **apart})


@contextlib.contextmanager
def running_held(name: str, text: str) -> Iterator[HeldWorld]:
    """Run such a world with one environment; it is removed at the end, whatever happened."""
    with started(HeldWorld({name: text}, replicas=2, redis=Redis, settings={})) as world:
        yield world
