"""Checks the tar of an image that a gateway sends, and writes a new tar for the engine.

A compromised gateway must not be able to replace an image of this machine. So the tar must hold a single image with the
single expected name, and its configuration must have the hash for which another node vouches (`vouchers`). This hash
covers the image's layers, and the engine compares the layers with it. The engine gets a new tar with only the files
that the manifest names. It contains nothing that the engine could read differently.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import posixpath
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MEMBERS_MAX: Final = 5000
"""Maximum number of members. An image with 127 layers, the engines' maximum, has about 400."""
HEADER_MAX_BYTES: Final = 64 * 1024
MANIFEST_MAX_BYTES: Final = 2**20
CONFIG_MAX_BYTES: Final = 16 * 2**20
LAYERS_MAX: Final = 1000
CHUNK_BYTES: Final = 2**20


_END: Final = bytes(2 * tarfile.BLOCKSIZE)


class BadArchive(Exception):
    """The archive is refused. The message has the reason."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """The position of a member's content in the file."""

    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Archive:
    """A checked tar of an image."""

    path: Path
    tag: str
    config: _Slice
    layers: tuple[_Slice, ...]
    created: str = ""
    """Build time in the image's configuration; empty without one."""

    @property
    def size_bytes(self) -> int:
        """Size of the new tar for the engine in bytes."""
        parts = (len(self._manifest()), self.config.size_bytes, *(layer.size_bytes for layer in self.layers))
        return sum(tarfile.BLOCKSIZE + size + len(_padding(size)) for size in parts) + len(_END)

    def rewritten(self) -> Iterator[bytes]:
        """Yield the new tar for the engine in pieces. Raises ``BadArchive`` if the file at `path` became shorter."""
        text = self._manifest()
        yield _header("manifest.json", len(text)) + text + _padding(len(text))
        parts = {"config.json": self.config} | dict(zip(self._layer_names(), self.layers, strict=True))
        with self.path.open("rb") as file:
            for name, part in parts.items():
                yield _header(name, part.size_bytes)
                file.seek(part.offset)
                left = part.size_bytes
                while left > 0:
                    piece = file.read(min(left, CHUNK_BYTES))
                    if not piece:
                        raise BadArchive("the file became shorter while it was read")
                    left -= len(piece)
                    yield piece
                yield _padding(part.size_bytes)
        yield _END

    def _manifest(self) -> bytes:
        return json.dumps([{"Config": "config.json", "RepoTags": [self.tag], "Layers": self._layer_names()}]).encode()

    def _layer_names(self) -> list[str]:
        return [f"layer{number}.tar" for number in range(len(self.layers))]


def tagged(reference: str) -> str:
    """Return *reference* as an engine lists an image's names: with a tag, and without Docker Hub's name."""
    for prefix in ("docker.io/library/", "docker.io/"):
        reference = reference.removeprefix(prefix)
    return reference if ":" in reference.rpartition("/")[2] else f"{reference}:latest"


def checked(path: Path, *, reference: str, id: str) -> Archive:
    """Check the tar at *path*. Blocks while it reads the file.

    Args:
        path: The file, which must not change meanwhile.
        reference: The image's only name.
        id: The image's id: ``sha256:`` and the hash of its configuration.

    Raises:
        BadArchive: The tar is unreadable or ambiguous, or does not hold exactly this image.
    """
    try:
        with path.open("rb") as file, _Headers(path) as headers:
            found, links = _members(headers, os.fstat(file.fileno()).st_size)
            manifest = _manifest(_content(file, found, "manifest.json", MANIFEST_MAX_BYTES))
            tag = tagged(reference)
            if manifest["RepoTags"] != [tag]:
                raise BadArchive(f"the image's names are {_shown(manifest['RepoTags'])}, and not only {tag}")
            config = manifest["Config"]
            content = _content(file, found, config, CONFIG_MAX_BYTES)
            if f"sha256:{hashlib.sha256(content).hexdigest()}" != id:
                raise BadArchive(f"its configuration {_shown(config)} has not the hash {id}")
            layers = [links.get(layer, layer) for layer in manifest["Layers"]]
            missing = [layer for layer in layers if layer not in found]
            if missing:
                raise BadArchive(f"a layer is missing: {_shown(missing[0])}")
            return Archive(path, tag, found[config], tuple(found[layer] for layer in layers), _created(content))
    except (tarfile.TarError, OSError, EOFError, ValueError, ArithmeticError, RecursionError) as error:
        raise BadArchive(f"it cannot be read as a tar: {error}") from error


