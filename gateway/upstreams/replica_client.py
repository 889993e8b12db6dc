"""One replica asks another: for a session whose state is a connection that the other one holds.

``POST {peer}/peers/v1/{operation}`` over HTTP/1.1; ``gateway.frontends.replicas`` answers. Requests and answers
bear an HMAC by a key that is made of the gateway's secret, so a stranger that got a replica's address is not believed,
and neither is a trainer. There is no nonce: whoever reads along could repeat a request for `SKEW_S` seconds, so
replicas speak in a network of their own, or over TLS.

A request is sent once. An asker that leaves does not end what the other side does; the deadline that it was given does.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import httpx

from gateway.core import errors
from gateway.core.errors import GatewayError, InvalidRequest, UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.session import Session

logger = logging.getLogger(__name__)

PREFIX: Final = "/peers/v1/"
BODY_MAX_BYTES: Final = 128 * 2**20
"""Of a message and of its answer: observations of some environments have tens of megabytes."""
SKEW_S: Final = 60
"""How far the clocks of two replicas may be apart, and how long a request counts."""
WITHIN_MAX_S: Final = 24 * 3600.0
LATE_S: Final = 5.0
"""How much longer than the time that it gives an asker waits: the other side tells the end of it better."""
CONNECT_S: Final = 5.0
CLIENTS: Final = 64
"""A client looks at all its connections for each request: 64 requests at once go eight times as fast with one each."""
CONNECTIONS_MAX: Final = 16
"""Of each client; with that the requests that may be under way at once, to all replicas together, are 1024."""
KEPT_MAX: Final = 4
"""Idle connections of each client, to all replicas together."""
KEPT_S: Final = 15.0
"""How long idle connections are kept: far below the server's 75 s, so that no request goes into one that closes."""

_LABEL: Final = b"gateway peers v1"
_SESSION, _LEASE, _WITHIN, _AT = "x-gateway-session", "x-gateway-lease", "x-gateway-within", "x-gateway-at"
_DIGEST, _PROOF = "x-gateway-digest", "x-gateway-proof"


# -- what is signed ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedRequest:
    """A request's head, as it is signed."""

    operation: str
    session: str
    lease: str
    within_s: float
    at: int
    """When it was made, in seconds since 1970."""
    digest: str
    """SHA-256 of its body, in hexadecimal."""

    def headers(self, proof: str) -> dict[str, str]:
        """The headers that carry it."""
        return {
            _SESSION: self.session,
            _LEASE: self.lease,
            _WITHIN: repr(self.within_s),
            _AT: str(self.at),
            _DIGEST: self.digest,
            _PROOF: proof,
        }


class Signer:
    """Signs requests and answers between replicas, and tells whether they are signed."""

    def __init__(self, secret: bytes) -> None:
        self._key = hmac.digest(secret, _LABEL, "sha256")  # a leaked proof tells nothing of the secret itself

    def of_ask(self, ask: SignedRequest) -> str:
        """The proof of a request."""
        told = (ask.operation, ask.session, ask.lease, repr(ask.within_s), str(ask.at), ask.digest)
        return self._proof("POST", PREFIX, *told)

    def of_answer(self, ask_proof: str, status: int, body: bytes) -> str:
        """The proof of an answer: it is a replica's, and to this very request."""
        return self._proof("answer", ask_proof, str(status), digest(body))

    def asked(self, path: str, headers: Mapping[str, str]) -> tuple[SignedRequest, str] | None:
        """Read a request's head and its proof; None if it is none, or not signed by a replica of this gateway."""
        operation = path.removeprefix(PREFIX)
        if operation == path or not operation.replace("_", "").isalnum() or not operation.isascii():
            return None
        try:
            ask = SignedRequest(
                operation=operation,
                session=headers[_SESSION],
                lease=headers[_LEASE],
                within_s=float(headers[_WITHIN]),
                at=int(headers[_AT]),
                digest=headers[_DIGEST],
            )
            proof = headers[_PROOF]
        except (KeyError, ValueError):
            return None
        # As it was written, too: "7" and "7.0" are one number, but only one of them was signed.
        is_exact = all(headers[name] == value for name, value in ask.headers(proof).items())
        if not is_exact or not is_same(proof, self.of_ask(ask)) or not 0 < ask.within_s <= WITHIN_MAX_S:
            return None
        return ask, proof

    def _proof(self, *told: str) -> str:
        # JSON: no two lists of words become the same bytes, whatever is in them.
        return hmac.new(self._key, json.dumps(told).encode(), hashlib.sha256).hexdigest()


def is_same(told: str, known: str) -> bool:
    """Compare without telling by the time how much is the same."""
    return hmac.compare_digest(told.encode("utf-8", "surrogatepass"), known.encode())


