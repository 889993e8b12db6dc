"""Sends calls to another replica of the gateway, which holds the connection that is a session's state.

The client sends ``POST {peer}/peers/v1/{operation}`` over HTTP/1.1, and ``gateway.frontends.replicas`` answers.
A replica whose clock differs refuses a request with its own time, and gets it again with that time.
Requests and responses carry an HMAC. Its key is derived from the gateway's secret, so a replica rejects trainers and
other third parties that know its address. There is no nonce: an eavesdropper could repeat a request for `SKEW_S`
seconds. Replicas therefore need a private network, or TLS.

The client sends each request once. If the asking replica leaves, the holder continues until the request's deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core import errors
from gateway.core.errors import GatewayError, InvalidRequest, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Headers, Request
from gateway.core.session import Session
from gateway.upstreams.transport import HttpTransport

logger = logging.getLogger(__name__)

PREFIX: Final = "/peers/v1/"
BODY_MAX_BYTES: Final = 128 * 2**20
"""Largest message and largest response, in bytes: observations of some environments have tens of megabytes."""
SKEW_S: Final = 60
"""Largest difference between a request's time and the clock of the replica that gets it, in seconds."""
CLOCKS_DIFFER: Final = 425
"""HTTP status of a request that did not run, because its time is not that of the replica that got it."""
PEERS_MAX: Final = 1000
"""Largest number of replicas whose clocks are remembered."""
WITHIN_MAX_S: Final = 24 * 3600.0
"""Longest deadline of a request, in seconds."""
LATE_S: Final = 5.0
"""Extra seconds that the asking replica waits, because the holder's own timeout error is more precise."""
KEPT_S: Final = 15.0
"""Seconds for which an idle connection is reused: far below the server's 75 s, so that the server does not close it."""

_LABEL: Final = b"gateway peers v1"
_SIGNED: Final = ("x-gateway-session", "x-gateway-lease", "x-gateway-within", "x-gateway-at", "x-gateway-digest")
_PROOF: Final = "x-gateway-proof"


# -- signatures -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """The signed headers of a request, and their proof."""

    operation: str
    session: str
    lease: str
    within_s: float
    at: int
    """Time of the request, in seconds since 1970."""
    digest: str
    """SHA-256 of the body, in hexadecimal."""
    proof: str


