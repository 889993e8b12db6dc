"""Query OpenEnv servers over HTTP: their abilities, and JSON-RPC at ``/mcp``.

The servers' stateless HTTP reset and step are never used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gateway.core.errors import UpstreamError, UpstreamGone
from gateway.core.ids import WorkerId
from gateway.core.json_text import compact, parse
from gateway.core.ports.transport import Request, Transport

K = TypeVar("K")
V = TypeVar("V")

ANSWER_S: Final = 20.0
"""Seconds for requests that a server answers from memory: an environment that blocks the server's loop delays them."""
MAX_ANSWER_BYTES: Final = 64 * 2**20
KNOWN_MAX: Final = 4096

UNKNOWN_SESSION: Final = -32602
INITIALISING: Final = -32600
REFUSED: Final = -32000


@dataclass(frozen=True, slots=True)
class Place:
    """A worker and its address."""

    worker: WorkerId
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """A server's abilities, from the paths in its OpenAPI page: the page has no release number."""

    has_mcp: bool = False
    """Whether the server has ``/mcp``, as since 0.2.1."""
    has_task_api: bool = False
    """Whether the server has the Task API, as since 0.4.1."""

    @property
    def may_have_lasting_sessions(self) -> bool:
        """Whether sessions may outlive their sockets, as since 0.5, which is newer than the Task API."""
        return self.has_mcp and self.has_task_api


class RpcError(UpstreamError):
    """A server's JSON-RPC error at ``/mcp``."""

    def __init__(self, code: int, message: str, data: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.rpc_code = code
        self.data = data


class Http:
    """Sends requests to servers over a transport, and caches the servers' abilities."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._abilities: OrderedDict[Place, Abilities] = OrderedDict()

    async def abilities(self, at: Place) -> Abilities:
        """Return the abilities of the server at *at*. A server without an OpenAPI page counts as the first release."""
        known = self._abilities.get(at)
        if known is not None:
            return known
        status, page = await self.get(at, "/openapi.json")
        paths = page.get("paths", {}) if status == 200 and isinstance(page, Mapping) else {}
        if not isinstance(paths, Mapping):
            paths = {}
        has_mcp = "/mcp" in paths
        has_task_api = "/list_environments" in paths and any(str(path).endswith("/splits") for path in paths)
        return remember(self._abilities, at, Abilities(has_mcp=has_mcp, has_task_api=has_task_api), KNOWN_MAX)

    async def status(self, at: Place, target: str, *, silence_s: float = ANSWER_S) -> int:
        """Return the status of a GET."""
        status, _ = await self._send(at, b"GET", target, b"", silence_s)
        return status

    async def get(self, at: Place, target: str) -> tuple[int, Any]:
        """Return the status and JSON of a GET; the JSON is None for an error response that can't be parsed."""
        return _read(target, *await self._send(at, b"GET", target, b"", ANSWER_S))

    async def post(self, at: Place, target: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        """Return the status and JSON of a POST of *body*, like `get`."""
        return _read(target, *await self._send(at, b"POST", target, compact(body), ANSWER_S))

    async def call(
        self,
        at: Place,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        silence_s: float = ANSWER_S,
        repeats: bool = True,
    ) -> Mapping[str, Any]:
        """Call *method* at ``/mcp`` and return its result.

        Args:
            repeats: Whether to retry the call after a broken connection; False if the call must not run twice.

        Raises:
            RpcError: The server returns an error.
            UpstreamError: The response is not JSON-RPC.
        """
        body = compact({"jsonrpc": "2.0", "method": method, "params": dict(params or {}), "id": 1})
        status, text = await self._send(at, b"POST", "/mcp", body, silence_s, repeats=repeats)
        _, answer = _read("/mcp", status, text)
        error = answer.get("error") if isinstance(answer, Mapping) else None
        if isinstance(error, Mapping):
            data, code = error.get("data"), error.get("code")
            raise RpcError(
                code if isinstance(code, int) else 0,
                str(error.get("message") or "the server gave no reason"),
                data if isinstance(data, Mapping) else {},
            )
        result = answer.get("result") if isinstance(answer, Mapping) else None
        if status != 200 or not isinstance(result, Mapping):
            raise UpstreamError(f"the worker answered {status} to {method} at /mcp, and no result")
        return result

    async def _send(
        self, at: Place, method: bytes, target: str, body: bytes, silence_s: float, *, repeats: bool = True
    ) -> tuple[int, bytes]:
        headers = [(b"accept", b"application/json")]
        if body:
            headers.append((b"content-type", b"application/json"))
        request = Request(method, target.encode(), headers, body)
        try:
            return await self._sent(at, request, silence_s)
        except UpstreamGone as error:
            if not (repeats and error.sent):  # a sent request may have met a connection that the server closed
                raise
        return await self._sent(at, request, silence_s)

    async def _sent(self, at: Place, request: Request, silence_s: float) -> tuple[int, bytes]:
        exchange = await self._transport.send(at.worker, at.address, request, silence_s=silence_s)
        try:
            return exchange.status, await exchange.read(MAX_ANSWER_BYTES)
        finally:
            await exchange.aclose()


def _read(target: str, status: int, text: bytes) -> tuple[int, Any]:
    try:
        return status, parse(text)
    except ValueError as error:
        if status != 200:
            return status, None
        raise UpstreamError(f"the worker's answer to {target} is not JSON") from error


def remember(known: OrderedDict[K, V], key: K, value: V, at_most: int) -> V:
    """Store *value* in *known*, limited to the newest *at_most* values, and return *value*."""
    known[key] = value
    known.move_to_end(key)
    if len(known) > at_most:
        known.popitem(last=False)
    return value
