"""Images that tests build: each image once per machine, for any number of pytest processes."""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound

CONTENT_LABEL = "env-gateway-tests.content"
"""Label of an image with the digest of its files and base images."""
LOCK = Path(tempfile.gettempdir()) / f"env-gateway-tests-images.{os.getuid()}.lock"
_BASE = re.compile(r"^(?:FROM |ARG BASE=)([^$\s]+)$", re.MULTILINE)


def built_once(engine: docker.APIClient, tag: str, files: Mapping[str, bytes]) -> str:
    """Return *tag*, the image of *files*, which include the Dockerfile. Build the image unless the engine has it.

    One process at a time checks and builds, so that the other processes find the image. It stays on the engine, like
    the images of scripts/build-images.
    """
    with LOCK.open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = _digest(engine, files)
        if _content_of(engine, tag) != content:
            labels = {CONTENT_LABEL: content}
            log = engine.build(
                fileobj=_packed(files), custom_context=True, tag=tag, labels=labels, rm=True, decode=True
            )
            errors = [line for line in log if "error" in line]
            assert not errors, errors
    return tag


def files_of(folder: Path) -> dict[str, bytes]:
    """Read the files of a build context without sub-folders."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _digest(engine: docker.APIClient, files: Mapping[str, bytes]) -> str:
    bases = [
        _inspected(engine, name)["Id"] for name in _BASE.findall(files["Dockerfile"].decode()) if name != "scratch"
    ]
    named = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return hashlib.sha256(json.dumps([bases, named], sort_keys=True).encode()).hexdigest()


def _content_of(engine: docker.APIClient, tag: str) -> str | None:
    try:
        labels: dict[str, str] | None = _inspected(engine, tag)["Config"]["Labels"]
    except ImageNotFound:
        return None
    return (labels or {}).get(CONTENT_LABEL)


def _inspected(engine: docker.APIClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = engine.inspect_image(name)  # type: ignore[no-untyped-call]  # no stubs
    return found


def _packed(files: Mapping[str, bytes]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    return packed
