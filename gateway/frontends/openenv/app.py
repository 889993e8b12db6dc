"""Serves each environment as an OpenEnv server at ``/openenv/{environment}``.

Clients use the WebSocket ``/ws``. Its connection is an attachment: each reset on it ends one session and opens the
next. ``/mcp`` serves tools over JSON-RPC. HTTP serves the rest.

Differences from a stock server:
* A connection opens nothing. The first reset waits in the queue for a slot. If none is free in time, the client gets
  ``CAPACITY_REACHED``, as from a stock server.
* A step before the first reset, or after a loss, gets one ``SESSION_ERROR``, and the socket stays open.
* ``reset`` accepts ``task``: an id, or a task as an object.
* Frames of third-party images that speak OpenEnv pass through unchanged; see `Passthrough`.
* There is no web interface and no harness.
"""

from __future__ import annotations

import contextlib
import logging
from urllib.parse import parse_qs

from starlette.types import Receive, Scope, Send

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import GatewayError, NotPermitted
from gateway.core.ids import Owner
from gateway.frontends.asgi import FrontendParts, HungUp, Refusal, catalog_of, denial, respond_json
from gateway.frontends.errors import headers_of, marks, status_of
from gateway.frontends.openenv.episodes import Episodes
from gateway.frontends.openenv.frames import FrameError
from gateway.frontends.openenv.http import HttpRoutes
from gateway.frontends.openenv.mcp import Mcp
from gateway.frontends.openenv.passthrough import Passthrough
from gateway.frontends.openenv.session_ids import Attachments
from gateway.frontends.openenv.websocket import ClientSocket, Left, SocketServer
from gateway.frontends.session_ids import SessionIds
from gateway.upstreams.ors_bodies import Unprocessable

logger = logging.getLogger(__name__)


class OpenEnvFrontend:
    """OpenEnv's protocol as an ASGI application for ``http`` and ``websocket``."""

    def __init__(self, parts: FrontendParts, *, secret: bytes) -> None:
        """Create the frontend. *secret* is the key of the HMAC in session ids, which all replicas share."""
        self._catalog = parts.catalog
        self._max_body_bytes = parts.max_body_bytes
        ids, attachments = SessionIds(secret), Attachments()
        episodes = Episodes(parts)
        relayed = Passthrough(sessions=parts.sessions, queries=parts.queries, episodes=episodes)
        mcp = Mcp(episodes=episodes, relayed=relayed, ids=ids, attachments=attachments)
        self._sockets = SocketServer(
            episodes=episodes,
            relayed=relayed,
            mcp=mcp,
            ids=ids,
            attachments=attachments,
            catalog=parts.catalog,
        )
        self._http = HttpRoutes(
            episodes=episodes,
            relayed=relayed,
            mcp=mcp,
            ids=ids,
            lookup=parts.resolver.lookup,
            max_body_bytes=parts.max_body_bytes,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket or one HTTP request."""
        if scope["type"] == "websocket":
            await self._socket(scope, receive, send)
        else:
            await self._request(scope, receive, send)

    async def _socket(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # the connect event
        try:
            catalog = catalog_of(scope, self._catalog)
        except NotPermitted as error:
            await respond_json(denial(send), 403, {"detail": error.detail})
            return
        environment, rest = _place(scope["path"], catalog)
        if environment is None or rest not in (("ws",), ("mcp",)):
            detail = "Not Found: sockets are at /openenv/{environment}/ws and /openenv/{environment}/mcp"
            if environment is None:
                detail = _unknown(scope["path"], catalog)
            logger.info("openenv_not_found path=%r detail=%r", scope["path"][:200], detail)
            await respond_json(denial(send), 404, {"detail": detail})
            return
        peer = ClientSocket(receive, send)
        owner: Owner = scope["gateway.owner"]
        with contextlib.suppress(Left):
            await peer.accept()
            if rest == ("mcp",):
                await self._sockets.rpc(peer, owner, environment)
            else:
                wanted = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("session_id")
                await self._sockets.gym(peer, owner, environment, wanted[-1] if wanted else None)

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            catalog = catalog_of(scope, self._catalog)
            environment, rest = _place(scope["path"], catalog)
            if environment is None and rest == ("health",):
                raise Refusal(404, "Not Found")  # this route needs no key, so it must not list the environments
            if environment is None:
                raise Refusal(404, _unknown(scope["path"], catalog))
            await self._http.answer(scope, receive, send, environment, rest)
        except HungUp:
            pass
        except Refusal as refusal:
            if refusal.status == 404:
                logger.info("openenv_not_found path=%r detail=%r", scope["path"][:200], str(refusal))
            await respond_json(send, refusal.status, refusal.body, refusal.extra)
        except Unprocessable as error:
            await respond_json(send, 422, {"detail": list(error.entries)})
        except FrameError as refused:
            detail = list(refused.entries) or refused.message
            body = {"detail": detail, "code": refused.code.value, **refused.marks}
            again = refused.marks.get("retry_after_s")
            extra = [] if again is None else [(b"retry-after", str(again).encode())]
            await respond_json(send, refused.status, body, extra)
        except GatewayError as error:
            await respond_json(send, status_of(error), {"detail": error.detail, **marks(error)}, headers_of(error))
        except Exception:  # the client gets a JSON body, and other episodes continue
            logger.exception("openenv_broken path=%s", scope["path"])
            await respond_json(send, 500, {"detail": "a fault of the gateway"})


def _unknown(path: str, catalog: Catalog) -> str:
    """Return the error message for a *path* without an environment."""
    return catalog.unknown(path.lstrip("/").removeprefix("openenv").strip("/").partition("/")[0]).detail


def _place(path: str, catalog: Catalog) -> tuple[Environment | None, tuple[str, ...]]:
    # Ignore empty segments: a base URL may end in a slash.
    match [segment for segment in path.split("/") if segment]:
        case ["openenv", name, *rest]:
            return catalog.offered.get(name.lower()), tuple(rest)
        case _:
            return None, ()
