"""Authenticates trainers and operators by their keys.

A client sends its key as ``Authorization: Bearer``, as ``X-API-Key``, or in the path as ``/k/{key}/…`` if it cannot
send headers. This module removes the key from the request: no frontend, log or worker ever sees a key.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.ids import Owner
from gateway.core.ports.transport import TRACE
from gateway.core.routes import AREAL_SEGMENTS, DASHBOARD_SEGMENT, KEY_SEGMENT, OPERATOR_SEGMENTS
from gateway.frontends.asgi import ByteBudget, denial, header, headers, respond_json, trace_of
from gateway.frontends.dashboard.sign_in import SignIn, Viewer
from gateway.frontends.router import is_open, segment_of
from gateway.metrics import Metrics
from gateway.settings import Settings, is_loopback
from gateway.settings.keys import NO_LIMITS, Keyring, KnownKey, digest_of, parse_keys

logger = logging.getLogger(__name__)

_KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))
_KEY_PATHS = f"/{KEY_SEGMENT}/"
_BLANKS = " \t"
KEY_CHARS: Final = 16
"""Number of characters below which the gateway warns about a key at its start. ``scripts/keys`` makes longer keys."""
LOG_PAUSE_S: Final = 10.0
"""Seconds between two log lines about refused requests with the same reason."""
_WRONG_KEY = "this key is not known here"
_TRAINERS_KEY = "this is a trainer's key, and this path needs an operator's: gateway keys add NAME --operator"
_OPERATORS_KEY = "this is an operator's key, and episodes need a trainer's: gateway keys add NAME"
_NO_KEY = "a key is needed: Authorization: Bearer, X-API-Key, or /k/{key}/…"
_OWN_SITES: Final = frozenset(("same-origin", "none"))
_PRIVATE_ENDS: Final = (".localhost", ".internal")
"""Ends of names that the public DNS never has. Containers reach their host as ``host.docker.internal``."""
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
HOSTS_REMEMBERED: Final = 64
"""Number of Host headers, of at most 128 KiB each, whose check is remembered."""


class BrowserGuard:
    """Protects a gateway without keys from web pages in the browser of a user who can reach it.

    A page of any site may send requests to ``127.0.0.1``. With DNS rebinding it may also read the answers. The browser
    then states the page's origin in ``Origin`` or ``Sec-Fetch-Site``, or the site's name in ``Host``. Programs send
    neither ``Origin`` nor ``Sec-Fetch-Site``, or the gateway's own address as ``Origin``.
    """

    def __init__(self, host: str = "127.0.0.1", names: Iterable[str] = ()) -> None:
        """Create the guard of one gateway.

        Args:
            host: Address that the gateway listens on. If it is not loopback, other containers can reach the gateway by
                a name without dots, such as a service of Docker Compose. No public site has such a name.
            names: Further host names of the gateway. Their pages may send requests.
        """
        self._host = host.lower()
        self._names = frozenset(name.rstrip(".").lower() for name in names)
        self._is_loopback = is_loopback(host)
        self._is_own = lru_cache(HOSTS_REMEMBERED)(self._is_own_host)  # clients send few, and each again and again

    def refusal(self, scope: Scope) -> str:
        """Return why the gateway refuses the request. Empty: no page of another site caused it."""
        host = header(scope, b"host")
        if host is not None and not self._is_own(host):  # browsers always send it
            return (
                f"Host {host[:100]!r} is not a name of this gateway, which has no keys: address it as localhost or by "
                "its IP address, add the name to GATEWAY_PUBLIC_NAMES, or set GATEWAY_TRAINER_KEYS"
            )
        origins, stated = headers(scope, b"origin"), header(scope, b"sec-fetch-site")
        if not origins and stated is None:
            return ""
        if origins and all(_host_of(origin) in self._names for origin in origins):
            return ""
        site = (stated or "none").strip().lower()
        if site in _OWN_SITES and all(host is not None and _is_same(origin, host) for origin in origins):
            return ""
        page = origins[0] if origins else site
        return (
            f"a page of another site ({page[:100]!r}) sent this request, and this gateway has no keys: add the page's "
            "host name to GATEWAY_PUBLIC_NAMES, or set GATEWAY_TRAINER_KEYS"
        )

    def _is_own_host(self, host: str) -> bool:
        """Return True if a page with the Host header *host* cannot belong to another site."""
        name = _host_of(f"//{host}")
        if not name:
            return False
        if name == "localhost" or name.endswith(_PRIVATE_ENDS) or _is_address(name):
            return True
        if name == self._host or name in self._names:
            return True
        return not self._is_loopback and "." not in name


class Authenticator:
    """ASGI middleware that passes requests with a valid key to the frontends.

    It sets ``scope["gateway.owner"]`` to the key's name, and ``scope["gateway.environments"]`` to the names of the
    environments that the key may use (empty: all). It also sets the trace context of the requests to workers.
    """

    def __init__(
        self, inside: ASGIApp, settings: Settings, keys: Keyring, metrics: Metrics, *, sign_in: SignIn
    ) -> None:
        """Create the middleware in front of *inside*, and log the names of short keys.

        *sign_in* reads the cookies of the dashboard.

        Without any key in *keys*, and without a file of keys, access is open to requests that `BrowserGuard` accepts.
        """
        given = [*parse_keys(settings.trainer_keys).items(), *parse_keys(settings.operator_keys).items()]
        short = sorted(name for name, key in given if len(key) < KEY_CHARS)
        if short:
            logger.warning("short_keys names=%s shorter_than=%d", ",".join(short), KEY_CHARS)
        self._inside = inside
        self._keys = keys
        self._sign_in = sign_in
        self._guard = BrowserGuard(settings.host, settings.public_names)
        self._budget = ByteBudget(settings.max_held_bytes, settings.max_held_bytes_per_key)
        self._refusals = _Refusals(metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key and pass the request on without it, or respond with 401."""
        if scope["type"] not in ("http", "websocket"):
            await self._inside(scope, receive, send)
            return
        key, inner = _take_key(scope)
        path: str = inner["path"]
        if is_open(path):
            await self._inside(inner, receive, send)
            return
        segment = segment_of(path).lower()
        if segment == DASHBOARD_SEGMENT:
            await self._show(key, inner, receive, send)
            return
        keys, limits = self._needed(path), NO_LIMITS
        if keys is None:
            owner = Owner("")
            if reason := self._guard.refusal(inner):
                self._refusals.note("other_site", inner)
                await _refuse(inner, send, 403, reason)
                return
        else:
            # The duration of the lookup depends on digests, which a client cannot choose: it reveals nothing of a key.
            known = keys.get(digest_of(key) if key or segment not in OPERATOR_SEGMENTS else self._digest_of_page(inner))
            if known is None:
                self._refusals.note("wrong_key" if key else "no_key", inner)
                await _refuse(inner, send, 401, self._why_not(key, keys) if key else _NO_KEY)
                return
            owner, limits = known.owner, known.limits
        inner["gateway.owner"], inner["gateway.environments"] = owner, limits.environments
        if trace := trace_of(inner):
            TRACE.set(trace)
        held = self._budget.hold(owner, limits.max_held_bytes)
        inner["gateway.held"] = scope["gateway.held"] = held  # the server counts the frames of a WebSocket
        try:
            await self._inside(inner, receive, send)
        finally:
            held.close()

    async def _show(self, key: str, inner: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request for the dashboard, with its sender, if known, in ``scope["gateway.viewer"]``."""
        if not self._sign_in.needs_key:
            if reason := self._guard.refusal(inner):
                self._refusals.note("other_site", inner)
                await _refuse(inner, send, 403, reason)
                return
            inner["gateway.viewer"] = Viewer(Owner(""), True)
        else:
            digest = digest_of(key) if key else self._sign_in.digest_in(header(inner, b"cookie") or "")
            inner["gateway.viewer"] = None if digest is None else self._sign_in.viewer(digest)
        await self._inside(inner, receive, send)

    def _digest_of_page(self, scope: Scope) -> bytes:
        """Return the digest of the key with which the dashboard's page was opened that sent the request.

        Only a page of this server counts. Browsers state a page's site only to servers with TLS, and to those on their
        own machine. To other servers, and to change something, the page must send a header that pages of other sites
        cannot send without the consent of this server. An empty text: there is none.
        """
        site, is_own = header(scope, b"sec-fetch-site"), header(scope, b"hx-request") == "true"
        if site not in (None, "same-origin"):
            return b""
        if not is_own and (site is None or scope["method"] not in ("GET", "HEAD")):
            return b""
        return self._sign_in.digest_in(header(scope, b"cookie") or "") or b""

    def _why_not(self, key: str, needed: Mapping[bytes, KnownKey]) -> str:
        is_operators = needed is self._keys.operators
        others = self._keys.trainers if is_operators else self._keys.operators
        if digest_of(key) not in others:
            return _WRONG_KEY
        return _TRAINERS_KEY if is_operators else _OPERATORS_KEY

    def _needed(self, path: str) -> Mapping[bytes, KnownKey] | None:
        """Return the keys that open *path*. None: it needs none."""
        keys = self._keys
        if segment_of(path).lower() in OPERATOR_SEGMENTS:
            return keys.operators if keys.operators or keys.trainers or keys.has_file else None
        return keys.trainers if keys.trainers or keys.has_file else None


class _Refusals:
    """Counts refused requests, and logs at most one line for each reason in `LOG_PAUSE_S` seconds."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def note(self, reason: str, scope: Scope) -> None:
        """Note one refused request."""
        self._metrics.turned_away(reason)
        self._counts[reason] += 1
        now = time.monotonic()
        if now - self._logged_at.get(reason, -LOG_PAUSE_S) < LOG_PAUSE_S:
            return
        self._logged_at[reason] = now
        client = (scope.get("client") or ("",))[0]
        logger.warning("requests_turned_away reason=%s count=%d client=%s", reason, self._counts.pop(reason), client)


def _take_key(scope: Scope) -> tuple[str, Scope]:
    """Return the key and the scope without it. Without a key in the request, the key is ``""``."""
    path: str = scope["path"]
    others = [pair for pair in scope["headers"] if pair[0] not in _KEY_HEADERS]
    is_in_path = path.startswith(_KEY_PATHS)
    if len(others) == len(scope["headers"]) and not is_in_path:
        return "", scope
    given = [value for name, value in scope["headers"] if name in _KEY_HEADERS and value.strip()]
    inner = {**scope, "headers": others}
    key = given[0].decode("latin-1").strip(_BLANKS) if given else ""
    if key[:7].lower() == "bearer ":
        key = key[7:].strip(_BLANKS)
    if is_in_path:
        key, slash, rest = path.removeprefix(_KEY_PATHS).partition("/")
        key = key.strip(_BLANKS)
        inner["path"] = slash + rest or "/"
        inner["gateway.keyed"] = True
        raw: bytes = scope.get("raw_path") or path.encode()
        inner["raw_path"] = b"/" + raw[len(_KEY_PATHS) :].partition(b"/")[2]
    return key, inner


async def _refuse(scope: Scope, send: Send, status: int, detail: str) -> None:
    challenge = [(b"www-authenticate", b"Bearer")] if status == 401 else []
    body = {"detail": detail}
    if segment_of(scope["path"]) in AREAL_SEGMENTS:
        body = {"error": "unauthorized" if status == 401 else "forbidden", **body}  # AReaL's format of errors
    if scope["type"] == "websocket":
        send = denial(send)
    await respond_json(send, status, body, challenge)


def _is_address(name: str) -> bool:
    """Return True for an IP address. Rebinding needs a name: a page's address is that of its server."""
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def _host_of(url: str) -> str | None:
    """Return the host of *url* in lower case and without its last dot. None: *url* has no valid host."""
    try:
        name = urlsplit(url).hostname
    except ValueError:
        return None
    return name.rstrip(".") if name else None


def _is_same(origin: str, host: str) -> bool:
    """Return True if *origin* is a page of the server that the request addresses as *host*."""
    try:
        page = urlsplit(origin)
        usual = _DEFAULT_PORTS.get(page.scheme)
        server = urlsplit(f"//{host}")
        is_same_port = (page.port or usual) == (server.port or usual)
    except ValueError:
        return False
    return usual is not None and is_same_port and _host_of(origin) == _host_of(f"//{host}")
