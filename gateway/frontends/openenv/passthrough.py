"""Runs episodes in OpenEnv images for OpenEnv clients: frames pass through byte for byte.

The image itself replies, also if it refuses a step: its error frames do not end the episode. The gateway replies only
if the image can't: before the first reset, after a loss, after a timeout, and without a free slot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.errors import GatewayError, SessionNotFound
from gateway.core.ids import Owner
from gateway.core.json_text import dump
from gateway.frontends.openenv.episodes import Episodes, empty_state, patient
from gateway.frontends.openenv.frames import Code, FrameError, Json, ResetRequest
from gateway.frontends.openenv.replies import frame
from gateway.sessions.service import ActiveSession, Sessions
from gateway.sessions.worker_queries import WorkerQueries

_STATUS: Final = {Code.INVALID_JSON: 400, Code.UNKNOWN_TYPE: 400, Code.VALIDATION_ERROR: 422, Code.SESSION_ERROR: 409}
"""HTTP statuses of error frames from an image. All other codes are 500, as in a stock server."""
_STATE: Final = b'{"type":"state"}'


class Passthrough:
    """Starts episodes in OpenEnv images and passes frames to them."""

    def __init__(self, *, sessions: Sessions, queries: WorkerQueries, episodes: Episodes) -> None:
        self._sessions = sessions
        self._queries = queries
        self._episodes = episodes

    async def reset(self, owner: Owner, name: str, environment: Environment, reset: ResetRequest) -> bytes:
        """Start an episode like `Episodes.reset`. Return the image's own first frame. Raises ``FrameError``."""

        async def first(session: ActiveSession, within_s: float) -> bytes:
            return await session.pass_frame(b"", within_s=within_s)

        _, reply = await self._episodes.begin(owner, name, environment, reset, first)
        return reply

    async def pass_on(self, owner: Owner, name: str, environment: Environment, message: bytes) -> bytes:
        """Pass one frame to the image. Return its reply, which may be an error frame.

        Raises:
            FrameError: No episode is open, it was lost during this frame, or the reply missed the deadline.
        """
        try:
            session = await self._sessions.find(owner, name)
            return await session.pass_frame(message, within_s=environment.openenv.step_s)
        except GatewayError as error:
            raise await self._episodes.failed(owner, name, environment, error) from error

    async def step(self, owner: Owner, name: str, environment: Environment, action: Json) -> bytes:
        """Send an action to the image. Returns and raises like `pass_on`."""
        return await self.pass_on(owner, name, environment, dump({"type": "step", "data": action}))

    async def state(self, owner: Owner, name: str, environment: Environment, message: bytes = _STATE) -> bytes:
        """Return the image's state frame, or an empty state if there is no such session. Raises ``FrameError``."""
        try:
            session = await self._sessions.find(owner, name)
            return await session.pass_frame(message, within_s=environment.openenv.step_s)
        except SessionNotFound:
            return frame("state", empty_state()).encode()
        except GatewayError as error:
            raise await self._episodes.failed(owner, name, environment, error) from error

    async def rpc(self, owner: Owner, name: str, environment: Environment, request: Json) -> Json | None:
        """Pass a JSON-RPC request to the image as a frame. Return its reply, which may be an error.

        None: the image is too old for such frames and ran nothing. Raises ``FrameError``.
        """
        reply = read_reply(await self.pass_on(owner, name, environment, dump({"type": "mcp", "data": request})))
        return reply if reply is not None and reply.keys() & {"result", "error"} else None

    async def about(self, environment: Environment, what: str) -> Json | None:
        """Return the image's own ``schema``, ``metadata`` or list of ``tools`` (*what*). None: the image reports none.

        Raises:
            FrameError: The query to a worker failed.
        """
        async with self._episodes.refusing(environment, closes=False):
            answer = (await self._queries.about(patient(environment))).get(what)
        return answer if isinstance(answer, dict) and answer else None


def observed(reply: bytes) -> Json:
    """Return the data of an image's reply.

    Raises:
        FrameError: The reply is an error frame or not a frame.
    """
    data = read_reply(reply)
    if data is None:
        raise FrameError(Code.UNKNOWN_TYPE, "the image does not know such a request", status=400)
    return data


def read_reply(reply: bytes) -> Json | None:
    """Return the data of an image's reply. None: the image does not know the type of the request.

    Raises:
        FrameError: The reply is another error frame or not a frame.
    """
    try:
        whole: Mapping[str, Any] = json.loads(reply)
        kind, data = whole["type"], whole["data"]
        is_error = kind == "error"
        code = Code(data["code"]) if is_error else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError(Code.EXECUTION_ERROR, "the image's reply is not a frame", status=502) from error
    if code is None:
        if not isinstance(data, dict):
            raise FrameError(Code.EXECUTION_ERROR, "the image's reply is not a frame", status=502)
        return data
    if code is Code.UNKNOWN_TYPE:
        return None
    more = {key: value for key, value in data.items() if key not in ("message", "code")}
    raise FrameError(code, str(data.get("message", "")), status=_STATUS.get(code, 500), **more)
