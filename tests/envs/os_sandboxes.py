"""The modules of the os environment, and real sandboxes for its tests."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
from envserver.sandbox import Limits, SandboxError, Sandboxes

from tests.fakes.user import need_other_users
from tests.sandbox.conftest import made_box, work_folder

HOME = Path(__file__).resolve().parents[2] / "env_images" / "os"
LIMITS = Limits(memory_bytes=256 * 2**20, pids=128, disk_bytes=64 * 2**20, cpu_s=60)
_refusals: list[str] = []


def os_module(name: str) -> ModuleType:
    """Import a module of the os environment, whose folder is not a package."""
    if str(HOME) not in sys.path:
        sys.path.append(str(HOME))
    return importlib.import_module(name)


@contextlib.asynccontextmanager
async def opening_sandboxes() -> AsyncIterator[Sandboxes]:
    """Yield sandboxes in a kept box that consists of this machine's programs. Skip the test where they cannot open."""
    await require_sandboxes()
    async with _opening() as sandboxes:
        yield sandboxes


async def require_sandboxes() -> None:
    """Skip the test where sandboxes cannot be opened; in CI, fail it. The process tries only once."""
    need_other_users()
    if not _refusals:
        _refusals.append(await _refusal())
    if _refusals[0] and os.environ.get("CI") == "true":
        pytest.fail(_refusals[0])
    if _refusals[0]:
        pytest.skip(_refusals[0])


async def _refusal() -> str:
    """Return why sandboxes cannot be opened here, or an empty text."""
    if shutil.which("bwrap") is None:
        return "no sandboxes here: install bubblewrap"
    try:
        async with _opening() as sandboxes:
            await sandboxes.check()
    except SandboxError as error:
        return f"no sandboxes here: {error}"
    return ""


@contextlib.asynccontextmanager
async def _opening() -> AsyncIterator[Sandboxes]:
    with work_folder() as work:
        async with Sandboxes(made_box(), work, LIMITS) as sandboxes:
            yield sandboxes
