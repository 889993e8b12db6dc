"""Limits a node to images that its operator lists in a file.

A voucher proves only that some node of the cluster has an image. With this file, root on one node cannot spread an
image to the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx

from gateway.core.errors import BackendError
from gateway.node.gate import engine_client
from gateway.node.image_archives import tagged
from gateway.node.routes import GateRefusal

SETTING: Final = "GATEWAY_NODE_IMAGE_IDS"
_LINE: Final = re.compile(r"(?P<reference>[^\s#]+)[ \t]+(?P<id>sha256:[0-9a-f]{64})", re.ASCII)


class ImageIds:
    """The ids that an operator allows for each image, in a file of lines ``REFERENCE sha256:ID``.

    A reference may have several lines, so that an update can allow the old and the new build. Text after ``#`` is a
    comment. Each check reads the file again, because images arrive rarely.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def check(self, reference: str, id: str = "") -> None:
        """Return if the file lists *id* for *reference*; without an *id*, if it lists any.

        Raises:
            GateRefusal: It does not, it is missing, or one of its lines is invalid.
        """
        listed = self._read().get(_name(reference), {})
        if id in listed or (listed and not id):
            return
        known = ", ".join(f"{one} (line {number})" for one, number in listed.items()) or "nothing"
        raise GateRefusal(
            f"{self._path} lists {known} for {reference}, and not {id or 'an id'}: if the image is yours, add the line "
            f"that gateway node images prints on the machine where you built it"
        )

    def _read(self) -> dict[str, dict[str, int]]:
        """Return the numbers of the lines by reference and id."""
        try:
            lines = self._path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise GateRefusal(f"{SETTING}={self._path}: no image is accepted: {reason}") from error
        found: dict[str, dict[str, int]] = {}
        for number, line in enumerate(lines, 1):
            content = line.partition("#")[0].strip()
            if not content:
                continue
            match = _LINE.fullmatch(content)
            if match is None:
                raise GateRefusal(
                    f"{self._path}, line {number}: no image is accepted: a line is REFERENCE sha256:ID with 64 "
                    f"hexadecimal digits, and not {content!r:.120}"
                )
            found.setdefault(_name(match["reference"]), {}).setdefault(match["id"], number)
        return found


async def image_lines(engine: str, references: Iterable[str]) -> list[str]:
    """Return the lines of such a file for the images that *engine* has, and a comment for each missing image.

    Raises:
        BackendError: The engine does not answer, or refuses.
    """
    lines = []
    async with engine_client(engine) as client:
        for reference in sorted(references):
            try:
                response = await client.get(f"/images/{quote(reference, safe='/:@')}/json")
            except httpx.TransportError as error:
                raise BackendError(f"the engine at {engine} does not answer: {error}") from error
            if response.status_code == HTTPStatus.NOT_FOUND:
                lines.append(f"# {reference}: not on this machine")
            elif response.status_code == HTTPStatus.OK:
                lines.append(f"{reference} {response.json()['Id']}")
            else:
                raise BackendError(f"the engine answers {response.status_code}: {response.text[:200]}")
    return lines


def _name(reference: str) -> str:
    """Return one spelling of the references that mean the same image."""
    return reference if "@" in reference else tagged(reference)
