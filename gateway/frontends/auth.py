"""Authenticates trainers and operators by their keys.

A client sends its key as ``Authorization: Bearer``, as ``X-API-Key``, or in the path as ``/k/{key}/…`` if it cannot
send headers. This module removes the key from the request: no frontend, log or worker ever sees a key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.ids import Owner
from gateway.core.routes import AREAL_SEGMENTS, KEY_SEGMENT, OPERATOR_SEGMENTS
from gateway.frontends.asgi import denial, respond_json
from gateway.frontends.router import is_open, segment_of

_KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))


class Authenticator:
    """ASGI middleware that passes requests with a valid key to *inside* and sets ``scope["gateway.owner"]``."""

    def __init__(self, inside: ASGIApp, *, trainers: Mapping[str, str], operators: Mapping[str, str]) -> None:
        """Keep only digests. *trainers* and *operators* map names to keys. If both are empty, access is open."""
        self._inside = inside
        self._trainers = _digests(trainers)
        self._operators = _digests(operators)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key and pass the request on without it, or respond with 401."""
        if scope["type"] not in ("http", "websocket"):
            await self._inside(scope, receive, send)
            return
        key, scope = _take_key(scope)
        if not self._trainers and not self._operators:
            scope["gateway.owner"] = Owner("")
        elif not is_open(scope["path"]):
            segment = segment_of(scope["path"]).lower()
            keys = self._operators if segment in OPERATOR_SEGMENTS else self._trainers
            owner = _match(keys, key) if keys or segment in OPERATOR_SEGMENTS else Owner("")
            if owner is None:
                await _refuse(scope, send, key)
                return
            scope["gateway.owner"] = owner
        await self._inside(scope, receive, send)


def _digests(keys: Mapping[str, str]) -> list[tuple[Owner, bytes]]:
    return [(Owner(name), hashlib.sha256(key.encode()).digest()) for name, key in keys.items()]


def _take_key(scope: Scope) -> tuple[str, Scope]:
    """Return the key and the scope without it. Without a key in the request, the key is ``""``."""
    keys = [value for name, value in scope["headers"] if name in _KEY_HEADERS and value]
    inner = {**scope, "headers": [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]}
    key = keys[0].decode("latin-1") if keys else ""
    if key[:7].lower() == "bearer ":
        key = key[7:].strip()
    path: str = scope["path"]
    if path.startswith(prefix := f"/{KEY_SEGMENT}/"):
        key, slash, rest = path.removeprefix(prefix).partition("/")
        inner["path"] = slash + rest or "/"
        inner["gateway.keyed"] = True
        raw: bytes = scope.get("raw_path") or path.encode()
        inner["raw_path"] = b"/" + raw[len(prefix) :].partition(b"/")[2]
    return key, inner


def _match(keys: list[tuple[Owner, bytes]], key: str) -> Owner | None:
    # Every key is compared, as digests of equal length. So the duration reveals neither the key nor a matching prefix.
    digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
    found = None
    for owner, known in keys:
        if hmac.compare_digest(known, digest):
            found = owner
    return found


async def _refuse(scope: Scope, send: Send, key: str) -> None:
    detail = "this key is not known here" if key else "a key is needed: Authorization: Bearer, X-API-Key, or /k/{key}/…"
    challenge = (b"www-authenticate", b"Bearer")
    body = {"detail": detail}
    if segment_of(scope["path"]) in AREAL_SEGMENTS:
        body = {"error": "unauthorized", **body}  # AReaL's format of errors
    if scope["type"] == "websocket":
        send = denial(send)
    await respond_json(send, 401, body, [challenge])
