"""Images: which may be pulled, and the pull itself."""

from __future__ import annotations

import json

from docker import APIClient, auth

from gateway.backends.engine import TIMEOUT_S, EngineError, open_stream
from gateway.backends.launches import Wanted


def is_from_registry(image: str) -> bool:
    """Whether *image* says where it comes from: a registry's host (``registry.example/x``) or content (``x@sha256:…``).

    Any other name that is missing is one of ours that was not built yet; a public registry may have a stranger's image
    of that name.
    """
    host, slash, _ = image.partition("/")
    return "@sha256:" in image or (bool(slash) and ("." in host or ":" in host))


def pull(client: APIClient, *, image: str, wanted: Wanted) -> None:
    """Pull *image* with the credentials that ``docker login`` left here; blocks while that takes and it is wanted.

    Raises:
        EngineError: the registry or the engine refused.
    """
    registry, _ = auth.resolve_repository_name(image.partition("@")[0])
    credentials = auth.get_config_header(client, registry)
    headers = {"X-Registry-Auth": credentials.decode()} if credentials else {}
    # A plain request: the SDK's own `pull` keeps the response to itself, and only a closed one ends the pull.
    with open_stream(client, "POST", "images/create", _query(image), headers=headers, silence_s=TIMEOUT_S) as response:
        for line in response.iter_lines():
            wanted.check()
            progress = json.loads(line)
            if "error" in progress:
                raise EngineError(f"pull failed: {progress['error']}", status=500)


def _query(image: str) -> dict[str, str]:
    """Split off the tag; without one it is ``latest`` (and not all tags, as the engine would have it)."""
    path, colon, tag = image.rpartition(":")
    if "@" in image:
        return {"fromImage": image}
    return {"fromImage": path, "tag": tag} if colon and "/" not in tag else {"fromImage": image, "tag": "latest"}
