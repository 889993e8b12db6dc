"""A box of this machine's own programs, made once, and a spawner for each test."""

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from envserver.sandbox import Box, Limits, Sandbox, Sandboxes, hostbox

from tests.fakes.user import need_other_users

MIB = 1024 * 1024
LIMITS = Limits(memory_bytes=256 * MIB, pids=64, disk_bytes=32 * MIB, cpu_s=60)


def made_box() -> Box:
    """Return a box of this machine's programs, kept between runs under a name that changes with its recipe."""
    recipe = hashlib.sha256(Path(hostbox.__file__).read_bytes()).hexdigest()[:12]
    return hostbox.box_of_host(Path(tempfile.gettempdir()) / f"env-gateway-box-{os.geteuid()}-{recipe}")


def sandbox_dir(folder: Path) -> Path:
    """Return a value for GATEWAY_SANDBOX_DIR below *folder*: with a link to `made_box`, which takes seconds to make."""
    made = folder / "sandboxes"
    made.mkdir()
    (made / "box").symlink_to(made_box().path)
    return made


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder: they need bubblewrap."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.sandbox)


@pytest.fixture(scope="session")
def box() -> Box:
    return made_box()


@contextmanager
def work_folder() -> Iterator[Path]:
    """Yield an empty folder that the spawner's root can reach. Remove it, which fails if a mount or a file was left.

    That root is an ordinary user outside, so ``tmp_path`` does not work.
    """
    need_other_users()
    folder = Path(tempfile.mkdtemp(prefix="env-gateway-work-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        folder.rmdir()


@pytest.fixture
def work() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.fixture
async def sandboxes(box: Box, work: Path) -> AsyncIterator[Sandboxes]:
    async with Sandboxes(box, work, LIMITS) as sandboxes:
        yield sandboxes


@pytest.fixture
async def sandbox(sandboxes: Sandboxes) -> Sandbox:
    return await sandboxes.open()
