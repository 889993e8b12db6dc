"""Begins with the test files that take long: begun late, one would keep one process busy and leave the others idle.

A plugin of pytest, for scripts/test. Within a file the order stays as it is.
"""

from __future__ import annotations

import pytest

SLOWEST = (
    "tests/envs/test_coding_tasks.py",
    "tests/wire/test_coding.py",
    "tests/envs/test_coding_tampering.py",
    "tests/unit/test_bench.py",
    "tests/envs/test_os_tasks.py",
    "tests/wire/openenv/test_static_replicas.py",
)
"""Each takes a minute and more, the longest first."""
FOLDERS = ("tests/faults/", "tests/wire/", "tests/service/")
"""Their tests mostly wait, and those of the others mostly compute."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    file = item.nodeid.partition("::")[0]
    if file in SLOWEST:
        return SLOWEST.index(file)
    folder = next((number for number, prefix in enumerate(FOLDERS) if file.startswith(prefix)), len(FOLDERS))
    return len(SLOWEST) + folder
