"""Fixtures for all tests of the benchmarks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tests.conftest  # noqa: F401  # sets the Hypothesis profile


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Exclude the objects of all other tests from the garbage collection at the start of each round of load."""
    gc.freeze()
    yield
    gc.unfreeze()
