"""Updates the catalog while the gateway runs: from changed environment files, and from images with a new id.

`CatalogReload` polls both. Workers are started from the catalog (``Environment.digest``). So the control loop drains
workers of another revision and starts new ones, while open sessions continue. Trainers need not act, and no process
is restarted.

A wrong file changes nothing. A file that names another image takes effect once that image is available; until then the
old image serves. The engine reports which image a name refers to. Until it does, the environment is not *settled*: its
workers with another digest may run the same image, so the control loop must not drain them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from gateway.catalog.catalog import Catalog, why_not_runnable
from gateway.catalog.scan import Stamp, paths_of, scan_catalog
from gateway.core.environment import Environment
from gateway.core.errors import ConfigError, GatewayError
from gateway.core.ids import EnvironmentName
from gateway.core.periodic import pause
from gateway.core.ports.backend import Backend

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two scans of the files. Polling, because inotify does not report edits by another machine."""
IMAGES_EVERY_S = 30.0
"""Seconds between two queries for the image that a name refers to."""
RETRY_S = 2.0
"""Seconds before the retry of a failed query. Each further failure doubles them, up to ``RETRY_MAX_S``."""
RETRY_MAX_S = 60.0
END_S = 10.0
"""Maximum seconds that `CatalogReload.aclose` waits for cancelled queries."""


class Completes(Protocol):
    """Adds to an environment the data that its file does not contain; implemented by `gateway.content.Completion`."""

    async def complete(self, environment: Environment) -> Environment:
        """Return *environment* with its further data. Raises ``ConfigError`` if its file must be refused."""


@dataclass(slots=True)
class _File:
    """One ``environment.toml``, as the last scan found it."""

    stamp: Stamp | None = None
    """Values that differ after a write; None: the next scan must read the file."""
    offers: Environment | None = None
    """The environment in the last valid version of the file."""
    error: str = ""
    is_missing: bool = False
    """True if the last scan did not find the file. Editors replace files, so one scan does not withdraw it."""


@dataclass(slots=True)
class _Image:
    """The state of the queries for one environment's image."""

    is_known: bool = False
    is_doubted: bool = False
    """True if the known image id may be outdated."""
    is_due: bool = True
    errors: dict[str, str] = field(default_factory=dict)
    """The last logged error of each image's query, by image name."""
    failures: int = 0
    ask_at: float = 0.0
    held: Environment | None = None
    """The environment in the current file, held back while its new image is not available yet."""
    asking: asyncio.Task[None] | None = None


