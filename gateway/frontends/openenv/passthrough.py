"""Episodes in OpenEnv images, for OpenEnv's clients: frames go through byte for byte.

The image answers for itself, also where it refuses a step: its error frames end nothing. The gateway speaks only where
the image can't: before the first reset, when the episode was lost or is too slow, and where there is no room.
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
"""Over HTTP; what an image fails at is 500, as there."""
_STATE: Final = b'{"type":"state"}'


class Passthrough:
    """Begins episodes in OpenEnv images, and passes frames on."""

    def __init__(self, *, sessions: Sessions, queries: WorkerQueries, episodes: Episodes) -> None:
        self._sessions = sessions
        self._queries = queries
        self._episodes = episodes

    async def reset(self, owner: Owner, name: str, environment: Environment, reset: ResetRequest) -> bytes:
        """Begin an episode as `Episodes.reset` does; answers the image's own first frame. Raises ``FrameError``."""

        async def first(session: ActiveSession, within_s: float) -> bytes:
            return await session.pass_frame(b"", within_s=within_s)

        _, reply = await self._episodes.begin(owner, name, environment, reset, first)
        return reply

    async def pass_on(self, owner: Owner, name: str, environment: Environment, message: bytes) -> bytes:
        """Pass one frame on; answers the image's reply, an error frame of its own included.

        Raises:
            FrameError: there is no episode, or it was lost over this frame; also if the reply is late.
        """
        try:
            session = await self._sessions.find(owner, name)
            return await session.pass_frame(message, within_s=environment.openenv.step_s)
        except GatewayError as error:
            raise await self._episodes.failed(owner, name, environment, error) from error

    async def step(self, owner: Owner, name: str, environment: Environment, action: Json) -> bytes:
        """Act; as `pass_on`."""
        return await self.pass_on(owner, name, environment, dump({"type": "step", "data": action}))

    async def state(self, owner: Owner, name: str, environment: Environment, message: bytes = _STATE) -> bytes:
        """The image's state; an empty one where no episode was ever begun. Raises ``FrameError``."""
        try:
            session = await self._sessions.find(owner, name)
            return await session.pass_frame(message, within_s=environment.openenv.step_s)
        except SessionNotFound:
            return frame("state", empty_state()).encode()
        except GatewayError as error:
            raise await self._episodes.failed(owner, name, environment, error) from error

    async def rpc(self, owner: Owner, name: str, environment: Environment, request: Json) -> Json | None:
        """Pass a JSON-RPC request on as a frame; answers the image's reply, which may be an error.

        None: the image is too old to know such frames, and has done nothing. Raises ``FrameError``.
        """
        reply = read_reply(await self.pass_on(owner, name, environment, dump({"type": "mcp", "data": request})))
        return reply if reply is not None and reply.keys() & {"result", "error"} else None

    async def about(self, environment: Environment, what: str) -> Json | None:
        """What the image tells of itself: its ``schema``, its ``metadata``; None where it tells nothing.

        Raises:
            FrameError: no worker could be asked.
        """
        async with self._episodes.refusing(environment, closes=False):
            answer = (await self._queries.about(patient(environment))).get(what)
        return answer if isinstance(answer, dict) and answer else None


def observed(reply: bytes) -> Json:
    """The data of a reply.

    Raises:
        FrameError: it is an error frame, or none at all.
    """
    data = read_reply(reply)
    if data is None:
        raise FrameError(Code.UNKNOWN_TYPE, "the image does not know such a request", status=400)
    return data


def read_reply(reply: bytes) -> Json | None:
    """The data of a reply; None if the image does not know the type of the request.

    Raises:
        FrameError: it is another error frame, or no frame at all.
    """
    try:
        whole: Mapping[str, Any] = json.loads(reply)
        kind, data = whole["type"], whole["data"]
        is_error = kind == "error"
        code = Code(data["code"]) if is_error else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FrameError(Code.EXECUTION_ERROR, "the image's reply is no frame", status=502) from error
    if code is None:
        if not isinstance(data, dict):
            raise FrameError(Code.EXECUTION_ERROR, "the image's reply is no frame", status=502)
        return data
    if code is Code.UNKNOWN_TYPE:
        return None
    more = {key: value for key, value in data.items() if key not in ("message", "code")}
    raise FrameError(code, str(data.get("message", "")), status=_STATUS.get(code, 500), **more)
