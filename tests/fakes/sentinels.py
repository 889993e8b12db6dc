"""Two real Redis servers on loopback, a master and its replica, with real Sentinels for the failover."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import quote

import redis

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.fakes.ports import reserved_port
from tests.runner import logs

SERVICE = "games"
DOWN_MS = (500, 1500)
"""Milliseconds of silence after which each Sentinel takes a master for dead.

If both noticed simultaneously, each could vote for itself. They would retry only after twice the failover's timeout.
"""


class Failover:
    """A master, its replica, and two Sentinels with a quorum of one. Servers and Sentinels may have passwords.

    The URL first names a third Sentinel, which does not exist.
    """

    def __init__(self, folder: Path, *, password: str = "", sentinel_password: str = "") -> None:
        self._folder = folder
        self._password = password
        self._sentinel_password = sentinel_password
        self._ports = [reserved_port() for _ in range(5)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def url(self) -> str:
        """The URL, in the form of ``GATEWAY_STORE``."""
        *_, nowhere = self._ports
        hosts = ",".join(f"127.0.0.1:{port}" for port in (nowhere, *self._ports[2:4]))
        login = f":{quote(self._password, safe='')}@" if self._password else ""
        more = f"?sentinel_password={quote(self._sentinel_password, safe='')}" if self._sentinel_password else ""
        return f"redis+sentinel://{login}{hosts}/{SERVICE}/0{more}"

    @property
    def sentinels(self) -> tuple[int, int]:
        """The ports of the two Sentinels."""
        first, second = self._ports[2:4]
        return first, second

    @property
    def master(self) -> int:
        """The port of the server that Sentinels call the master."""
        with redis.Redis(port=self._ports[2], password=self._sentinel_password or None, protocol=2) as sentinel:
            address = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
        return int(address[1])

    def start(self) -> None:
        """Start all processes, and return when both Sentinels know both servers."""
        first, second, *sentinels = self._ports[:4]
        login = ["--requirepass", self._password, "--masterauth", self._password] if self._password else []
        self._run(first, *login)
        self._run(second, *login, "--replicaof", "127.0.0.1", str(first))
        eventually_now(self._expect_followed)
        for port, down_ms in zip(sentinels, DOWN_MS, strict=True):
            config = self._folder / f"sentinel-{port}.conf"
            lines = [
                f"sentinel monitor {SERVICE} 127.0.0.1 {first} 1",
                f"sentinel down-after-milliseconds {SERVICE} {down_ms}",
                f"sentinel failover-timeout {SERVICE} 4000",
            ]
            if self._password:
                lines.append(f'sentinel auth-pass {SERVICE} "{self._password}"')
            if self._sentinel_password:
                lines += [
                    f'requirepass "{self._sentinel_password}"',
                    f'sentinel sentinel-pass "{self._sentinel_password}"',
                ]
            config.write_text("\n".join([f"port {port}", "bind 127.0.0.1", f"dir {self._folder}", *lines, ""]))
            self._start(port, str(config), "--sentinel")
        for port in sentinels:
            eventually_now(partial(self._expect_watched, port))

    def stop(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(HANG_S)
        self._processes.clear()

    def kill(self) -> None:
        """End the master as a crash would. The Sentinels promote the other server."""
        self.kill_server(self.master)

    def kill_server(self, port: int) -> None:
        """End one of the servers or Sentinels as a crash would."""
        process = self._processes.pop(port)
        process.kill()
        process.wait(HANG_S)

    def pause(self, port: int = 0) -> int:
        """Let a server, by default the master, accept connections without answers. Return its port for `go_on`."""
        port = port or self.master
        self._processes[port].send_signal(signal.SIGSTOP)
        return port

    def go_on(self, port: int) -> None:
        """Resume a paused server. A resumed master finds that the other server has taken over."""
        self._processes[port].send_signal(signal.SIGCONT)

    def synchronise(self) -> None:
        """Wait until the replica has all written data."""
        with self.client(self.master) as client:
            client.set("synchronised", "")
            assert client.execute_command("WAIT", 1, 10_000) == 1

    def client(self, port: int) -> redis.Redis:
        """Return a plain client of a server."""
        return redis.Redis(port=port, password=self._password or None, decode_responses=True, protocol=2)

    def await_takeover(self, before: int) -> None:
        """Wait until a server with another port than *before* is the master."""

        def check() -> None:
            assert self.master != before
            with self.client(self.master) as client:
                assert client.info("replication")["role"] == "master"

        eventually_now(check)

    def _run(self, port: int, *more: str) -> None:
        folder = self._folder / str(port)
        folder.mkdir()
        fixed = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._start(port, *fixed, "--repl-diskless-sync-delay", "0", *more)

        def check() -> None:
            with self.client(port) as client:
                client.ping()

        eventually_now(lambda: _expected(check))

    def _start(self, port: int, *arguments: str) -> None:
        with (self._folder / f"{port}.log").open("ab") as log:
            logs.follow(self._folder / f"{port}.log")
            self._processes[port] = subprocess.Popen(["redis-server", *arguments], stdout=log, stderr=log)

    def _expect_followed(self) -> None:
        with self.client(self._ports[0]) as client:
            assert client.info("replication")["connected_slaves"] == 1

    def _expect_watched(self, port: int) -> None:
        def check() -> None:
            with redis.Redis(port=port, password=self._sentinel_password or None, protocol=2) as sentinel:
                (known,) = sentinel.sentinel_masters().values()
                assert known["num-slaves"] == 1
                assert known["num-other-sentinels"] == 1

        _expected(check)


def _expected(check: Callable[[], None]) -> None:
    try:
        check()
    except (redis.RedisError, OSError) as error:
        raise AssertionError(error) from error