class CatalogReload:
    """Polls environment files and images, and updates the catalog. Use it from one event loop only."""

    def __init__(
        self,
        catalog: Catalog,
        *,
        backend: Backend | None = None,
        directory: Path | None = None,
        names: Sequence[str] = (),
        containers: bool = True,
        image_tag: str = "",
        completion: Completes | None = None,
    ) -> None:
        """Create a reload that has not scanned or queried anything yet.

        Args:
            catalog: The catalog as read at the start.
            backend: Provides an environment's image and returns its id; None: images are not queried.
            directory: The folder of ``<environment>/environment.toml``; None: files are not scanned.
            names: The folders to scan; empty: all folders.
            containers: True if workers are containers. Environments that cannot run so are left out, as at the start.
            image_tag: As in `read_environment`.
            completion: Adds further data to an environment before it is offered.
        """
        self._catalog = catalog
        self._backend = backend
        self._directory = directory
        self._names = frozenset(names)
        self._containers = containers
        self._image_tag = image_tag
        self._completion = completion
        self._images: dict[EnvironmentName, _Image] = {}
        self._files: dict[Path, _File] = {}
        self._directory_error = ""
        self._callbacks: list[Callable[[], None]] = []
        self._looking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        by_folder = {environment.directory: environment for environment in catalog}
        for path in paths_of(directory, self._names) if directory is not None else ():
            if (environment := by_folder.get(path.parent.resolve())) is not None:
                self._files[path] = _File(offers=environment)

    def changed(self, callback: Callable[[], None]) -> None:
        """Register *callback*, to be called on the event loop after each change of the catalog."""
        self._callbacks.append(callback)

    def offer(self, environment: Environment) -> None:
        """Offer an environment that has no file. Raises ``ConfigError`` if another one has its name."""
        self._catalog.offer(environment)
        logger.info("environment_offered environment=%s digest=%s", environment.name, environment.digest())
        self._tell()

    def is_settled(self, name: str) -> bool:
        """Return True once the image's id is known. Workers with another digest then belong to another revision.

        Before that, such workers may run the same image, started by a gateway whose engine had answered, and must not
        be drained. An environment is also settled if it has no image, if images are not queried, or if it is not on
        offer. A split has the state of its environment.
        """
        environment = self._offered(name)
        if environment is None or not self._has_image(environment):
            return True
        image = self._images.get(environment.name)
        return image is not None and image.is_known and not image.is_doubted

    def may_start(self, name: str) -> bool:
        """Return True if a worker may start: not while the query that settles the environment is pending.

        A worker started before the answer would have another digest, and be replaced immediately. After a failed query
        the start need not wait, because the start itself reports the error.
        """
        environment = self._offered(name)
        if environment is None or self.is_settled(name):
            return True
        image = self._images.get(environment.name)
        return image is not None and image.failures > 0

    def leads(self) -> None:
        """Handle the start of this replica's lead: call `ask_again`."""
        self.ask_again()

    def ask_again(self) -> None:
        """Mark every environment as not settled until its image is queried again.

        A replica that starts to lead needs this. Its image ids may be up to ``IMAGES_EVERY_S`` older than those of its
        predecessor, so it could treat workers of the current image as outdated.
        """
        for environment in self._catalog:
            if (image := self._images.get(environment.name)) is not None:
                image.is_doubted = True
            self._ask_soon(environment)

    async def run(self) -> None:
        """Scan files and query images periodically until cancelled, then cancel the running queries."""
        try:
            while True:
                try:
                    await self.look()
                    self._ask_those_due()
                except Exception:  # an error of the disk or of a callback must not end the polling
                    logger.exception("rollover_failed directory=%s", self._directory)
                await pause(POLL_S)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel the running queries, and wait at most `END_S` seconds for their end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=END_S)

    def _offered(self, name: str) -> Environment | None:
        """Return the offered environment with *name*, or with a split of this name; else None."""
        environment = self._catalog.known.get(name.lower())
        return None if environment is None else self._catalog.offered.get(environment.base or environment.name)

    # -- files ----------------------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Scan the files once, and apply the changes to the catalog."""
        if self._directory is None:
            return
        async with self._looking:
            stamps = {
                path: None if file.error else file.stamp for path, file in self._files.items() if not file.is_missing
            }
            # In a thread, because the folder may be on a slow network file system.
            present, found = await asyncio.to_thread(
                scan_catalog, self._directory, self._names, stamps, self._image_tag
            )
            if not self._is_there(present):
                return
            for path in [path for path in self._files if path not in present]:
                self._missed(path)
            for path, (stamp, read) in found.items():
                file = self._files.setdefault(path, _File())
                file.is_missing = False
                try:
                    await self._take_up(path, file, read)
                    file.stamp = stamp
                except Exception:  # an error of one file must not block the other files
                    logger.exception("rollover_failed file=%s", path)

    def _is_there(self, present: frozenset[Path]) -> bool:
        """Return True unless all files are gone: an unmounted folder must not withdraw every environment."""
        error = "" if present or not self._files else "no */environment.toml in it"
        if error and error != self._directory_error:
            logger.error("environment_files_missing directory=%s error=%s", self._directory, error)
        self._directory_error = error
        return not error

    async def _take_up(self, path: Path, file: _File, read: Environment | ConfigError) -> None:
        try:
            if isinstance(read, ConfigError):
                raise read
            if read == file.offers:
                file.error = ""
                return
            self._refuse_taken(path, file, read)
            before = file.offers
            if reason := why_not_runnable(read, containers=self._containers):
                if before is not None:
                    raise ConfigError(f"{path}: {reason}")
                if self._catalog.left_out.get(read.name) != reason:
                    logger.info("environment_left_out environment=%s reason=%r", read.name, reason)
                self._catalog.left_out[read.name] = reason
                return
            if before is not None and before.name != read.name and before.name == self._catalog.default.name:
                raise ConfigError(f"{path}: {before.name!r} is the default environment and keeps its name")
            self._offer(before, read if self._completion is None else await self._completion.complete(read))
        except ConfigError as error:
            self._refuse(path, file, error.detail)
        else:
            file.offers, file.error = read, ""

    def _refuse_taken(self, path: Path, file: _File, read: Environment) -> None:
        holder = next((other for other, held in self._files.items() if _name(held) == read.name), None)
        if holder is not None and holder != path and self._files[holder].is_missing:
            file.offers = self._files.pop(holder).offers  # the folder has a new name
        elif holder != path and (holder is not None or read.name in self._catalog.offered):
            raise ConfigError(f"{path}: two environments have the name {read.name!r}")

    def _offer(self, before: Environment | None, now: Environment) -> None:
        if before is not None and before.name != now.name:
            self._withdraw(before.name)
            before = None
        current = self._catalog.offered.get(now.name)
        if current is None:
            self.offer(now)
            return
        image = self._images.get(now.name)
        if self._has_image(now) and current.image != now.image and image is not None and image.is_known:
            image.held, image.is_due = now, True  # takes effect when its image is available
            image.errors.clear()
            return
        if image is not None:
            image.held, image.is_due = None, True
        self._replace(_carried(current, now), current, "configuration")

    def _replace(self, environment: Environment, current: Environment, what: str) -> None:
        self._catalog.replace(environment)
        now = self._catalog.named(environment.name)  # with splits that follow it
        if now != current:
            logger.info(
                "environment_changed environment=%s what=%s digest=%s→%s",
                now.name,
                what,
                current.digest(),
                now.digest(),
            )
            self._tell()

    def _missed(self, path: Path) -> None:
        file = self._files[path]
        if not file.is_missing:
            file.is_missing, file.stamp = True, None
            return
        if file.offers is None:
            del self._files[path]
        elif file.offers.name == self._catalog.default.name:
            self._refuse(path, file, f"{path}: it is gone, and stays available: it is the default environment")
        else:
            self._withdraw(file.offers.name)
            del self._files[path]

    def _withdraw(self, name: EnvironmentName) -> None:
        self._catalog.withdraw(name)
        image = self._images.pop(name, None)
        if image is not None and image.asking is not None:
            image.asking.cancel()
        logger.info("environment_withdrawn environment=%s", name)
        self._tell()

    def _refuse(self, path: Path, file: _File, error: str) -> None:
        if error != file.error:
            name = file.offers.name if file.offers is not None else path.parent.name
            logger.error("environment_file_refused environment=%s file=%s error=%s", name, path, error)
        file.error = error

    def _tell(self) -> None:
        for callback in self._callbacks:
            try:
                callback()
            except Exception:  # the catalog has changed anyway, and the other callbacks need the notice
                logger.exception("rollover_failed during=callback")

    # -- images ---------------------------------------------------------------------------------------------------

    async def look_images(self, *, timeout_s: float) -> None:
        """Start a query for every image without a running query, and wait at most *timeout_s* seconds for the answers.

        Slower queries continue in the background. Errors are logged, and `run` repeats failed queries.
        """
        for environment in self._catalog:
            self._ask_soon(environment)
        asking = {image.asking for image in self._images.values() if image.asking is not None}
        if asking:
            await asyncio.wait(asking, timeout=timeout_s)

    def _has_image(self, environment: Environment) -> bool:
        return self._backend is not None and not environment.server.url

    def _ask_those_due(self) -> None:
        now = time.monotonic()
        for environment in self._catalog:
            image = self._images.get(environment.name)
            if image is None or image.is_due or image.ask_at <= now:
                self._ask_soon(environment)

    def _ask_soon(self, environment: Environment) -> None:
        if self._backend is None or not self._has_image(environment):
            return
        image = self._images.setdefault(environment.name, _Image())
        if image.asking is None:
            image.is_due = False
            image.asking = asyncio.create_task(self._ask(environment.name, image, self._backend))
            self._tasks.add(image.asking)
            image.asking.add_done_callback(self._tasks.discard)

    async def _ask(self, name: EnvironmentName, image: _Image, backend: Backend) -> None:
        try:
            if image.held is not None and await self._learn(name, image, image.held, backend):
                return
            if (current := self._catalog.offered.get(name)) is not None:
                await self._learn(name, image, current, backend)
        finally:
            image.asking = None

    async def _learn(self, name: EnvironmentName, image: _Image, asked: Environment, backend: Backend) -> bool:
        """Query the image id of *asked*, and apply the answer to the catalog. Return False if the query failed."""
        try:
            found = await backend.prepare(asked)
        except GatewayError as error:
            self._failed(name, image, asked, error.detail)
            return False
        except Exception:  # an error of one environment's image must not block the other environments
            logger.exception("environment_image_broken environment=%s image=%s", name, asked.image)
            self._failed(name, image, asked, "a fault of the gateway")
            return False
        self._found(name, image, asked, found)
        return True

    def _found(self, name: EnvironmentName, image: _Image, asked: Environment, found: str) -> None:
        current = self._catalog.offered.get(name)
        if current is None:
            return  # withdrawn meanwhile
        image.failures = 0
        image.errors.pop(asked.image, None)
        image.ask_at = time.monotonic() + IMAGES_EVERY_S
        if image.held is not None and image.held.image == asked.image:
            held, image.held = image.held, None
            self._replace(replace(_carried(current, held), image_id=found), current, "configuration")
        elif current.image != asked.image:
            image.is_due = True  # the file names another image by now
            return
        elif found != current.image_id and found:
            self._replace(replace(current, image_id=found), current, "image")
        image.is_known, image.is_doubted = True, False

    def _failed(self, name: EnvironmentName, image: _Image, asked: Environment, error: str) -> None:
        if error != image.errors.get(asked.image):
            logger.error("environment_image_unknown environment=%s image=%s error=%s", name, asked.image, error)
        image.errors[asked.image] = error
        image.failures += 1
        image.ask_at = time.monotonic() + retry_s(image.failures)


def retry_s(failures: int) -> float:
    """Return the seconds before the next query after *failures* consecutive failed queries."""
    return min(RETRY_MAX_S, RETRY_S * 2.0 ** min(failures - 1, 10))


def _name(file: _File) -> EnvironmentName | None:
    return file.offers.name if file.offers is not None else None


def _carried(current: Environment, now: Environment) -> Environment:
    """Return *now* with the image id and task module digest of *current*, if image and folder are unchanged."""
    if now.image == current.image:
        now = replace(now, image_id=current.image_id)
    before, after = current.custom_tasks, now.custom_tasks
    if before is not None and after is not None and before.folder == after.folder:
        now = replace(now, custom_tasks=replace(after, content=before.content))
    return now
