"""Serves requests of other replicas, ``POST /peers/v1/{operation}``, which `ReplicaClient` sends.

The signature authenticates a request: `auth` requires no key for these paths. A request without a valid signature of
this gateway gets the same 404 as an unknown route. A request runs to its end even if the requesting replica
disconnects, so that no step stops halfway. The deadline in the request limits it.
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
    CLOCKS_DIFFER,
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
"""Runs an operation for a session that this replica holds.

The arguments are operation, session id, lease, message and timeout in seconds. Raises ``SessionNotFound`` if this
replica does not hold the session. The requesting replica raises the same error as this function.
"""


class ReplicaFrontend:
    """ASGI application that serves ``/peers/v1/``."""

    def __init__(
        self,
        secret: bytes,
        serve: Serve,
        *,
        max_body_bytes: int = BODY_MAX_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take the *secret* that all replicas of the gateway share. *clock* returns seconds since 1970."""
        self._signer = Signer(secret)
        self._serve = serve
        self._max_body_bytes = max_body_bytes
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request of another replica."""
        ask = self._asked(scope)
        if ask is None:
            await _unknown(send)
            return
        apart_s = abs(self._clock() - ask.at)
        status, body = 200, b""
        try:
            message = await read_body(scope, receive, self._max_body_bytes)
            if not is_same(ask.digest, digest(message)):
                await _unknown(send)
                return
            if apart_s > SKEW_S:
                logger.warning("peer_refused operation=%s clocks_apart_s=%.0f", ask.operation, apart_s)
                status, body = CLOCKS_DIFFER, dump({"now": self._clock()})
            else:
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
        return self._signer.asked(scope["path"], headers)

    async def _served(self, ask: SignedRequest, message: bytes) -> bytes:
        """Run the requested operation within its timeout.

        Raises:
            GatewayError: The operation failed. Errors of any other class are converted.
        """
        try:
            async with asyncio.timeout(ask.within_s) as limit:
                answer = await self._serve(ask.operation, ask.session, ask.lease, message, ask.within_s)
        except GatewayError:
            raise
        except Exception as error:  # the requesting replica needs a response, without a stack trace
            if isinstance(error, TimeoutError) and limit.expired():
                raise UpstreamTimeout(f"the replica that holds the session had {ask.within_s:g} s") from error
            logger.exception("peer_failed operation=%s session=%s", ask.operation, ask.session)
            raise UpstreamError("the replica that holds the session failed; its log says why (peer_failed)") from error
        if len(answer) > self._max_body_bytes:
            raise UpstreamError(f"the answer exceeds {self._max_body_bytes} bytes")
        return answer


async def _unknown(send: Send) -> None:
    await respond_json(send, 404, {"detail": "Not Found"})
