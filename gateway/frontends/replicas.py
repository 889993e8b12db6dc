"""Serves requests of other replicas: ``POST /peers/v1/{operation}``; they send them by `ReplicaClient`.

The signature is the key: `auth` lets these paths through, and a request that no replica of this gateway has signed is
answered as any unknown route. A request is served to its end although the asking replica left: a step that began is not
stopped halfway. The deadline in the request bounds it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from gateway.core.errors import GatewayError, UpstreamError, UpstreamTimeout
from gateway.core.json_text import dump
from gateway.frontends.asgi import HungUp, read_body, respond, respond_json
from gateway.frontends.errors import status_of
from gateway.upstreams.replica_client import (
    BODY_MAX_BYTES,
    SKEW_S,
    SignedRequest,
    Signer,
    digest,
    is_same,
    proof_header,
    told,
)

logger = logging.getLogger(__name__)

_BYTES = (b"content-type", b"application/octet-stream")
_JSON = (b"content-type", b"application/json")


Serve = Callable[[str, str, str, bytes, float], Awaitable[bytes]]
"""Does an operation for a session that this replica holds: operation, session id, lease, message, seconds.

Raises ``SessionNotFound`` if this replica does not hold it, else what failed; the asking replica raises the same.
"""


class ReplicaFrontend:
    """The ASGI app behind ``/peers/v1/``."""

    def __init__(
        self,
        secret: bytes,
        serve: Serve,
        *,
        max_body_bytes: int = BODY_MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """*secret* is the gateway's, which all replicas share; *clock* tells seconds since 1970."""
        self._signer = Signer(secret)
        self._serve = serve
        self._max_body_bytes = max_body_bytes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request of another replica."""
        ask = self._asked(scope)
        if ask is None:
            await _unknown(send)
            return
        status, body = 200, b""
        try:
            message = await read_body(scope, receive, self._max_body_bytes)
            if not is_same(ask.digest, digest(message)):
                await _unknown(send)
                return
            body = await self._served(ask, message)
        except HungUp:
            return
        except GatewayError as error:
            status, body = status_of(error), dump(told(error))
        kind = _BYTES if status == 200 else _JSON
        await respond(send, status, body, (kind, proof_header(self._signer.of_answer(ask.proof, status, body))))

    def _asked(self, scope: Scope) -> SignedRequest | None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return None
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        ask = self._signer.asked(scope["path"], headers)
        if ask is None:
            return None
        apart_s = abs(self._clock() - ask.at)
        if apart_s > SKEW_S:
            logger.warning("peer_refused operation=%s clocks_apart_s=%.0f", ask.operation, apart_s)
            return None
        return ask

    async def _served(self, ask: SignedRequest, message: bytes) -> bytes:
        """Do what is asked, within its time.

        Raises:
            GatewayError: it failed, whatever happened.
        """
        try:
            async with asyncio.timeout(ask.within_s) as limit:
                answer = await self._serve(ask.operation, ask.session, ask.lease, message, ask.within_s)
        except GatewayError:
            raise
        except Exception as error:  # the asker must get an answer, and no trace
            if isinstance(error, TimeoutError) and limit.expired():
                raise UpstreamTimeout(f"the replica that holds the session had {ask.within_s:g} s") from error
            logger.exception("peer_failed operation=%s session=%s", ask.operation, ask.session)
            raise UpstreamError("the replica that holds the session failed; its log tells why") from error
        if len(answer) > self._max_body_bytes:
            raise UpstreamError(f"the answer exceeds {self._max_body_bytes} bytes")
        return answer


async def _unknown(send: Send) -> None:
    await respond_json(send, 404, {"detail": "Not Found"})
