"""Writes a split's file whole or not at all, and over an existing one only when told to; or to standard output."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from gateway.core.errors import ConfigError

STDOUT = 1
"""The descriptor."""


def check_target(path: Path, *, force: bool, remedy: str = "remove it first, or write to another file") -> None:
    """Find out before the work whether *path* can be written; *remedy* is what to do where it exists.

    Raises:
        ConfigError: its folder is not there; it is no regular file; it is there, and *force* is not given.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.resolve().parent.is_dir():
            raise ConfigError(f"{path}: there is no folder {path.parent}") from None
        return
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path}: not a regular file")
    if not force:
        raise ConfigError(f"{path} exists: {remedy}")


def write_lines(path: Path, lines: Iterable[bytes], *, force: bool = False) -> None:
    """Write *lines*, a line end after each, to *path*: nobody ever sees a part of them there.

    An existing file keeps its mode; a link is followed.

    Raises:
        ConfigError: as `check_target`, also where the file has come into being since; or the disk refuses.
    """
    check_target(path, force=force)
    target = path.resolve()
    # Not a name that ends in .jsonl: a gateway that starts just then would take it for a split.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            _write(draft, lines)
            if force:
                _replace(target, draft)
            else:
                os.link(draft, target)  # unlike a rename, it never replaces what came there meanwhile
        finally:
            draft.unlink(missing_ok=True)
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: remove it first, or write to another file") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def print_lines(lines: Iterable[bytes]) -> None:
    """Write *lines*, a line end after each, to standard output.

    Raises:
        BrokenPipeError: its reader wants no more.
        ConfigError: it cannot be written.
    """
    # Past Python's buffer: what cannot be written would be tried again, and fail again, as the process ends.
    left = memoryview(b"".join(line + b"\n" for line in lines))
    try:
        while left:
            left = left[os.write(STDOUT, left) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(f"standard output: {error.strerror}") from error


def _write(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("xb") as file:
        for line in lines:
            file.write(line + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _replace(target: Path, draft: Path) -> None:
    if target.exists():
        draft.chmod(stat.S_IMODE(target.stat().st_mode))
    draft.replace(target)
