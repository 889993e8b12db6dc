"""Resolve image names to one image for the whole cluster, and copy that image to the nodes that lack it.

The newest build on any node wins. A node that lacks it, or has another image of that name, gets a copy from a node
that has it, streamed through this process. A node receives one copy at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final
from urllib.parse import quote

from gateway.backends.docker.images import is_from_registry
from gateway.backends.swarm.nodes import Nodes
from gateway.core.errors import BackendError, StartFailed
from gateway.core.placement import VOUCHER_HEADER, NodeId, NodeReport

logger = logging.getLogger(__name__)

COPIES_AT_ONCE: Final = 4
"""Maximum number of concurrent copies. Each streams through this process, so more would only share its network."""
COPY_S: Final = 3600.0
"""Seconds that a copy or a pull may take, including the wait for its turn on the node."""
SILENCE_S: Final = 1800.0
"""Seconds of silence after which a copy times out. Before a node confirms, it checks the image and its engine unpacks
it."""
BY_DIGEST: Final = "@sha256:"


class ImageSync:
    """Copies images between nodes."""

    def __init__(self, nodes: Nodes) -> None:
        """Create the object; *nodes* list each node's images."""
        self._nodes = nodes
        self._copies: dict[tuple[NodeId, str, str], asyncio.Task[None]] = {}
        self._targets: dict[NodeId, asyncio.Lock] = {}
        self._room = asyncio.Semaphore(COPIES_AT_ONCE)

    async def pinned(self, reference: str) -> str:
        """Return the id of the newest build of *reference* on a live node; pull it if its name contains a digest.

        Raises:
            StartFailed: No node has the image, and its name has no digest, or no node has it after the pull.
            BackendError: No node answers, or the pull fails.
        """
        reports = self._nodes.live()
        if not reports:
            raise BackendError(f"no node answers: {self._nodes.problems()}")
        if newest := _newest(reports, reference):
            return newest
        if BY_DIGEST not in reference:
            hint = ", or name it by its digest (NAME@sha256:…)" if is_from_registry(reference) else ""
            raise StartFailed(f"no node has an image {reference}: load it on one of them{hint}")
        target = next((report.id for report in reports if not report.is_draining), reports[0].id)
        await self._shared(target, reference, "", self._pull(target, reference))
        if newest := _newest(self._nodes.live(), reference):
            return newest
        raise StartFailed(f"{reference} was pulled, and is on no node")

    async def ensure(self, id: NodeId, reference: str, image: str) -> None:
        """Copy *image* to node *id* under the name *reference*, unless the node has it, and wait for the copy.

        Raises:
            BackendError: The copy fails.
        """
        if not self._has(id, reference, image):
            await self._shared(id, reference, image, self._bring(id, reference, image))

    def spread(self, reference: str, image: str) -> None:
        """Start copies of *image* to all live nodes that lack it and do not drain; do not wait for the copies."""
        for report in self._nodes.live():
            if not report.is_draining and not self._has(report.id, reference, image):
                self._begun(report.id, reference, image, self._bring(report.id, reference, image))

    async def aclose(self) -> None:
        """Cancel running copies and pulls."""
        tasks = list(self._copies.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)

    def _has(self, id: NodeId, reference: str, image: str) -> bool:
        view = self._nodes.view(id)
        there = view.report.images.get(reference, "") if view is not None and view.report is not None else ""
        return bool(there) and (not image or there == image)

    async def _shared(self, id: NodeId, reference: str, image: str, work: Coroutine[Any, Any, None]) -> None:
        """Run *work*, or wait for the same copy in progress; a cancelled caller does not cancel it."""
        await asyncio.shield(self._begun(id, reference, image, work))

    def _begun(self, id: NodeId, reference: str, image: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        key = (id, reference, image)
        if key in self._copies:
            work.close()
            return self._copies[key]
        task = self._copies[key] = asyncio.create_task(work)

        def done(task: asyncio.Task[None]) -> None:
            self._copies.pop(key, None)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("image_not_spread image=%s node=%s error=%s", reference, id, error)

        task.add_done_callback(done)
        return task

    async def _bring(self, id: NodeId, reference: str, image: str) -> None:
        async with self._targets.setdefault(id, asyncio.Lock()), self._room:
            if self._has(id, reference, image):
                return
            if BY_DIGEST in reference:  # engines can't save an image under such a name, and a registry has it
                await self._pull(id, reference)
                return
            image = image or await self.pinned(reference)
            error = BackendError(f"no live node has {reference} as {image}")
            for source in self._holders(id, reference, image):
                try:
                    await self._copy(source, id, reference, image)
                except BackendError as failed:
                    error = failed
                else:
                    return
            raise error

    def _holders(self, target: NodeId, reference: str, image: str) -> list[NodeId]:
        return [
            report.id for report in self._nodes.live() if report.id != target and report.images.get(reference) == image
        ]

    async def _copy(self, source: NodeId, target: NodeId, reference: str, image: str) -> None:
        logger.info("image_copy image=%s id=%s source=%s node=%s", reference, image, source, target)
        path = f"/env-gateway/images/{quote(reference, safe='/:@')}"
        try:
            async with asyncio.timeout(COPY_S):
                async with self._nodes.request(source, "GET", path, silence_s=SILENCE_S) as got:
                    body: AsyncIterator[bytes] = got.aiter_raw()
                    # The target takes an image only with the source's own word for it.
                    headers = {VOUCHER_HEADER: got.headers.get(VOUCHER_HEADER, "")}
                    async with self._nodes.request(
                        target, "PUT", path, params={"id": image}, content=body, headers=headers, silence_s=SILENCE_S
                    ) as put:
                        await put.aread()
        except TimeoutError as error:
            raise BackendError(f"{reference}: the copy took more than {COPY_S:g} s") from error
        self._note(target, reference, image)

    async def _pull(self, id: NodeId, reference: str) -> None:
        logger.info("image_pull image=%s node=%s", reference, id)
        name, _, digest = reference.partition("@")
        path = f"/env-gateway/images/{quote(reference, safe='/:@')}/pull"
        try:
            async with (
                asyncio.timeout(COPY_S),
                self._nodes.request(id, "POST", path, params={"digest": digest}, silence_s=COPY_S) as response,
            ):
                await response.aread()
                pulled = str(response.json().get("id", ""))
        except TimeoutError as error:
            raise BackendError(f"{name}: the pull took more than {COPY_S:g} s") from error
        except (ValueError, AttributeError) as error:
            raise BackendError(f"{name}: node {id} does not say what it pulled") from error
        self._note(id, reference, pulled)

    def _note(self, id: NodeId, reference: str, image: str) -> None:
        view = self._nodes.view(id)
        if view is not None and view.report is not None and image:
            built_at = max((one.built_at.get(reference, 0.0) for one in self._nodes.live()), default=0.0)
            self._nodes.corrected(
                id,
                images={**view.report.images, reference: image},
                built_at={**view.report.built_at, reference: built_at},
            )


def _newest(reports: list[NodeReport], reference: str) -> str:
    found = [
        (report.built_at.get(reference, 0.0), report.images[reference])
        for report in reports
        if reference in report.images
    ]
    return max(found)[1] if found else ""
