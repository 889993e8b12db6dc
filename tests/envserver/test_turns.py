"""The order of a session's calls: a table of the calls that run."""

from typing import Any

import pytest
from envserver.http.bodies import Action
from envserver.sessions.session import Call, Turns
from envserver.tools import Mode

MODES: dict[str, Mode] = {"s": "serial", "c": "concurrent", "x": "exclusive"}


NO_SESSION: Any = None


def named(name: str) -> Call:
    return Call(NO_SESSION, Action("name", "", {}), task_id=name, mode=MODES[name[0]])


def started(turns: Turns) -> str:
    names = ""
    while (call := turns.next()) is not None:
        names += call.task_id
    return names


@pytest.mark.parametrize(
    ("calls", "running"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("s1 s2 s3", "s1", id="serial calls one at a time"),
        pytest.param("c1 c2 c3", "c1c2c3", id="concurrent calls all together"),
        pytest.param("s1 s2 c1", "s1c1", id="a concurrent call overtakes a waiting serial call"),
        pytest.param("x1 s1 c1", "x1", id="an exclusive call alone"),
        pytest.param("c1 x1 c2 s1", "c1", id="nothing overtakes a waiting exclusive call"),
        pytest.param("s1 x1 c1", "s1", id="an exclusive call waits for a serial call"),
        pytest.param("x1 x2", "x1", id="exclusive calls one at a time"),
    ],
)
def test_the_modes_of_waiting_calls_decide_which_run(calls: str, running: str) -> None:
    turns = Turns()
    for name in calls.split():
        turns.waiting.append(named(name))

    assert started(turns) == running


def test_the_next_call_starts_when_a_call_leaves() -> None:
    turns = Turns()
    calls = {name: named(name) for name in ("s1", "c1", "x1", "s2", "c2")}
    turns.waiting.extend(calls.values())

    order = [started(turns)]
    for name in ("s1", "c1", "x1", "s2", "c2"):
        turns.leave(calls[name])
        order.append(started(turns))

    assert order == ["s1c1", "", "x1", "s2c2", "", ""]
    assert not turns.waiting
    assert not turns.running


def test_a_waiting_call_can_leave() -> None:
    turns = Turns()
    first, second, third = (named(name) for name in ("s1", "s2", "s3"))
    turns.waiting.extend((first, second, third))
    assert started(turns) == "s1"

    turns.leave(second)
    turns.leave(first)

    assert started(turns) == "s3"
    assert turns.drain() == []
