"""For all tests of the benchmarks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import tests.conftest  # noqa: F401  # its profile of Hypothesis


@pytest.fixture(autouse=True)
def frozen() -> Iterator[None]:
    """Keep the objects of all other tests out of the collection with which each round of load begins."""
    gc.freeze()
    yield
    gc.unfreeze()
