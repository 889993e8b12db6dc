"""Transfers images to and from this machine: as a tar through a gateway, or from a registry by digest."""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import IO, Final
from urllib.parse import quote

import httpx
from starlette.types import Receive

from gateway.backends.docker.images import is_from_registry
from gateway.core.errors import BackendError
from gateway.core.placement import VOUCHER_HEADER
from gateway.node.gate import Answer, passed_on
from gateway.node.image_archives import Archive, BadArchive, checked, tagged
from gateway.node.image_ids import ImageIds
from gateway.node.report import Reporter, built_at
from gateway.node.routes import GateRefusal
from gateway.node.vouchers import BadVoucher, Vouchers

logger = logging.getLogger(__name__)

TURN_S: Final = 900.0
"""Maximum seconds that an image waits while another image is loaded or pulled."""
WAITING_MAX: Final = 16
SILENCE_S: Final = 120.0
"""Maximum seconds of silence in an upload from a gateway, which may wait for the node that saves the image."""
LOAD_S: Final = 3600.0
"""Maximum seconds in which the engine loads or pulls one image. Also the maximum pause while it saves one."""
WRITE_BYTES: Final = 4 * 2**20
_TALK_MAX_BYTES: Final = 4 * 2**20
"""Maximum bytes that are kept of an engine's messages during a load or pull."""


