"""Look up and pull the images of environments on one engine."""

from __future__ import annotations

import json
import logging
import time
from functools import partial

from docker import APIClient, auth

from gateway.backends.docker import calls
from gateway.backends.docker.engine import LOOK_S, TIMEOUT_S, Engine, EngineError, open_stream
from gateway.backends.launch import CancelToken
from gateway.core.environment import Environment
from gateway.core.errors import StartFailed

logger = logging.getLogger(__name__)

PULL_S = 3600.0
"""Seconds that a pull may take: an endless pull would block the others."""
_REFUSED = 403


class Images:
    """The environments' images on one engine."""

    def __init__(self, engine: Engine, puller: Engine, *, forwarder_image: str) -> None:
        """Create the object; *puller*'s threads only pull and so bound concurrent pulls, which take minutes each."""
        self._engine = engine
        self._puller = puller
        self._forwarder_image = forwarder_image

    async def prepare(self, environment: Environment, wanted: CancelToken) -> str:
        """Pull the missing images of *environment*'s workers; return the id of the environment's own image.

        Raises:
            StartFailed: An image is missing and can't be pulled.
            EngineError: The engine does not answer.
        """
        ids = [await self._prepared(image, wanted) for image in images_of(environment, self._forwarder_image)]
        return ids[0] if ids else ""

    async def are_there(self, environment: Environment) -> bool:
        """Return True if workers of *environment* need images and the engine has them all."""
        images = images_of(environment, self._forwarder_image)
        return bool(images) and all([await self._id(image) for image in images])

    async def fetch(self, image: str, wanted: CancelToken) -> None:
        """Pull *image* if its name contains a registry or a digest.

        Raises:
            StartFailed: The name has neither, or the engine forbids the pull.
            EngineError: The engine does not answer, or the registry refuses the pull.
        """
        if not is_from_registry(image):
            raise StartFailed(
                f"there is no image {image} on this engine: build it (ours with scripts/build-images), or pull it"
            )
        logger.info("image_pull image=%s", image)
        try:
            await self._puller.call(partial(pull, image=image, wanted=wanted))
        except EngineError as error:
            if error.status != _REFUSED:
                raise
            raise StartFailed(
                f"there is no image {image} on this engine, and the engine rejects pulls (as the engine gate does): "
                f"docker pull {image}"
            ) from error

    async def _prepared(self, image: str, wanted: CancelToken) -> str:
        if not (id := await self._id(image)):
            try:
                await self.fetch(image, wanted)
            except EngineError as error:
                if error.is_silence:
                    raise
                raise StartFailed(f"{image}: {error}") from error
            if not (id := await self._id(image)):
                raise StartFailed(f"{image} was pulled, and is not on this engine")
        return id

    async def _id(self, image: str) -> str:
        return await self._engine.call(partial(calls.image_id, image=image), silence_s=LOOK_S)


def images_of(environment: Environment, forwarder_image: str) -> list[str]:
    """Return the images that workers of *environment* need, the environment's own first."""
    if environment.server.url:
        return []
    return [environment.image, *([forwarder_image] if environment.server.is_foreign else [])]


def is_from_registry(image: str) -> bool:
    """Return True if *image* names a registry's host (``registry.example/x``) or a digest (``x@sha256:…``).

    Any other missing image is one of the gateway's own that is not built yet. A public registry may have a third-party
    image of the same name.
    """
    host, slash, _ = image.partition("/")
    return "@sha256:" in image or (bool(slash) and ("." in host or ":" in host))


def pull(client: APIClient, *, image: str, wanted: CancelToken) -> None:
    """Pull *image* with this machine's ``docker login`` credentials; block until the pull ends or is cancelled.

    Raises:
        EngineError: The registry or the engine refuses, or the pull takes longer than ``PULL_S``.
    """
    registry, _ = auth.resolve_repository_name(image.partition("@")[0])
    credentials = auth.get_config_header(client, registry)
    headers = {"X-Registry-Auth": credentials.decode()} if credentials else {}
    deadline = time.monotonic() + PULL_S
    # The SDK's own `pull` does not expose the response, and only closing the response ends the pull.
    with open_stream(client, "POST", "images/create", _query(image), headers=headers, silence_s=TIMEOUT_S) as response:
        for line in response.iter_lines():
            wanted.check()
            progress = json.loads(line)
            if "error" in progress:
                raise EngineError(f"pull failed: {progress['error']}", status=500)
            if time.monotonic() > deadline:
                raise EngineError(f"pull failed: it takes more than {PULL_S:g} s", status=500)


def _query(image: str) -> dict[str, str]:
    """Return the query of a pull. The tag defaults to ``latest``: the engine's default is all tags."""
    path, colon, tag = image.rpartition(":")
    if "@" in image:
        return {"fromImage": image}
    return {"fromImage": path, "tag": tag} if colon and "/" not in tag else {"fromImage": image, "tag": "latest"}
