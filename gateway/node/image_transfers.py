"""Images that come to this machine and go from it: as a tar by way of a gateway, or from a registry by their digest."""

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
from gateway.node.gate import Answer, passed_on
from gateway.node.image_archives import Archive, BadArchive, checked, tagged
from gateway.node.report import Reporter
from gateway.node.routes import GateRefusal

logger = logging.getLogger(__name__)

TURN_S: Final = 900.0
"""How long one waits while another one is loaded."""
WAITING_MAX: Final = 16
SILENCE_S: Final = 120.0
"""The longest pause in what a gateway sends: on its other side is a node that saves the image."""
LOAD_S: Final = 3600.0
"""Of the engine, for one image, whether from a tar or from a registry."""
WRITE_BYTES: Final = 4 * 2**20
_TALK_MAX_BYTES: Final = 4 * 2**20
"""What an engine says while it loads or pulls."""


class Transfers:
    """Brings and takes images of the catalog; one is brought at a time."""

    def __init__(self, engine: httpx.AsyncClient, *, reporter: Reporter, spool: Path, max_bytes: int) -> None:
        """*spool* is a folder on a disk, this process' own, where a tar is kept while it is checked."""
        self._engine = engine
        self._reporter = reporter
        self._spool = spool
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()
        self._waiting = 0

    def check(self) -> None:
        """Make the folder, and try it. Raises ``BackendError``."""
        try:
            self._spool.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._spool).close()
        except OSError as error:
            raise BackendError(f"cannot keep images in {self._spool}: {error.strerror}: set state_dir") from error

    async def save(self, reference: str) -> Answer:
        """Answer with the image as the engine saves it. Raises ``GateRefusal``, ``httpx.TransportError``."""
        if "@" in reference:
            raise GateRefusal(f"{reference} has no tag: an engine that lacks it pulls it")
        if await self._reporter.image(reference) is None:
            raise GateRefusal(f"no such image: {reference}", status=HTTPStatus.NOT_FOUND)
        # With its tag: by a name alone engines save all of its tags.
        path = f"/images/{quote(tagged(reference), safe='/:')}/get"
        request = self._engine.build_request("GET", path, timeout=httpx.Timeout(LOAD_S, connect=10.0))
        return passed_on(await self._engine.send(request, stream=True))

    async def load(self, reference: str, id: str, receive: Receive, *, announced_bytes: int) -> str:
        """Read a tar, check it, and load it into the engine; the id of *reference*, which is *id*.

        Raises:
            GateRefusal: it is too large, or anything else than that one image; or the engine did not take it.
            httpx.TransportError: the engine does not answer.
        """
        if "@" in reference:
            raise GateRefusal(f"{reference} has no tag to load it under: pull it")
        if announced_bytes > self._max_bytes:
            raise self._too_large()
        async with self._my_turn():
            # It has no name: a process that is killed leaves nothing, and one that starts beside it removes nothing.
            with tempfile.TemporaryFile(dir=self._spool) as file:
                await self._receive(receive, file)
                path = Path(f"/proc/self/fd/{file.fileno()}")
                try:
                    archive = await asyncio.to_thread(checked, path, reference=reference, id=id)
                except BadArchive as error:
                    raise GateRefusal(f"the tar of {reference} is refused: {error}") from error
                await self._load(archive)
            return await self._expect(reference, id)

    async def pull(self, reference: str, digest: str, *, credentials: str = "") -> str:
        """Let the engine pull what *reference* (from a registry) is at *digest*; the image's id. Raises as `load`."""
        if not is_from_registry(reference):
            raise GateRefusal(f"{reference} names no registry")
        name, at, own = reference.partition("@")
        if at and own != digest:
            raise GateRefusal(f"{reference} is not at {digest}")
        path, colon, tag = name.rpartition(":")
        repository, tag = (path, tag) if colon and "/" not in tag else (name, "latest")
        headers = {"X-Registry-Auth": credentials} if credentials else {}
        async with self._my_turn():
            logger.info("node_image_pull image=%s digest=%s", reference, digest)
            await self._act("/images/create", {"fromImage": repository, "tag": digest}, headers=headers)
            if not at:
                target = f"/images/{quote(f'{repository}@{digest}', safe='/:@')}/tag"
                response = await self._engine.post(target, params={"repo": repository, "tag": tag})
                if response.status_code != HTTPStatus.CREATED:
                    raise GateRefusal(
                        f"the engine does not tag it: {response.text[:200]}", status=HTTPStatus.BAD_GATEWAY
                    )
            return await self._expect(reference)

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
        """Have the engine do what it answers with a stream of words, in which errors are."""
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
                        del said[: -_TALK_MAX_BYTES // 2]  # the error, if there is one, is at the end
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
            said = f"{reference} is {found or 'not there'} after all, and not {id or 'there'}"
            raise GateRefusal(said, status=HTTPStatus.BAD_GATEWAY)
        logger.info("node_image_ready image=%s id=%s", reference, found)
        return found


def _error(said: bytes) -> str:
    """The error in an engine's stream of words, one JSON object a line; empty if there is none."""
    for line in said.splitlines():
        try:
            word = json.loads(line)
        except ValueError:
            continue
        if isinstance(word, dict) and word.get("error"):
            return str(word["error"])[:500]
    return ""