class Transfers:
    """Loads, pulls and saves images of the catalog. Loads and pulls run one at a time."""

    def __init__(
        self,
        engine: httpx.AsyncClient,
        *,
        reporter: Reporter,
        vouchers: Vouchers,
        spool: Path,
        max_bytes: int,
        ids: ImageIds | None = None,
    ) -> None:
        """Set up the transfers.

        Args:
            engine: Client of this machine's engine.
            reporter: Looks at the engine's images.
            vouchers: Issues and checks vouchers.
            spool: A folder on disk that only this process uses, for a tar while it is checked.
            max_bytes: Maximum size of a tar.
            ids: The only images that may arrive; None: each image for which a node vouches, or that the catalog pins.
        """
        self._engine = engine
        self._reporter = reporter
        self._vouchers = vouchers
        self._spool = spool
        self._max_bytes = max_bytes
        self._ids = ids
        self._turn = asyncio.Lock()
        self._waiting = 0

    def check(self) -> None:
        """Create the spool folder and test it. Raises ``BackendError``."""
        try:
            self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._spool).close()
        except OSError as error:
            raise BackendError(f"cannot keep images in {self._spool}: {error.strerror}: set state_dir") from error

    async def save(self, reference: str) -> Answer:
        """Return a response with the image's tar from the engine, and a voucher for it in a header.

        Raises:
            GateRefusal: The engine does not have the image, or has it without a tag.
            httpx.TransportError: The engine does not answer.
        """
        if "@" in reference:
            raise GateRefusal(f"{reference} has no tag: an engine that lacks it pulls it")
        image = await self._reporter.image(reference)
        if image is None:
            raise GateRefusal(f"no such image: {reference}", status=HTTPStatus.NOT_FOUND)
        # With its tag: for a name without one, engines save all tags.
        path = f"/images/{quote(tagged(reference), safe='/:')}/get"
        request = self._engine.build_request("GET", path, timeout=httpx.Timeout(LOAD_S, connect=10.0))
        response = await self._engine.send(request, stream=True)
        # Issued last, because an engine may prepare a large image for minutes. If the name has moved to another image
        # meanwhile, the receiving node refuses the tar.
        return passed_on(response, {VOUCHER_HEADER: self._vouchers.issue(reference, str(image.get("Id", "")))})

    async def load(self, reference: str, id: str, receive: Receive, *, voucher: str, announced_bytes: int) -> str:
        """Receive a tar, check it, and load it into the engine. Return the id of *reference*, which is *id*.

        Raises:
            GateRefusal: No node vouches for the image, the operator's file does not list it, the tar is too large or
                not exactly that image, the engine has a newer one, or refused it.
            httpx.TransportError: The engine does not answer.
        """
        if "@" in reference:
            raise GateRefusal(f"{reference} has no tag to load it under: pull it")
        try:
            self._vouchers.check(voucher, reference=reference, id=id)
        except BadVoucher as error:
            raise GateRefusal(f"no node vouches for {reference} as {id}: {error}") from error
        await self._refuse_unlisted(reference, id)
        if announced_bytes > self._max_bytes:
            raise self._too_large()
        async with self._my_turn():
            # A file without a name: a killed process leaves nothing, and a second process can't remove it.
            with tempfile.TemporaryFile(dir=self._spool) as file:
                await self._receive(receive, file)
                path = Path(f"/proc/self/fd/{file.fileno()}")
                try:
                    archive = await asyncio.to_thread(checked, path, reference=reference, id=id)
                except BadArchive as error:
                    raise GateRefusal(f"the tar of {reference} is refused: {error}") from error
                await self._refuse_older(reference, (built_at(archive.created), id))
                await self._refuse_unlisted(reference, id)  # the file may have changed during the upload
                await self._load(archive)
            return await self._expect(reference, id)

    async def _refuse_unlisted(self, reference: str, id: str = "") -> None:
        """Refuse an image that the operator's file does not list, although a node vouches for it."""
        if self._ids is not None:
            await asyncio.to_thread(self._ids.check, reference, id)

    async def _refuse_older(self, reference: str, build: tuple[float, str]) -> None:
        """Refuse an image that would replace a newer build: gateways choose the newest of all nodes by this order."""
        image = await self._reporter.image(reference) or {}
        if (built_at(image.get("Created")), str(image.get("Id", ""))) > build:
            raise GateRefusal(f"this node has a newer build of {reference}: {image.get('Id')}")

    async def pull(self, reference: str, digest: str, *, credentials: str = "") -> str:
        """Let the engine pull *reference* from its registry. Return the image's id. Raises as `load`.

        Only a name with a digest is pulled. The node has it from its own catalog, and the engine verifies it.
        """
        name, at, own = reference.partition("@")
        if not at or own != digest:
            raise GateRefusal(f"{reference} is not at {digest}: only a digest in the environment.toml can be pulled")
        if not is_from_registry(reference):
            raise GateRefusal(f"{reference} names no registry")
        path, colon, tag = name.rpartition(":")
        repository = path if colon and "/" not in tag else name
        headers = {"X-Registry-Auth": credentials} if credentials else {}
        await self._refuse_unlisted(reference)
        async with self._my_turn():
            was_there = await self._reporter.image(reference) is not None
            logger.info("node_image_pull image=%s", reference)
            await self._act("/images/create", {"fromImage": repository, "tag": digest}, headers=headers)
            found = await self._expect(reference)
            try:
                await self._refuse_unlisted(reference, found)
            except GateRefusal:
                if not was_there:
                    await self._remove(reference)
                raise
            return found

    async def _remove(self, reference: str) -> None:
        """Remove an image that this node has just pulled, so that no report offers it."""
        response = await self._engine.delete(f"/images/{quote(reference, safe='/:@')}")
        self._reporter.forget_images()
        if response.status_code != HTTPStatus.OK:
            logger.warning("node_image_stays image=%s status=%d", reference, response.status_code)

    @asynccontextmanager
    async def _my_turn(self) -> AsyncIterator[None]:
        if self._waiting >= WAITING_MAX:
            raise GateRefusal("too many images wait to be loaded here", status=HTTPStatus.SERVICE_UNAVAILABLE)
        self._waiting += 1
        try:
            async with asyncio.timeout(TURN_S):
                await self._turn.acquire()
        except TimeoutError as error:
            raise GateRefusal("another image is being loaded here", status=HTTPStatus.SERVICE_UNAVAILABLE) from error
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turn.release()

    async def _receive(self, receive: Receive, file: IO[bytes]) -> None:
        buffer, total, more = bytearray(), 0, True
        while more:
            try:
                async with asyncio.timeout(SILENCE_S):
                    message = await receive()
            except TimeoutError as error:
                said = f"nothing of the image came for {SILENCE_S:g} s"
                raise GateRefusal(said, status=HTTPStatus.REQUEST_TIMEOUT) from error
            if message["type"] == "http.disconnect":
                raise GateRefusal("the image was not sent to its end", status=HTTPStatus.BAD_REQUEST)
            buffer += message.get("body", b"")
            total += len(message.get("body", b""))
            more = message.get("more_body", False)
            if total > self._max_bytes:
                raise self._too_large()
            if len(buffer) >= WRITE_BYTES or not more:
                written, buffer = bytes(buffer), bytearray()
                try:
                    await asyncio.to_thread(file.write, written)
                    if not more:
                        await asyncio.to_thread(file.flush)
                except OSError as error:
                    said = f"this node cannot keep the image: {error.strerror}"
                    raise GateRefusal(said, status=HTTPStatus.INSUFFICIENT_STORAGE) from error

    def _too_large(self) -> GateRefusal:
        said = f"the image has more than {self._max_bytes} bytes"
        return GateRefusal(said, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    async def _load(self, archive: Archive) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            parts = archive.rewritten()
            while (piece := await asyncio.to_thread(next, parts, None)) is not None:
                yield piece

        headers = {"Content-Type": "application/x-tar", "Content-Length": str(archive.size_bytes)}
        await self._act("/images/load", {"quiet": "1"}, headers=headers, content=pieces())

    async def _act(
        self,
        path: str,
        query: Mapping[str, str],
        *,
        headers: Mapping[str, str],
        content: AsyncIterator[bytes] | None = None,
    ) -> None:
        """Send the engine a request whose response is a stream of messages, which may include an error."""
        request = self._engine.build_request(
            "POST", path, params=dict(query), headers=dict(headers), content=content, timeout=httpx.Timeout(LOAD_S)
        )
        said = bytearray()
        async with asyncio.timeout(LOAD_S):
            response = await self._engine.send(request, stream=True)
            try:
                async for piece in response.aiter_raw():
                    said += piece
                    if len(said) > _TALK_MAX_BYTES:
                        del said[: -_TALK_MAX_BYTES // 2]  # an error would be at the end
            finally:
                await response.aclose()
        error = _error(bytes(said))
        if response.status_code != HTTPStatus.OK or error:
            reason = error or bytes(said[:200]).decode("utf-8", "replace")
            raise GateRefusal(f"the engine refuses: {reason}", status=HTTPStatus.BAD_GATEWAY)

    async def _expect(self, reference: str, id: str = "") -> str:
        self._reporter.forget_images()
        image = await self._reporter.image(reference)
        found = str((image or {}).get("Id", ""))
        if not found or (id and found != id):
            said = f"not {id}" if id and found else "although the engine reported success"
            raise GateRefusal(f"{reference} is {found or 'missing'}, {said}", status=HTTPStatus.BAD_GATEWAY)
        logger.info("node_image_ready image=%s id=%s", reference, found)
        return found


def _error(said: bytes) -> str:
    """Return the error in an engine's messages (a JSON object per line), or an empty string."""
    for line in said.splitlines():
        try:
            word = json.loads(line)
        except ValueError:
            continue
        if isinstance(word, dict) and word.get("error"):
            return str(word["error"])[:500]
    return ""
