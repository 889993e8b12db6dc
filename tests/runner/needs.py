"""The needs of tests besides the project's own packages, read from the tests' marks.

``docker`` needs an engine and the base image, ``redis`` a redis-server, ``sandbox`` bubblewrap. The mark
``needs("image:os", "openenv-clients")`` names other needs of `preparation.STEPS`. scripts/test prepares only the needs
of the tests that it runs, while tests without needs already run. A test waits for its own needs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runner.lanes import READY_VARIABLE

OF_MARKS = {"docker": ("engine", "image:base"), "redis": ("redis",), "sandbox": ("bubblewrap",)}
READY_S = 1_200.0
"""Seconds that a test waits for its needs: several times the longest preparation of a bare machine."""
POLL_S = 0.1


def needs_of(item: pytest.Item) -> frozenset[str]:
    """Return all needs of *item*."""
    named = [need for mark in item.iter_markers("needs") for need in mark.args]
    implied = [need for mark, needs in OF_MARKS.items() if item.get_closest_marker(mark) for need in needs]
    return frozenset([*named, *implied])


@pytest.hookimpl(wrapper=True, tryfirst=True)  # before the test's time starts
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Wait until the test's needs are ready."""
    missing = "".join(_reasons(item))
    item.stash[_MISSING] = missing
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs this machine cannot satisfy. In CI the test fails."""
    if missing := item.stash.get(_MISSING, ""):
        if os.environ.get("CI") == "true":
            pytest.fail(missing, pytrace=False)
        pytest.skip(missing)


_MISSING = pytest.StashKey[str]()


def _reasons(item: pytest.Item) -> Iterator[str]:
    folder = os.environ.get(READY_VARIABLE)
    if folder is None:  # pytest was started without the runner, so no preparation runs
        return
    deadline = time.monotonic() + READY_S
    for need in sorted(needs_of(item)):
        ready, failed = Path(folder, need), Path(folder, f"{need}.failed")
        while not ready.exists():
            if failed.exists():
                yield f"{need} could not be prepared: {failed.read_text().strip()}\n"
                break
            if time.monotonic() > deadline:
                yield f"{need} was not prepared in time\n"
                break
            time.sleep(POLL_S)