class Signer:
    """Signs requests and responses between replicas, and verifies the signatures of requests."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, _LABEL, "sha256")  # a leaked proof does not reveal the secret itself

    def sign(self, operation: str, session: Session | None, within_s: float, at: int, body: bytes) -> dict[str, str]:
        """Return the headers of a request, including its proof."""
        named = ("", "") if session is None else (session.id, session.lease)
        words = (*named, repr(within_s), str(at), digest(body))
        return dict(zip(_SIGNED, words, strict=True)) | {_PROOF: self._proof("POST", PREFIX, operation, *words)}

    def of_answer(self, ask_proof: str, status: int, body: bytes) -> str:
        """Return the proof that a response comes from a replica and belongs to exactly this request."""
        return self._proof("answer", ask_proof, str(status), digest(body))

    def asked(self, path: str, headers: Mapping[str, str]) -> SignedRequest | None:
        """Return the signed headers of a request, or None if no replica of this gateway signed exactly these values."""
        words = [headers.get(name, "") for name in _SIGNED]
        operation, proof = path.removeprefix(PREFIX), headers.get(_PROOF, "")
        if operation == path or not is_same(proof, self._proof("POST", PREFIX, operation, *words)):
            return None
        session, lease, within_s, at, body_digest = words
        ask = SignedRequest(
            operation=operation,
            session=session,
            lease=lease,
            within_s=float(within_s),
            at=int(at),
            digest=body_digest,
            proof=proof,
        )
        return ask if 0 < ask.within_s <= WITHIN_MAX_S else None

    def _proof(self, *words: str) -> str:
        # JSON encodes different lists of words as different bytes.
        return hmac.new(self._key, json.dumps(words).encode(), hashlib.sha256).hexdigest()


def is_same(received: str, known: str) -> bool:
    """Return True if the *received* proof equals the *known* proof. Compare in constant time."""
    return hmac.compare_digest(received.encode("utf-8", "surrogatepass"), known.encode())


def digest(body: bytes) -> str:
    """Return the SHA-256 that represents *body* in a proof."""
    return hashlib.sha256(body).hexdigest()


def proof_header(proof: str) -> tuple[bytes, bytes]:
    """Return the response header that carries *proof*."""
    return _PROOF.encode(), proof.encode()


# -- errors -----------------------------------------------------------------------------------------------------------

_EXTRA: Final[Mapping[type[GatewayError], str]] = {
    errors.SessionClosed: "reason",
    errors.TaskInvalid: "problems",
    errors.RateLimited: "retry_after_s",
    errors.PoolExhausted: "retry_after_s",
    errors.EnvironmentUnavailable: "retry_after_s",
    errors.StartFailed: "reason",
    errors.WorkerFull: "capacity",
    errors.UpstreamGone: "sent",
    errors.ReplicaLeft: "sent",
}
"""The attribute that an error of each class has in addition to its message."""


def _tree(root: type[GatewayError]) -> list[type[GatewayError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


# Classes that an adapter derives are left out, because they have the code of their base class.
_KINDS: Final[Mapping[str, type[GatewayError]]] = {
    kind.code: kind for kind in _tree(GatewayError) if kind.__module__ == errors.__name__
}


def told(error: GatewayError) -> dict[str, Any]:
    """Return an error as JSON: ``code``, ``detail``, and the attribute of its class."""
    extra = _EXTRA.get(_KINDS[error.code])
    return {"code": error.code, "detail": error.detail} | ({extra: getattr(error, extra)} if extra else {})


def read_error(body: bytes) -> GatewayError | None:
    """Return the error that `told` wrote, or None if this version does not know the class or its attribute."""
    try:
        found = json.loads(body)
        kind = _KINDS[found["code"]]
        # This bypasses the constructors: their arguments differ, and they would build the message again.
        error = kind.__new__(kind, found["detail"])
        if (name := _EXTRA.get(kind)) is not None:
            value = found[name]
            setattr(error, name, tuple(map(tuple, value)) if isinstance(value, list) else value)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return error


# -- requests to other replicas ---------------------------------------------------------------------------------------


class ReplicaClient:
    """Sends requests to the other replicas of this gateway over HTTP.

    Only one replica can hold a session whose state is a connection (an OpenEnv socket). The others ask the holder.
    """

    def __init__(
        self,
        me: str,
        secret: bytes,
        *,
        max_body_bytes: int = BODY_MAX_BYTES,
        late_s: float = LATE_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the client without opening a connection.

        Args:
            me: URL under which other replicas reach this one. Empty in a single replica.
            secret: The gateway's secret, which all replicas share.
            max_body_bytes: Largest message and largest response, in bytes.
            late_s: Extra seconds that this replica waits after the holder's deadline.
            clock: Returns seconds since 1970.
        """
        self.me = me.rstrip("/")
        self._signer = Signer(secret)
        self._max_body_bytes = max_body_bytes
        self._late_s = late_s
        self._clock = clock
        self._transport = HttpTransport(kept_s=KEPT_S)
        self._is_closed = False
        self._ahead_s: dict[str, float] = {}
        """Seconds that other replicas' clocks are ahead of this one's, where they refused a request for that."""

    async def ask(
        self, peer: str, operation: str, session: Session | None, message: bytes, *, within_s: float
    ) -> bytes:
        """Send *operation* to the replica at the URL *peer*, and return the response's body.

        The replica holds the *session*. None: the operation concerns no session.

        Raises:
            SessionNotFound: The replica does not hold the session (any more). Nothing ran.
            UpstreamGone: The replica is not reachable (``sent`` False), or was lost during the request (``sent`` True).
            GatewayError: The error that the holder raised, with the same class.
        """
        if len(message) > self._max_body_bytes:
            raise InvalidRequest(f"the message for another replica exceeds {self._max_body_bytes} bytes")
        if self._is_closed:
            raise UpstreamError("this replica is shutting down and does not ask other replicas")
        if not within_s > 0:
            raise UpstreamTimeout("no time is left to ask the replica that holds the session")
        within_s = min(float(within_s), WITHIN_MAX_S)
        status, body = await self._asked(peer, operation, session, message, within_s)
        if status == CLOCKS_DIFFER:
            if len(self._ahead_s) >= PEERS_MAX:
                self._ahead_s.clear()
            self._ahead_s[peer] = float(json.loads(body)["now"]) - self._clock()
            status, body = await self._asked(peer, operation, session, message, within_s)
        if status == 200:
            return body
        raise read_error(body) or UpstreamError("the replica that holds the session failed in words unknown here")

    async def _asked(
        self, peer: str, operation: str, session: Session | None, message: bytes, within_s: float
    ) -> tuple[int, bytes]:
        """Send a request once, and return status and body of the response."""
        at = round(self._clock() + self._ahead_s.get(peer, 0.0))
        headers = self._signer.sign(operation, session, within_s, at, message)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        raw.append((b"content-type", b"application/octet-stream"))
        request = Request(b"POST", f"{PREFIX}{operation}".encode(), raw, message)
        try:
            status, body, answer_proof = await self._send(peer, request, within_s + self._late_s)
        except UpstreamError as error:  # the error that the trainer receives does not contain the address
            logger.warning(
                "peer_unreached peer=%s operation=%s session=%s error=%s",
                peer,
                operation,
                session and session.id,
                error.__cause__ or error,
            )
            raise
        if not is_same(answer_proof, self._signer.of_answer(headers[_PROOF], status, body)):
            # Another server has that address, or the replica rejects this replica's signature.
            logger.warning(
                "peer_unknown peer=%s operation=%s session=%s status=%d",
                peer,
                operation,
                session and session.id,
                status,
            )
            # Not `UpstreamGone`: a replica that rejects the signature still holds the session. No replica may take it.
            raise UpstreamError(
                "the server at the address of the session's replica is not a replica, or rejected this replica's "
                "signature: replicas need the same secret"
            )
        return status, body

    async def aclose(self) -> None:
        """Drop all connections. Requests in progress fail."""
        self._is_closed = True
        await self._transport.aclose()

    async def _send(self, peer: str, request: Request, limit_s: float) -> tuple[int, bytes, str]:
        """Send a request once, and return status, body and proof of the response."""
        try:
            async with asyncio.timeout(limit_s):  # the transport limits each pause, not the whole request
                exchange = await self._transport.send(WorkerId(peer), peer, request, silence_s=limit_s)
                try:
                    return exchange.status, await exchange.read(self._max_body_bytes), _proof_in(exchange.headers)
                finally:
                    await exchange.aclose()
        except (TimeoutError, UpstreamTimeout) as error:
            raise UpstreamTimeout(f"the replica that holds the session did not answer within {limit_s:g} s") from error
        except UpstreamGone as error:
            what = "was lost" if error.sent else "is not there"
            raise UpstreamGone(f"the replica that holds the session {what}", sent=error.sent) from error


