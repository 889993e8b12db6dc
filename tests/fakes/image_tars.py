"""Tars of images as engines write them, and malformed tars that no engine should load."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

Change = Callable[["ImageTar"], None]


@dataclass
class ImageTar:
    """A tar of an image under construction. A test can corrupt any part of it."""

    tag: str
    config: bytes = (
        b'{"architecture": "amd64", "created": "2025-01-01T00:00:00Z", "rootfs": {"type": "layers", "diff_ids": []}}'
    )
    layers: Sequence[bytes] = (b"one layer", b"another")
    oci: bool = False
    manifest: Any = None
    members: list[tuple[tarfile.TarInfo, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.config).hexdigest()
        name = f"blobs/sha256/{digest}" if self.oci else f"{digest}.json"
        layers = []
        for content in self.layers:
            hashed = hashlib.sha256(content).hexdigest()
            layers.append(f"blobs/sha256/{hashed}" if self.oci else f"{hashed}/layer.tar")
        self.manifest = [{"Config": name, "RepoTags": [self.tag], "Layers": layers}]
        folders = ["blobs", "blobs/sha256"] if self.oci else [layer.rpartition("/")[0] for layer in layers]
        for folder in folders:
            self.add(folder, type=tarfile.DIRTYPE)
        for layer, content in zip(layers, self.layers, strict=True):
            self.add(layer, content)
        self.add(name, self.config)
        if self.oci:
            self.add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')

    @property
    def id(self) -> str:
        return f"sha256:{hashlib.sha256(self.config).hexdigest()}"

    def add(self, name: str, content: bytes = b"", *, type: bytes = tarfile.REGTYPE, target: str = "") -> None:
        """Add a member."""
        member = tarfile.TarInfo(name)
        member.type, member.linkname, member.size = type, target, len(content)
        self.members.append((member, content))

    def written(self, *, format: int = tarfile.PAX_FORMAT, **options: Any) -> bytes:
        """Return the tar. The manifest is its last member, as in engines' tars."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=format, **options) as archive:
            for member, content in self.members:
                archive.addfile(member, io.BytesIO(content))
            if self.manifest is not None:
                text = self.manifest if isinstance(self.manifest, bytes) else json.dumps(self.manifest).encode()
                member = tarfile.TarInfo("manifest.json")
                member.size = len(text)
                archive.addfile(member, io.BytesIO(text))
        return buffer.getvalue()


def loaded(data: bytes) -> tuple[str, str, list[bytes]]:
    """Return the tag, the id and the layers of a tar's only image, as an engine reads them."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:

        def content(name: str) -> bytes:
            file = archive.extractfile(name)
            assert file is not None
            return file.read()

        (image,) = json.loads(content("manifest.json"))
        (tag,) = image["RepoTags"]
        return (
            tag,
            f"sha256:{hashlib.sha256(content(image['Config'])).hexdigest()}",
            [content(layer) for layer in image["Layers"]],
        )
