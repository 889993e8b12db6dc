"""A gateway that serves the project's own environments, on local processes or on containers and Redis."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.envs.workers import SANDBOXED
from tests.sandbox.conftest import sandbox_dir
from tests.wire.gateways import Gateway, short_folder
from tests.wire.stack import Stack

PROJECT = Path(__file__).resolve().parents[2]

EMBEDDED = "embedded"
STACK = "stack"


def on_stack(*environments: str) -> "pytest.ParameterSet":
    """Return the parameter `STACK` for a test that needs these environments' images."""
    needs = pytest.mark.needs(*(f"image:{name}" for name in environments))
    return pytest.param(STACK, marks=[pytest.mark.docker, pytest.mark.redis, needs])


def edited(folder: Path, environment: str, edit: Callable[[str], str]) -> Path:
    """Return a catalog in *folder* with a bundled *environment* whose ``environment.toml`` was changed by *edit*."""
    own, copy = PROJECT / "env_images" / environment, folder / "env_images" / environment
    copy.mkdir(parents=True)
    for path in own.iterdir():
        if path.name != "environment.toml":
            (copy / path.name).symlink_to(path)
    (folder / "tasks").symlink_to(PROJECT / "tasks")
    before = (own / "environment.toml").read_text("utf-8")
    after = edit(before)
    assert after != before
    (copy / "environment.toml").write_text(after, "utf-8")
    return copy.parent


@contextlib.contextmanager
def serving(kind: str, *environments: str, **variables: str) -> Iterator[Gateway]:
    """Run a gateway of *kind* with *environments*, of which the first is the default. It requires no key.

    AReaL's users know a task server only by its host and port. *variables* are further settings. The images must exist
    (scripts/build-images).
    """
    folder = short_folder()
    folder.chmod(0o755)  # a local worker's sandboxes are below it, and their root is another user
    stack = Stack() if kind == STACK else None
    needs_box = stack is None and not set(SANDBOXED).isdisjoint(environments)
    settings = {
        "GATEWAY_CATALOG_DIR": str(PROJECT / "env_images"),
        "GATEWAY_ENVIRONMENTS": ",".join(environments),
        "GATEWAY_DEFAULT_ENVIRONMENT": environments[0],
        "GATEWAY_TRAINER_KEYS": "",
        "GATEWAY_SANDBOX_DIR": str(sandbox_dir(folder) if needs_box else folder / "sandboxes"),
    }
    gateway = Gateway(folder, (stack.settings() if stack else {}) | settings | variables)
    try:
        if stack is not None:
            stack.redis.start()
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
        if stack is not None:
            stack.close()
        shutil.rmtree(folder, ignore_errors=True)