class _Headers(io.FileIO):
    """A file for headers that refuses long reads, because a header may claim a size of gigabytes."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "rb")

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= HEADER_MAX_BYTES:
            raise tarfile.ReadError("a header is too long")
        return super().read(size) or b""


def _members(headers: _Headers, total_bytes: int) -> tuple[dict[str, _Slice], dict[str, str]]:
    """Return the archive's files, and its links with the file that each points to."""
    found: dict[str, _Slice] = {}
    links: dict[str, str] = {}
    folders: set[str] = set()
    with tarfile.open(fileobj=headers, mode="r:") as archive:
        for _ in range(MEMBERS_MAX + 1):
            member = archive.next()
            if member is None:
                break
            archive.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps each member with its header
            if archive.pax_headers:
                raise BadArchive("it has headers for all of its files")
            name = _plain(member)
            if name in found or name in links or (name in folders and not member.isdir()):
                raise BadArchive(f"{_shown(name)} is in it twice")
            if member.isdir():
                folders.add(name)
            elif member.issym() or member.islnk():
                start = posixpath.dirname(name) if member.issym() else ""
                links[name] = posixpath.normpath(posixpath.join(start, member.linkname))
                if member.islnk() and links[name] not in found:  # readers look for its file before it only
                    raise BadArchive(f"{_shown(name)} is a link to {_shown(links[name])}, not to a file before it")
            elif member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse():
                if member.size < 0 or member.offset_data + member.size > total_bytes:
                    raise BadArchive(f"{_shown(name)} is not there to its end")
                found[name] = _Slice(member.offset_data, member.size)
            else:
                raise BadArchive(f"{_shown(name)} is neither a file nor a folder nor a link")
        else:
            raise BadArchive(f"it has more than {MEMBERS_MAX} files")
    # Engines store a duplicate layer as a link. A link to a link, or to a folder, could lead out of the archive.
    for name, target in links.items():
        if target not in found:
            raise BadArchive(f"{_shown(name)} is a link to {_shown(target)}, which is not a file of the archive")
    return found, links


def _plain(member: tarfile.TarInfo) -> str:
    name = member.name.rstrip("/") if member.isdir() else member.name
    if not name or name.startswith("/") or posixpath.normpath(name) != name or name.split("/")[0] in ("..", "."):
        raise BadArchive(f"{_shown(member.name)} is not a plain path")
    if not name.isascii() or not name.isprintable() or "\\" in name:
        raise BadArchive(f"{_shown(member.name)} is not a plain path")
    return name


def _manifest(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadArchive(f"its manifest.json is not JSON: {error}") from error
    if not isinstance(found, list) or len(found) != 1 or not isinstance(found[0], dict):
        raise BadArchive("its manifest.json does not list exactly one image")
    image = found[0]
    layers = image.get("Layers")
    if not isinstance(layers, list) or not all(isinstance(layer, str) for layer in layers) or len(layers) > LAYERS_MAX:
        raise BadArchive("its manifest.json does not list the image's layers")
    if not isinstance(image.get("Config"), str):
        raise BadArchive("its manifest.json does not name the image's configuration")
    return {"Config": image["Config"], "RepoTags": image.get("RepoTags"), "Layers": layers}


def _created(config: bytes) -> str:
    try:
        found = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise BadArchive(f"its configuration is not JSON: {error}") from error
    return str(found.get("created", "")) if isinstance(found, dict) else ""


def _content(file: io.BufferedReader, found: dict[str, _Slice], name: str, limit_bytes: int) -> bytes:
    part = found.get(name)
    if part is None:
        raise BadArchive(f"it has no file {_shown(name)}")
    if part.size_bytes > limit_bytes:
        raise BadArchive(f"{_shown(name)} has more than {limit_bytes} bytes")
    file.seek(part.offset)
    return file.read(part.size_bytes)


def _header(name: str, size_bytes: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size_bytes, 0o644
    return member.tobuf(tarfile.GNU_FORMAT)  # one block, even for sizes above 8 GiB


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % tarfile.BLOCKSIZE)


def _shown(value: object) -> str:
    return repr(value)[:200]