def digest(body: bytes) -> str:
    """What stands for a body in a proof."""
    return hashlib.sha256(body).hexdigest()


def proof_header(proof: str) -> tuple[bytes, bytes]:
    """The header of an answer that bears its proof."""
    return _PROOF.encode(), proof.encode()


# -- errors there and back --------------------------------------------------------------------------------------------


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("neither true nor false")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError("not a finite number")
    return value


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError("not a whole number")
    return value


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, list):
        raise TypeError("not a list")
    return tuple((_text(path), _text(message)) for path, message in value)


_EXTRA: Mapping[type[GatewayError], Mapping[str, Callable[[object], object]]] = {
    errors.SessionClosed: {"reason": _text},
    errors.TaskInvalid: {"problems": _pairs},
    errors.TaskRateLimited: {"retry_after_s": _number},
    errors.PoolExhausted: {"retry_after_s": _number},
    errors.EnvironmentUnavailable: {"retry_after_s": _number},
    errors.StartFailed: {"reason": _text},
    errors.WorkerFull: {"capacity": _whole},
    errors.UpstreamGone: {"sent": _flag},
    errors.ReplicaLeft: {"sent": _flag},
}
"""What errors tell besides their sentence, and how it is read."""


def _tree(root: type[GatewayError]) -> list[type[GatewayError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


# Without what an adapter refines for itself, which goes by the code of its ancestor.
_KINDS: Mapping[str, type[GatewayError]] = {
    kind.code: kind for kind in _tree(GatewayError) if kind.__module__ == errors.__name__
}


def told(error: GatewayError) -> dict[str, Any]:
    """What an answer says of an error: ``code``, ``detail``, and what its class tells besides."""
    extra = _EXTRA.get(_KINDS[error.code], {})
    return {"code": error.code, "detail": error.detail} | {name: getattr(error, name) for name in extra}


def read_error(body: bytes) -> GatewayError | None:
    """Make the error again that `told` wrote; None if it is of no class that is known here."""
    try:
        found = json.loads(body)
        kind = _KINDS[found["code"]]
        extra = {name: read(found[name]) for name, read in _EXTRA.get(kind, {}).items()}
        # Past the constructors: each takes other arguments, and makes the sentence that is there already.
        error = kind.__new__(kind, _text(found["detail"]))
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    for name, value in extra.items():
        setattr(error, name, value)
    return error


# -- asking -----------------------------------------------------------------------------------------------------------


class ReplicaClient:
    """The other replicas of this gateway, over HTTP.

    A session whose state is a connection (an OpenEnv socket) is held by one replica; the others ask that one.
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
        """Connect to nothing yet.

        Args:
            me: the URL under which other replicas reach this one; empty: there are no others.
            secret: the gateway's, which all replicas share.
            max_body_bytes: of a message and of its answer.
            late_s: how much longer than the time that it gives an asker waits.
            clock: seconds since 1970.
        """
        self._me = me.rstrip("/")
        self._seal = Signer(secret)
        self._max_body_bytes = max_body_bytes
        self._late_s = late_s
        self._clock = clock
        # One context for all: making it takes longer than all the rest.
        tls = httpx.create_ssl_context(trust_env=False)
        limits = httpx.Limits(
            max_connections=CONNECTIONS_MAX, max_keepalive_connections=KEPT_MAX, keepalive_expiry=KEPT_S
        )
        # No proxy of the process environment: it is for the world outside, not for replicas.
        self._clients = [httpx.AsyncClient(verify=tls, limits=limits, trust_env=False) for _ in range(CLIENTS)]
        self._under_way = [0] * CLIENTS
        self._is_closed = False

    @property
    def me(self) -> str:
        """The URL under which other replicas reach this one; empty if there are none."""
        return self._me

    async def ask(self, peer: str, operation: str, session: Session, message: bytes, *, within_s: float) -> bytes:
        """Let the replica at the URL *peer* do *operation* for a session that it holds, and return its answer.

        Raises:
            SessionNotFound: it does not hold the session (any more); nothing ran.
            UpstreamGone: the replica is not there (``sent`` False), or was lost while it worked (``sent`` True).
            GatewayError: the error that failed over there, as the same class.
        """
        if len(message) > self._max_body_bytes:
            raise InvalidRequest(f"the message for another replica exceeds {self._max_body_bytes} bytes")
        if self._is_closed:
            raise UpstreamError("this replica is going away, and asks no other one any more")
        if not within_s > 0:
            raise UpstreamTimeout("no time is left to ask the replica that holds the session")
        ask = SignedRequest(
            operation=operation,
            session=session.id,
            lease=session.lease,
            within_s=min(float(within_s), WITHIN_MAX_S),
            at=round(self._clock()),
            digest=digest(message),
        )
        proof = self._seal.of_ask(ask)
        try:
            status, body, answer_proof = await self._post(peer, ask, proof, message)
        except GatewayError as error:  # trainers are told of it without the address
            logger.warning(
                "peer_unreached peer=%s operation=%s session=%s error=%s", peer, operation, session.id, error
            )
            raise
        if not is_same(answer_proof, self._seal.of_answer(proof, status, body)):
            # Another gateway or server at that address, or one that does not believe us.
            logger.warning(
                "peer_unknown peer=%s operation=%s session=%s status=%d", peer, operation, session.id, status
            )
            # Not "gone": a replica that only refuses to believe us holds the session still, and it must not be taken.
            raise UpstreamError(
                f"what answers for the replica that holds the session is none, or does not take this one for one: "
                f"replicas need the same secret, and clocks that are less than {SKEW_S} s apart"
            )
        if status == 200:
            return body
        raise read_error(body) or UpstreamError("the replica that holds the session failed in words unknown here")

    async def aclose(self) -> None:
        """Let go of connections; requests under way fail."""
        self._is_closed = True
        for client in self._clients:
            await client.aclose()

    async def _post(self, peer: str, ask: SignedRequest, proof: str, message: bytes) -> tuple[int, bytes, str]:
        """Send a request once, and read its answer: status, body, and the proof that it bears."""
        limit_s = ask.within_s + self._late_s
        begin_s = min(CONNECT_S, limit_s)
        timeout = httpx.Timeout(limit_s, connect=begin_s, pool=begin_s)
        headers = ask.headers(proof) | {"accept-encoding": "identity", "content-type": "application/octet-stream"}
        url = f"{peer.rstrip('/')}{PREFIX}{ask.operation}"
        # Of those with the fewest the first: its connections are in use, and kept.
        least = self._under_way.index(min(self._under_way))
        self._under_way[least] += 1
        try:
            async with (
                asyncio.timeout(limit_s),  # httpx bounds the pauses, not the whole
                self._clients[least].stream("POST", url, content=message, headers=headers, timeout=timeout) as response,
            ):
                return response.status_code, await self._read(response), response.headers.get(_PROOF, "")
        except httpx.PoolTimeout as error:
            under_way = CLIENTS * CONNECTIONS_MAX
            raise UpstreamError(f"{under_way} requests to other replicas are under way already") from error
        # These come before a byte of the request goes out; of all others that is not sure.
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise UpstreamGone(f"the replica that holds the session is not there: {_why(error)}", sent=False) from error
        except (TimeoutError, httpx.TimeoutException) as error:
            raise UpstreamTimeout(f"the replica that holds the session did not answer within {limit_s:g} s") from error
        except httpx.HTTPError as error:
            raise UpstreamGone(f"the replica that holds the session was lost: {_why(error)}", sent=True) from error
        finally:
            self._under_way[least] -= 1

    async def _read(self, response: httpx.Response) -> bytes:
        parts: list[bytes] = []
        size = 0
        async for part in response.aiter_raw():
            size += len(part)
            if size > self._max_body_bytes:
                raise UpstreamError(f"the other replica's answer exceeds {self._max_body_bytes} bytes")
            parts.append(part)
        return b"".join(parts)


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__


# -- where others reach this one --------------------------------------------------------------------------------------


def default_peer_url(host: str, port: int) -> str:
    """Guess the URL under which other replicas reach a gateway that listens on *host* and *port*.

    A host or an address is taken as it is, loopback too: then only replicas on this machine reach it. For "all
    addresses" it is the one from which this machine reaches others; in a container, the container's.
    """
    shown = host.strip("[]")
    try:
        is_all = not shown or ipaddress.ip_address(shown).is_unspecified
    except ValueError:  # a name
        is_all = False
    if is_all:
        shown = _own_address(socket.AF_INET6, socket.AF_INET) if ":" in shown else _own_address(socket.AF_INET)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


# Addresses of documentation (RFC 5737, RFC 3849): nobody has them, so the way to them is the default route.
_FAR = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}


def _own_address(*families: socket.AddressFamily) -> str:
    for family in families:
        for address in (*_by_route(family), *_by_name(family)):
            if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
                return address
    return "127.0.0.1"


def _by_route(family: socket.AddressFamily) -> list[str]:
    """The address that this machine sends from; "connecting" a datagram socket sends nothing."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asked:
            asked.connect((_FAR[family], 9))
            return [str(asked.getsockname()[0])]
    except OSError:  # no such route, or no such family
        return []


def _by_name(family: socket.AddressFamily) -> list[str]:
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, family=family, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(entry[4][0]) for entry in found]
