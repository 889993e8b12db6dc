"""Sessions of the ``steps`` environment over each protocol, with a check of each answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.load.closed_loop import Round, at_once
from bench.load.episodes import JSON, STREAM, WrongAnswer, ok
from bench.load.http1 import Address, Connection, StreamError, ask_once, connect, request_bytes, result_of
from bench.load.websocket import Socket, connect_socket, frame


@dataclass(frozen=True, slots=True)
class Stepped:
    """The worker's answer to one step."""

    token: str
    count: int
    """Number of different steps of the session so far."""
    doubled: int
    """Number of steps that ran more than once, in all sessions of the worker."""


class Stepper(Protocol):
    """An open session.

    All methods raise WrongAnswer, OSError and ProtocolError.
    """

    async def step(self, token: str, seconds: float = 0.0) -> Stepped:
        """Take one step."""
        ...

    async def end(self) -> None:
        """End the session."""
        ...


class OrsStepper:
    """A session over ORS, on one connection."""

    def __init__(self, connection: Connection, environment: str) -> None:
        self._connection = connection
        self._environment = environment
        self.sid = str(uuid.uuid4())

    def attach(self, connection: Connection) -> None:
        """Continue over another connection."""
        self._connection = connection

    async def open(self, task: Mapping[str, Any] | None = None) -> None:
        """Open the session."""
        body = json.dumps({"task_spec": dict(task or {"id": "only"}), "env_name": self._environment}).encode()
        ok(await self._connection.request(request_bytes("POST", "/create", JSON | self._named, body)))

    async def step(self, token: str, seconds: float = 0.0) -> Stepped:
        """Take one step."""
        request = call_bytes(self._environment, self.sid, token, seconds)
        return read_stream(ok(await self._connection.request(request)).body)

    async def end(self) -> None:
        """End the session."""
        ok(await self._connection.request(request_bytes("POST", "/delete", JSON | self._named)))

    @property
    def _named(self) -> dict[str, str]:
        return {"X-Session-ID": self.sid}


def call_bytes(environment: str, sid: str, token: str, seconds: float, *, key: str | None = None) -> bytes:
    """Return the request of one step over ORS. With *key*, the step may be sent again."""
    body = json.dumps({"name": "act", "input": {"token": token, "seconds": seconds}}).encode()
    headers = JSON | STREAM | {"X-Session-ID": sid} | ({"Idempotency-Key": key} if key else {})
    return request_bytes("POST", f"/{environment}/call", headers, body)


def read_stream(body: bytes) -> Stepped:
    """Return the step in a call's stream.

    Raises:
        WrongAnswer: The stream ends with an error, or is not a step's.
    """
    try:
        result = result_of(body)
    except StreamError as error:
        raise WrongAnswer(f"call: {error}") from error
    match result:
        case {"ok": True, "output": {"blocks": [{"text": str(text)}], "reward": 1.0, "finished": False}}:
            return read_text(text)
    raise WrongAnswer(f"call: {result!r}"[:200])


def read_text(text: str) -> Stepped:
    """Return the step in the tool's text.

    Raises:
        WrongAnswer: The text has another format.
    """
    match text.split():
        case [token, count, doubled] if count.isdigit() and doubled.isdigit():
            return Stepped(token, int(count), int(doubled))
    raise WrongAnswer(f"step: {text!r}"[:200])


def read_areal(reply: Mapping[str, Any]) -> Stepped:
    """Return the step in AReaL's answer; raises `WrongAnswer` like `read_text`."""
    match reply:
        case {"observation": {"content": str(text)}, "reward": 1.0, "done": False}:
            return read_text(text)
    raise WrongAnswer(f"step: {reply!r}"[:300])


def read_openenv(data: Mapping[str, Any]) -> Stepped:
    """Return the step in the data of OpenEnv's answer; raises `WrongAnswer` like `read_text`."""
    match data:
        case {"observation": {"token": str(token), "count": int(count), "doubled": int(doubled)}, "reward": 1.0}:
            return Stepped(token, count, doubled)
    raise WrongAnswer(f"step: {data!r}"[:300])


async def ask_areal(
    address: Address, environment: str, method: str, path: str, body: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Send one request of AReaL's API, like its client: on its own connection, closed after the answer."""
    content = b"" if body is None else json.dumps(body).encode()
    headers = {"Connection": "close"} if body is None else JSON | {"Connection": "close"}
    request = request_bytes(method, f"/areal/{environment}/api/{path}", headers, content)
    reply: dict[str, Any] = json.loads(ok(await ask_once(address, request)).body)
    return reply


class ArealStepper:
    """An episode over AReaL's API, with a connection for each request."""

    def __init__(self, address: Address, environment: str) -> None:
        self._address = address
        self._environment = environment
        self.episode = ""

    async def open(self) -> None:
        """Start an episode."""
        reply = await self.ask("start", {"sample_id": "only", "config": {}})
        self.episode = str(reply["episode_id"])

    async def step(self, token: str, seconds: float = 0.0) -> Stepped:
        """Take one step."""
        action = {"type": "text", "content": f"{token} {seconds}"}
        return read_areal(await self.ask("step", {"episode_id": self.episode, "action": action}))

    async def end(self) -> None:
        """Cancel the episode."""
        await self.ask("cancel", {"episode_id": self.episode})

    async def ask(self, what: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request, and return its answer."""
        return await ask_areal(self._address, self._environment, "POST", f"episode/{what}", body)


class OpenEnvStepper:
    """An episode over OpenEnv's WebSocket."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket

    async def open(self) -> None:
        """Begin an episode."""
        await self._ask("reset", {})

    async def step(self, token: str, seconds: float = 0.0) -> Stepped:
        """Take one step."""
        return read_openenv(await self._ask("step", {"token": token, "seconds": seconds}))

    async def end(self) -> None:
        """End the episode by closing its socket."""
        self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        reply = json.loads(await self._socket.request(frame(json.dumps({"type": kind, "data": data}).encode())))
        if reply["type"] != "observation":
            raise WrongAnswer(f"{kind}: {reply!r}"[:400])
        found: dict[str, Any] = reply["data"]
        return found


async def all_at_once(steppers: Sequence[OrsStepper], act: str, *, within_s: float) -> Round:
    """Run ``open``, ``step`` or ``end`` on all sessions at the same moment."""

    async def one(place: int) -> None:
        stepper = steppers[place]
        await (stepper.open() if act == "open" else stepper.step("one") if act == "step" else stepper.end())

    return await at_once([one] * len(steppers), within_s=within_s)


async def ors(address: Address, environment: str) -> OrsStepper:
    """Open a session over ORS."""
    stepper = OrsStepper(await connect(address), environment)
    await stepper.open()
    return stepper


async def areal(address: Address, environment: str) -> ArealStepper:
    """Start an episode over AReaL's API."""
    stepper = ArealStepper(address, environment)
    await stepper.open()
    return stepper


async def openenv(address: Address, environment: str) -> OpenEnvStepper:
    """Open a socket and begin an episode on it."""
    stepper = OpenEnvStepper(await connect_socket(address, f"/openenv/{environment}/ws"))
    await stepper.open()
    return stepper


PROTOCOLS: dict[str, Callable[[Address, str], Awaitable[Stepper]]] = {"ORS": ors, "OpenEnv": openenv, "AReaL": areal}
