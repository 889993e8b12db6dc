"""Serves tools over JSON-RPC: ``POST /mcp``, the WebSocket ``/mcp``, and ``mcp`` frames on the socket ``/ws``.

This is not MCP's streamable HTTP: there are four methods, no ``initialize`` and no notifications. The result of a tool
call shows no reward, unlike a step's, but the environment counts the call.

Differences from a stock server:
* A session's tools can be called only after its first reset, because no environment exists before.
* ``openenv/session/close`` of a closed session returns ``closed`` again.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.ids import Owner
from gateway.core.json_text import dump
from gateway.frontends.openenv.episodes import Episodes
from gateway.frontends.openenv.frames import Code, FrameError, Json, ResetRequest
from gateway.frontends.openenv.passthrough import Passthrough
from gateway.frontends.openenv.replies import NO_EPISODE, mcp_tools, tool_result
from gateway.frontends.openenv.session_ids import Attachment, Attachments
from gateway.frontends.session_ids import SessionIds

logger = logging.getLogger(__name__)

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
SERVER_ERROR: Final = -32000
SHOWN_CHARS: Final = 200
"""Largest number of characters of an unknown name that an error message quotes."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: str | int | None = None


class _RpcError(Exception):
    """Ends a request with a JSON-RPC error object."""

    def __init__(self, code: int, message: str, data: Json | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data


class Mcp:
    """Serves JSON-RPC requests."""

    def __init__(self, *, episodes: Episodes, relayed: Passthrough, ids: SessionIds, attachments: Attachments) -> None:
        self._episodes = episodes
        self._relayed = relayed
        self._ids = ids
        self._attachments = attachments

    async def answer_text(
        self, owner: Owner, environment: Environment, text: str | None, *, own: Attachment | None = None
    ) -> str:
        """Return the text of the reply to a frame of the WebSocket ``/mcp``."""
        try:
            value = json.loads(text or "")
        except (ValueError, RecursionError) as error:
            return dump(_failed(None, PARSE_ERROR, f"Parse error: {error}")).decode()
        return dump(await self.answer_object(owner, environment, value, own=own)).decode()

    async def answer_bytes(self, owner: Owner, environment: Environment, body: bytes) -> Json:
        """Return the response to the body of ``POST /mcp``."""
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            return _failed(None, PARSE_ERROR, "Parse error")
        return await self.answer_object(owner, environment, value)

    async def answer_object(
        self, owner: Owner, environment: Environment, value: object, *, own: Attachment | None = None
    ) -> Json:
        """Return the response to a parsed request. *own* is the socket that it arrived on, if any."""
        try:
            request = _Request.model_validate(value)
        except ValidationError as error:
            return _failed(None, INVALID_REQUEST, f"Invalid request: {error}")
        try:
            result = await self._result(owner, environment, request, own)
        except _RpcError as error:
            return _failed(request.id, error.code, error.message, error.data)
        except FrameError as refused:
            return _failed(request.id, *_as_rpc(refused))
        return {"jsonrpc": "2.0", "id": request.id, "result": result}

    async def _result(self, owner: Owner, environment: Environment, request: _Request, own: Attachment | None) -> Json:
        match request.method:
            case "openenv/session/create":
                return {"session_id": own.id if own is not None else self._ids.new(owner, environment.name)}
            case "openenv/session/close":
                return await self._close(owner, environment, request.params, own)
            case "tools/list":
                id = await self._session(owner, environment, request.params, own)
                return await self._list(owner, environment, id)
            case "tools/call":
                return await self._call(owner, environment, request.params, own)
        raise _RpcError(METHOD_NOT_FOUND, f"Method not found: {request.method[:SHOWN_CHARS]}")

    async def _close(self, owner: Owner, environment: Environment, params: Json, own: Attachment | None) -> Json:
        id = params.get("session_id")
        if not id:
            raise _RpcError(INVALID_PARAMS, "Invalid params - 'session_id' is required")
        if own is not None and id == own.id:
            raise _RpcError(INVALID_REQUEST, "Cannot close active WebSocket-managed session via MCP method")
        name = await self._known(owner, environment, id)
        if self._attachments.close_later(owner, name):
            return {"session_id": id, "closed": False, "closing": True}
        await self._episodes.end(owner, name)
        return {"session_id": id, "closed": True}

    async def _call(self, owner: Owner, environment: Environment, params: Json, own: Attachment | None) -> Json:
        id = await self._session(owner, environment, params, own)
        tool, arguments = params.get("name"), params.get("arguments", {})
        if not tool:
            raise _RpcError(INVALID_PARAMS, "Missing 'name' in params")
        if not isinstance(arguments, dict):
            raise _RpcError(INVALID_PARAMS, "Invalid params - 'arguments' must be an object")
        if id is None:
            return await self._once(owner, environment, str(tool), arguments)
        if own is not None and own.begins:
            return await self._call_own(own, environment, str(tool), arguments)
        if own is not None and not own.has_begun:
            raise _RpcError(INTERNAL_ERROR, NO_EPISODE)
        return await self._called(owner, id, environment, str(tool), arguments)

    async def _called(self, owner: Owner, name: str, environment: Environment, tool: str, arguments: Json) -> Json:
        """Call a tool in an open episode and return its result. Raises ``FrameError``, ``_RpcError``."""
        if environment.wire is UpstreamKind.OPENENV:
            found = await self._asked_image(
                owner, name, environment, "tools/call", {"name": tool, "arguments": arguments}
            )
            if found is not None:
                return found
        result = await self._episodes.call_tool(owner, name, environment, tool, arguments)
        if result.error is not None:
            raise _RpcError(INTERNAL_ERROR, result.error)
        return tool_result(result)

    async def _list(self, owner: Owner, environment: Environment, name: str | None) -> Json:
        """Return the tools as the image lists them, if it speaks OpenEnv and has tools, else as the gateway does."""
        if environment.wire is UpstreamKind.OPENENV:
            found = None
            if name is not None and await self._episodes.has(owner, name, environment):
                found = await self._asked_image(owner, name, environment, "tools/list", {})
            found = found or await self._relayed.about(environment, "tools")
            if found is not None:
                return found
        return mcp_tools(await self._episodes.tools(environment))

    async def _asked_image(
        self, owner: Owner, name: str, environment: Environment, method: str, params: Json
    ) -> Json | None:
        """Return an image's own result. None: the image is too old for such requests. Raises ``_RpcError``."""
        request = {"jsonrpc": "2.0", "method": method, "params": params, "id": 1}
        reply = await self._relayed.rpc(owner, name, environment, request)
        if reply is None:
            return None
        error = reply.get("error")
        if isinstance(error, dict):
            code = error.get("code")
            raise _RpcError(
                code if isinstance(code, int) else INTERNAL_ERROR, str(error.get("message", "")), error.get("data")
            )
        result = reply.get("result")
        return result if isinstance(result, dict) else {}

    async def _call_own(self, own: Attachment, environment: Environment, tool: str, arguments: Json) -> Json:
        """Call a tool for a socket that can't reset. The first call, and the next after a loss, starts an episode."""
        try:
            if not own.has_begun:
                own.has_begun = True  # set before the reset: a partial episode then ends with the socket
                await self._episodes.reset(own.owner, own.id, environment, ResetRequest())
            return await self._called(own.owner, own.id, environment, tool, arguments)
        except FrameError:
            own.has_begun = await self._episodes.has(own.owner, own.id, environment)
            raise

    async def _once(self, owner: Owner, environment: Environment, tool: str, arguments: Json) -> Json:
        """Call a tool in a temporary episode on a default task."""
        name = self._ids.new(owner, environment.name)
        try:
            await self._episodes.reset(owner, name, environment, ResetRequest())
            return await self._called(owner, name, environment, tool, arguments)
        finally:
            await self._episodes.end(owner, name)

    async def _session(
        self, owner: Owner, environment: Environment, params: Json, own: Attachment | None
    ) -> str | None:
        """Return the name of the socket's own session, else of the requested session. None: there is neither."""
        if own is not None:
            return own.id
        id = params.get("session_id")
        return await self._known(owner, environment, id) if id else None

    async def _known(self, owner: Owner, environment: Environment, id: object) -> str:
        """Return the session name of *id*: a valid id, or a client's own name with an episode. Raises ``_RpcError``."""
        if isinstance(id, str):
            name = self._ids.name(id, owner, environment.name)
            if name == id or await self._episodes.has(owner, name, environment, or_ended=True):
                return name
        raise _RpcError(INVALID_PARAMS, f"Unknown session_id: {str(id)[:SHOWN_CHARS]}")


def _failed(id: str | int | None, code: int, message: str, data: Json | None = None) -> Json:
    return {"jsonrpc": "2.0", "id": id, "error": {"code": code, "message": message, "data": data}}


RPC_BROKEN: Final = dump(_failed(None, INTERNAL_ERROR, "a fault of the gateway")).decode()


def _as_rpc(refused: FrameError) -> tuple[int, str, Json | None]:
    if refused.code in (Code.CAPACITY_REACHED, Code.FACTORY_ERROR):
        return SERVER_ERROR, refused.message, dict(refused.more)
    return INTERNAL_ERROR, refused.message, refused.marks or None
