"""One episode over the wire, without an SDK: the same requests, and a check of each answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from bench.load.http1 import Connection, Response, StreamError, events, request_bytes, result_of

PROMPT = "Say something."
JSON = {"Content-Type": "application/json"}
STREAM = {"Accept": "text/event-stream"}
TOKEN_LENGTH = 12
"""Length of each token. All requests of a session have the same length, so their heads can be prepared."""


class WrongAnswer(Exception):
    """The server's answer is not the expected answer."""


class Episode:
    """One session of the noop environment on one connection."""

    def __init__(self, connection: Connection, *, environment: str = "noop", tool: str = "echo", key: str = "") -> None:
        """*key*: the trainer's key, if the server needs one."""
        self.connection = connection
        self._keyed = {"X-API-Key": key} if key else {}
        self.environment = environment
        self._tool = tool
        self.sid = ""
        self._call_head = b""

    def attach(self, connection: Connection) -> None:
        """Continue over another connection."""
        self.connection = connection

    async def create_session(self) -> None:
        """Request a session id.

        Raises:
            WrongAnswer, OSError, ProtocolError: The request failed. All methods here raise these.
        """
        request = request_bytes("POST", "/create_session", JSON | STREAM | self._keyed, b"{}")
        response = ok(await self.connection.request(request))
        try:
            named = [event.data for event in events(response.body) if event.name == "task_id"]
        except StreamError as error:
            raise WrongAnswer(f"create_session: {error}") from error
        if len(named) != 1 or not named[0]:
            raise WrongAnswer(f"create_session: {response.body[:200]!r}")
        self.use(named[0])

    async def create(self, task: Mapping[str, Any] | None = None) -> None:
        """Open the session on *task*, under a generated id if none was requested."""
        if not self.sid:
            self.use(str(uuid.uuid4()))
        body = json.dumps({"task_spec": dict(task or {"id": "only"}), "env_name": self.environment}).encode()
        ok(await self.connection.request(request_bytes("POST", "/create", JSON | self.named, body)))

    async def prompt(self) -> None:
        """Read the prompt, and check it."""
        path = f"/{self.environment}/prompt"
        response = ok(await self.connection.request(request_bytes("GET", path, self.named)))
        blocks = json.loads(response.body)
        if [block.get("text") for block in blocks] != [PROMPT]:
            raise WrongAnswer(f"prompt: {response.body[:200]!r}")

    async def call(self, number: int) -> None:
        """Call the tool with a unique text, which must come back."""
        token = f"{number:0{TOKEN_LENGTH}d}"
        response = ok(await self.connection.request(self.call_bytes(token)))
        check_result(response.body, token)

    def call_bytes(self, token: str) -> bytes:
        """Return the whole request of a call with the text *token*, of ``TOKEN_LENGTH`` characters."""
        return b'%b%b"}}' % (self._call_head, token.encode())

    async def delete(self) -> None:
        """End the session."""
        await self._end("/delete")

    async def delete_session(self) -> None:
        """Release the session id."""
        await self._end("/delete_session")

    async def _end(self, path: str) -> None:
        response = ok(await self.connection.request(request_bytes("POST", path, self.named)))
        if json.loads(response.body).get("sid") != self.sid:
            raise WrongAnswer(f"{path}: {response.body[:200]!r}")

    @property
    def named(self) -> dict[str, str]:
        """The headers with the session id and the key."""
        return {"X-Session-ID": self.sid, **self._keyed}

    def use(self, sid: str) -> None:
        """Use the session *sid*."""
        self.sid = sid
        body = b'{"name": "%b", "input": {"text": "' % self._tool.encode()
        whole = body + b"0" * TOKEN_LENGTH + b'"}}'
        request = request_bytes("POST", f"/{self.environment}/call", JSON | STREAM | self.named, whole)
        self._call_head = request[: -len(whole)] + body


def check_result(body: bytes, token: str) -> None:
    """Check that a call's stream holds the whole result of an echo of *token*.

    Raises:
        WrongAnswer: It does not.
    """
    try:
        result = result_of(body)
    except StreamError as error:
        raise WrongAnswer(f"call: {error}") from error
    output = {
        "blocks": [{"text": token, "detail": None, "type": "text"}],
        "metadata": None,
        "reward": 0.0,
        "finished": False,
    }
    if result != {"ok": True, "output": output}:
        raise WrongAnswer(f"call: {result!r}")


def ok(response: Response) -> Response:
    """Return *response* if its status is 200.

    Raises:
        WrongAnswer: The status is not 200.
    """
    if response.status != 200:
        raise WrongAnswer(f"status {response.status}: {response.body[:200]!r}")
    return response
