"""The learner's requests to a gateway over plain HTTP: ORS for episodes, ``/admin/v1`` for curricula and records.

A failed session is an error that ends the run, never a reward of 0. Each thread has its own connection. It takes a
quarter of the CPU time of a general client's pool, and a run has two thousand episodes.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

TIMEOUT_S: Final = 120.0
"""Seconds for one request. The first request waits for a worker's start."""
KEPT_S: Final = 2.0
"""Seconds after which an idle connection is not reused, because the gateway closes idle connections."""
TRIES: Final = 20
"""Attempts to open a session while no slot is free."""
PAUSE_S: Final = 0.5
"""Seconds between these attempts."""
OK: Final = 200
TOO_MANY: Final = 429


class GatewayRefused(Exception):
    """The gateway's answer is an error. The message names the request and quotes the answer."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of one call."""

    text: str
    reward: float
    """The reward, or 0 if the environment gave none."""
    finished: bool


@dataclass(slots=True)
class _Connection:
    """The connection of one thread."""

    http: http.client.HTTPConnection
    used_at: float


class Gateway:
    """A running gateway. Any thread may call its methods."""

    def __init__(self, url: str, *, key: str = "", admin_key: str = "") -> None:
        """
        Args:
            url: ``http://host:port``.
            key: A trainer's key, if the gateway requires one.
            admin_key: An operator's key.

        Raises:
            ValueError: *url* is not a usable HTTP address.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"http://host:port is wanted, not {url!r}")
        self._place = (parts.hostname, parts.port or 80)
        self._key = {"X-API-Key": key} if key else {}
        self._admin_key = {"X-API-Key": admin_key} if admin_key else {}
        self._mine = threading.local()

    @contextlib.contextmanager
    def session(self, environment: str, split: str, index: int) -> Iterator[Session]:
        """Yield a session on task or handle *index* of *split*, and end it on leaving."""
        session = Session(self, environment)
        session.open(split, index)
        try:
            yield session
        finally:
            session.end()

    def tasks(self, environment: str, split: str) -> list[dict[str, Any]]:
        """Return all tasks of *split*, by index."""
        count = json.loads(self.ask("POST", f"/{environment}/num_tasks", {"split": split}))["num_tasks"]
        wanted = {"split": split, "start": 0, "stop": count}
        found: list[dict[str, Any]] = json.loads(self.ask("POST", f"/{environment}/task_range", wanted))["tasks"]
        return found

    def define(self, name: str, document: Mapping[str, Any]) -> None:
        """Offer a curriculum as the split ``train:<name>``."""
        self.ask("PUT", f"/admin/v1/curriculum/{name}", document)

    def undefine(self, name: str) -> None:
        """Delete the curriculum and its draws. Records stay."""
        self.ask("DELETE", f"/admin/v1/curriculum/{name}")

    def updated(self, name: str, policy: str) -> None:
        """Report that *policy* plays from now on, so that the next draw uses all records so far."""
        self.ask("POST", f"/admin/v1/curriculum/{name}/feedback", {"policy": policy})

    def state(self, name: str) -> dict[str, Any]:
        """Return the state of a curriculum: its stage, and its most frequently drawn tasks."""
        found: dict[str, Any] = json.loads(self.ask("GET", f"/admin/v1/curriculum/{name}"))
        return found

    def records(self, environment: str) -> list[dict[str, Any]]:
        """Return the record of each played task."""
        text = self.ask("GET", f"/admin/v1/records?environment={environment}")
        return [json.loads(line) for line in text.splitlines()]

    def ask(self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None) -> str:
        """Send one request, without retries, and return the body of its answer.

        Raises:
            GatewayRefused: The answer is an error.
            OSError: There is no answer.
        """
        status, text = self.answer(method, path, body, headers)
        if not OK <= status < 300:
            raise GatewayRefused(f"{method} {path}: {status} {text[:500]}")
        return text

    def answer(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Send one request, and return the status and the body of its answer, for any status."""
        keys = self._admin_key if path.startswith("/admin/") else self._key
        sent = json.dumps(body) if body is not None else None
        connection = self._connection()
        try:
            connection.request(method, path, sent, {"Content-Type": "application/json", **keys, **(headers or {})})
            response = connection.getresponse()
            text = response.read().decode()
        except http.client.HTTPException as error:
            connection.close()
            raise OSError(f"{method} {path}: {error!r}") from error
        except OSError:
            connection.close()
            raise
        self._mine.connection.used_at = time.monotonic()
        return response.status, text

    def close(self) -> None:
        """Close this thread's connection."""
        mine: _Connection | None = getattr(self._mine, "connection", None)
        if mine is not None:
            mine.http.close()

    def _connection(self) -> http.client.HTTPConnection:
        mine: _Connection | None = getattr(self._mine, "connection", None)
        if mine is None:
            mine = _Connection(http.client.HTTPConnection(*self._place, timeout=TIMEOUT_S), 0.0)
            self._mine.connection = mine
        elif time.monotonic() - mine.used_at > KEPT_S:
            mine.http.close()  # reopens with the next request
        return mine.http


class Session:
    """A session, for one thread at a time."""

    def __init__(self, gateway: Gateway, environment: str) -> None:
        self._gateway = gateway
        self._environment = environment
        self._headers = {"X-Session-ID": uuid.uuid4().hex, "Accept": "text/event-stream"}

    def open(self, split: str, index: int) -> None:
        """Open the session. Wait a little if no slot is free. Raises ``GatewayRefused``, ``OSError``."""
        wanted = {"env_name": self._environment, "split": split, "index": index}
        for _ in range(TRIES):
            status, text = self._gateway.answer("POST", "/create", wanted, self._headers)
            if status == OK:
                return
            if status != TOO_MANY:
                break
            time.sleep(PAUSE_S)
        raise GatewayRefused(f"POST /create: {status} {text[:500]}")

    def end(self) -> None:
        """End the session. Its result is then in its task's record."""
        self._gateway.ask("POST", "/delete", headers=self._headers)

    def prompt(self) -> str:
        """Return the text of the prompt."""
        return _text(json.loads(self._gateway.ask("GET", f"/{self._environment}/prompt", headers=self._headers)))

    def call(self, tool: str, argument: Mapping[str, str]) -> Seen:
        """Call *tool*, and return the result."""
        wanted = {"name": tool, "input": dict(argument)}
        output = _output(self._gateway.ask("POST", f"/{self._environment}/call", wanted, self._headers))
        return Seen(_text(output["blocks"]), float(output.get("reward") or 0.0), bool(output["finished"]))


def _output(stream: str) -> dict[str, Any]:
    """Return the result at the end of a call's event stream. A long result comes in chunks."""
    data, name = "", ""
    for line in stream.splitlines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and name in ("chunk", "end"):
            data += line.removeprefix("data: ")
    result = json.loads(data) if data else {}
    if not result.get("ok"):
        raise GatewayRefused(f"a call ended with {stream[-500:]}")
    output: dict[str, Any] = result["output"]
    return output


def _text(blocks: list[dict[str, Any]]) -> str:
    return "\n".join(block["text"] for block in blocks if block.get("type", "text") == "text")
