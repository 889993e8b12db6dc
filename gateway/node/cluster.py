"""Serves the node's report, draining flag and images to the gateways of its cluster, in addition to the engine gate.

These routes are not Docker's. They are below ``/env-gateway/``, in front of the `Gate`, and exist only with TLS.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import httpx
from starlette.types import Receive, Scope, Send

from gateway.core.errors import BackendError
from gateway.core.placement import VOUCHER_HEADER
from gateway.node.gate import Answer, Gate, answer, engine_client, read_body, refuse_body
from gateway.node.image_ids import ImageIds
from gateway.node.image_transfers import Transfers
from gateway.node.report import Reporter
from gateway.node.routes import GateRefusal
from gateway.node.vouchers import Vouchers

logger = logging.getLogger(__name__)

PREFIX: Final = "/env-gateway/"
IMAGES: Final = f"{PREFIX}images/"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_CREDENTIALS_MAX_BYTES: Final = 8192


class Cluster:
    """An ASGI application that serves paths below `PREFIX` and passes other requests to the gate."""

    def __init__(
        self,
        gate: Gate,
        *,
        engine: str,
        vouchers: Vouchers,
        state: Path,
        image_max_bytes: int,
        image_ids: ImageIds | None = None,
    ) -> None:
        """Set up the application without connecting.

        Args:
            gate: Serves all other requests. Its rules apply here too.
            engine: The engine's socket, ``unix:///…``.
            vouchers: Issues the proofs of this node's images, and checks the proofs of other nodes' images.
            state: A persistent folder that only this process uses. It holds the draining flag, and images while they
                are checked.
            image_max_bytes: Maximum bytes of an image's tar.
            image_ids: The only images that this node accepts; None: each image for which another node vouches.
        """
        self._gate = gate
        self._engine = engine_client(engine)
        self._draining = state / "draining"
        self._reporter = Reporter(self._engine, gate=gate, draining=self._draining)
        self._transfers = Transfers(
            self._engine,
            reporter=self._reporter,
            vouchers=vouchers,
            spool=state,
            max_bytes=image_max_bytes,
            ids=image_ids,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; the ASGI interface."""
        path = scope.get("raw_path", b"").decode("latin-1") if scope["type"] == "http" else ""
        if not path.startswith(PREFIX):
            await self._gate(scope, receive, send)
            return
        try:
            found = await self._answered(scope, path, receive)
        except GateRefusal as refused:
            logger.warning("node_refused method=%s path=%.200r reason=%s", scope["method"], path, refused)
            # Otherwise the server would read the rest of the body for nothing.
            found = answer(refused.status, {"message": str(refused)}, closes=scope["method"] != "GET")
        except BackendError as error:
            found = answer(HTTPStatus.BAD_GATEWAY, {"message": str(error)})
        except (httpx.TransportError, TimeoutError) as error:
            logger.warning("gate_engine_silent error=%r", error)
            found = answer(HTTPStatus.SERVICE_UNAVAILABLE, {"message": f"the engine does not answer: {error!r}"})
        await found(receive, send)

    def check(self) -> None:
        """Raise ``BackendError`` if the draining flag or images can't be stored."""
        self._transfers.check()

    async def aclose(self) -> None:
        """Close the connections to the engine. The caller closes the gate."""
        await self._engine.aclose()

    async def _answered(self, scope: Scope, path: str, receive: Receive) -> Answer:
        match scope["method"], path.removeprefix(PREFIX):
            case "GET", "node":
                await refuse_body(receive)
                return await self._report()
            case "PUT", "node/draining":
                return await self._drain(await read_body(receive, 64))
            case "GET", rest if rest.startswith("images/"):
                await refuse_body(receive)
                return await self._transfers.save(self._reference(rest.removeprefix("images/")))
            case "PUT", rest if rest.startswith("images/"):
                return await self._load(scope, self._reference(rest.removeprefix("images/")), receive)
            case "POST", rest if rest.startswith("images/") and rest.endswith("/pull"):
                await refuse_body(receive)
                return await self._pull(scope, self._reference(rest.removeprefix("images/").removesuffix("/pull")))
        raise GateRefusal(f"{scope['method']} {path[:200]!r} is not served here", status=HTTPStatus.NOT_FOUND)

    async def _report(self) -> Answer:
        return answer(HTTPStatus.OK, asdict(await self._reporter.report()))

    async def _drain(self, body: bytes) -> Answer:
        wanted = body.strip()
        if wanted not in (b"true", b"false"):
            raise GateRefusal("the body must be true or false", status=HTTPStatus.BAD_REQUEST)
        try:
            if wanted == b"true":
                self._draining.touch(mode=0o600)
            else:
                self._draining.unlink(missing_ok=True)
        except OSError as error:
            said = f"this node cannot keep whether it drains: {error.strerror}"
            raise GateRefusal(said, status=HTTPStatus.INSUFFICIENT_STORAGE) from error
        logger.info("node_draining is_draining=%s", json.loads(wanted))
        return await self._report()

    async def _load(self, scope: Scope, reference: str, receive: Receive) -> Answer:
        id = _digest(scope, "id")
        headers = _headers(scope)
        length, voucher = headers.get("content-length", "0"), headers.get(VOUCHER_HEADER, "")
        announced = int(length) if length.isascii() and length.isdigit() else 0
        found = await self._transfers.load(reference, id, receive, voucher=voucher, announced_bytes=announced)
        return answer(HTTPStatus.OK, {"id": found})

    async def _pull(self, scope: Scope, reference: str) -> Answer:
        digest = _digest(scope, "digest")
        credentials = _headers(scope).get("x-registry-auth", "")
        if len(credentials) > _CREDENTIALS_MAX_BYTES:
            raise GateRefusal("X-Registry-Auth is too long", status=HTTPStatus.BAD_REQUEST)
        return answer(HTTPStatus.OK, {"id": await self._transfers.pull(reference, digest, credentials=credentials)})

    def _reference(self, quoted: str) -> str:
        reference = unquote(quoted)
        if reference not in self._gate.rules.images:
            raise GateRefusal(f"image {reference[:200]!r} is not in the catalog")
        return reference


def _headers(scope: Scope) -> Mapping[str, str]:
    return {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}


def _digest(scope: Scope, name: str) -> str:
    """Return the query's only parameter, *name*, which must be ``sha256:…``."""
    found, _, value = unquote(scope["query_string"].decode("latin-1")).partition("=")
    if found != name or _DIGEST.fullmatch(value) is None:
        raise GateRefusal(f"the query must be {name}=sha256:… and nothing else", status=HTTPStatus.BAD_REQUEST)
    return value
