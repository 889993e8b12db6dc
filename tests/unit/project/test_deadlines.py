"""Every wait in a test has the one deadline of all tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LEAST_S = 2.0
"""Seconds. A shorter time is part of the test itself, such as a client that disconnects early."""
ELSEWHERE = (
    *("tests/runner/", "tests/foreign/", "environments/", "upstream_server.py"),
    *("tests/wire/openenv/driver.py", "tests/docker/swarm_balancer.py"),
)
"""The runner, whose deadlines bound the whole run, programs that cannot import this project's packages, and a load
balancer, whose timeouts are a part of its behavior."""
WAITS = (".wait", ".join", ".result", "asyncio.timeout")
"""Calls whose first argument is a deadline."""


def own_deadlines(source: str) -> Iterator[int]:
    """Yield the lines of *source* whose deadline is a plain number or a module constant with a plain number."""
    tree = ast.parse(source)
    plain = {
        node.targets[0].id
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _is_plain(node.value)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        told = [keyword.value for keyword in call.keywords if keyword.arg == "timeout" and "Timeouts" not in name]
        if name.endswith(WAITS) and name != "asyncio.wait":
            told += call.args[:1]
        if any(_is_plain(at) or (isinstance(at, ast.Name) and at.id in plain) for at in told):
            yield call.lineno


def _is_plain(node: ast.expr) -> bool:
    """Return True if *node* is a number of seconds that may end a test's wait on a slow machine."""
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value >= LEAST_S


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("thread.join(10)", [1]),
        ("thread.join(HANG_S)", []),
        ("async with asyncio.timeout(20):\n    pass", [1]),
        ("WITHIN_S = 20.0\nhttpx.get(url, timeout=WITHIN_S)", [2]),
        ("httpx.get(url, timeout=0.5)", []),
        ("asyncio.wait(tasks)", []),
    ],
)
def test_a_deadline_of_its_own_is_found(source: str, lines: list[int]) -> None:
    assert list(own_deadlines(source)) == lines


def test_no_test_has_a_deadline_of_its_own() -> None:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("bench/tests/*.py")]
    ours = {str(file.relative_to(ROOT)): file for file in files}
    found = [
        f"{name}:{line}"
        for name, file in sorted(ours.items())
        if not any(part in name for part in ELSEWHERE)
        for line in own_deadlines(file.read_text())
    ]
    assert not found, "wait for at most tests.deadlines.HANG_S"
