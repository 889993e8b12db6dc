"""A folder of environments, looked at again and again: which files are there, and what those say that changed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from gateway.catalog.toml import read_environment
from gateway.core.environment import Environment
from gateway.core.errors import ConfigError

Stamp = tuple[int, int, int, int]
"""Of a file: what differs if it was written to or replaced; mtime alone is kept by ``cp -p``."""
_SETTLED_S = 2.0
"""Clocks of file systems tick some milliseconds apart: a file that changed this lately may have changed unseen."""


def scan_catalog(
    directory: Path, names: frozenset[str], stamps: Mapping[Path, Stamp | None], image_tag: str = ""
) -> tuple[frozenset[Path], Mapping[Path, tuple[Stamp | None, Environment | ConfigError]]]:
    """Read the files whose stamp is another one than in *stamps*; blocks while that takes.

    *image_tag*: as for `read_environment`.

    Returns the files that are there, and of the changed ones what each says, or what is wrong with it, with the stamp
    to tell its next change by. A file without a stamp is to be read again at the next look.
    """
    present: set[Path] = set()
    read: dict[Path, tuple[Stamp | None, Environment | ConfigError]] = {}
    for path in paths_of(directory, names):
        looked_at = time.time()
        try:
            status = path.stat()
        except OSError:
            continue  # it went just now
        present.add(path)
        stamp = (status.st_mtime_ns, status.st_size, status.st_ino, status.st_ctime_ns)
        if stamps.get(path) == stamp:
            continue
        is_at_rest = max(status.st_mtime, status.st_ctime) < looked_at - _SETTLED_S
        try:
            read[path] = (stamp if is_at_rest else None, read_environment(path, image_tag=image_tag))
        except ConfigError as error:
            read[path] = (stamp if is_at_rest else None, error)
    return frozenset(present), read


def paths_of(directory: Path, names: frozenset[str]) -> list[Path]:
    """The files of a catalog, as it is read at the start: of the folders *names*, or of all if there are none."""
    paths = sorted(directory.glob("*/environment.toml"))
    return [path for path in paths if not names or path.parent.name in names]
