"""Scans a folder of environments: lists its files, and reads the files that changed since the last scan."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from gateway.catalog.toml import read_environment
from gateway.core.environment import Environment
from gateway.core.errors import ConfigError

Stamp = tuple[int, int, int, int]
"""Values of a file that differ after a write or a replacement. ``cp -p`` keeps the mtime, so it is not enough."""
_SETTLED_S = 2.0
"""Seconds after a change in which a further change may stay unnoticed: file systems' clocks tick some ms apart."""


def scan_catalog(
    directory: Path, names: frozenset[str], stamps: Mapping[Path, Stamp | None], image_tag: str = ""
) -> tuple[frozenset[Path], Mapping[Path, tuple[Stamp | None, Environment | ConfigError]]]:
    """Read the files whose stamp differs from *stamps*. The function blocks during the scan.

    *image_tag* is as in `parse_environment`.

    Returns:
        The existing files, and for each changed file its stamp and its environment or error. A file whose stamp is None
        must be read again at the next scan.
    """
    present: set[Path] = set()
    read: dict[Path, tuple[Stamp | None, Environment | ConfigError]] = {}
    for path in paths_of(directory, names):
        looked_at = time.time()
        try:
            status = path.stat()
        except OSError:
            continue  # removed since the listing
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
    """Return the ``environment.toml`` files of the folders *names*, or of all folders if *names* is empty."""
    paths = sorted(directory.glob("*/environment.toml"))
    return [path for path in paths if not names or path.parent.name in names]