def _proof_in(headers: Headers) -> str:
    return next((value.decode("latin-1") for name, value in headers if name == _PROOF.encode()), "")


# -- the address of this replica --------------------------------------------------------------------------------------


def default_peer_url(host: str, port: int) -> str:
    """Guess the URL under which other replicas reach a gateway that listens on *host* and *port*.

    A host name or an address stays unchanged. Only replicas on this machine reach a loopback address. If *host* means
    all addresses, the URL has the address from which this machine (or this container) reaches other machines.
    """
    shown = host.strip("[]")
    try:
        is_all = not shown or ipaddress.ip_address(shown).is_unspecified
    except ValueError:  # a name
        is_all = False
    if is_all:
        shown = _own_address(socket.AF_INET6, socket.AF_INET) if ":" in shown else _own_address(socket.AF_INET)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


# Addresses for documentation (RFC 5737, RFC 3849): no machine has them, so the default route leads to them.
_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def _own_address(*families: socket.AddressFamily) -> str:
    for family in families:
        for address in (*_by_route(family), *_by_name(family)):
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return address
    return "127.0.0.1"


def _by_route(family: socket.AddressFamily) -> list[str]:
    """Return the address from which this machine sends. Connecting a datagram socket sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((_FAR[family], 9))
            return [str(asked.getsockname()[0])]
    except OSError:  # this machine has no such route, or not this address family
        return []


def _by_name(family: socket.AddressFamily) -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, family=family, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]
