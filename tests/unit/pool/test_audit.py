"""The findings of an audit, as a table: the store before, the backend, the store after."""

from __future__ import annotations

import pytest

from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import BackendWorker, Worker, WorkerState
from gateway.pool.audit import AuditFindings, compare

READY, STARTING, DRAINING = WorkerState.READY, WorkerState.STARTING, WorkerState.DRAINING


def stored(**states: WorkerState) -> dict[WorkerId, Worker]:
    return {
        WorkerId(id): Worker(id=WorkerId(id), environment=EnvironmentName("math"), digest="d", slots=1, state=state)
        for id, state in states.items()
    }


def seen(*running: str, dead: tuple[str, ...] = ()) -> list[BackendWorker]:
    return [
        BackendWorker(
            id=WorkerId(id),
            environment=EnvironmentName("math"),
            digest="d",
            address="unix:/run/a",
            running=id not in dead,
        )
        for id in (*running, *dead)
    ]


@pytest.mark.parametrize(
    ("before", "found", "after", "orphans", "lost", "adopted"),
    [
        pytest.param({}, seen(), {}, [], [], [], id="no workers"),
        pytest.param(stored(a=READY), seen("a"), stored(a=READY), [], [], ["a"], id="known to both"),
        pytest.param(stored(a=DRAINING), seen("a"), stored(a=DRAINING), [], [], ["a"], id="draining and adopted"),
        pytest.param({}, seen("a"), {}, ["a"], [], [], id="known to the backend only"),
        pytest.param({}, seen(dead=("a",)), {}, ["a"], [], [], id="a dead worker without a record"),
        pytest.param(stored(a=READY), seen(), stored(a=READY), [], ["a"], [], id="known to the store only"),
        pytest.param(stored(a=DRAINING), seen(), stored(a=DRAINING), [], ["a"], [], id="a draining worker is gone"),
        pytest.param(stored(a=READY), seen(dead=("a",)), stored(a=READY), [], ["a"], [], id="known to both, but dead"),
        pytest.param(stored(a=STARTING), seen(), stored(a=STARTING), [], [], [], id="not created yet"),
        pytest.param(stored(a=STARTING), seen("a"), stored(a=STARTING), [], [], [], id="created, not ready yet"),
        pytest.param(
            stored(a=STARTING), seen(dead=("a",)), stored(a=STARTING), [], [], [], id="the start fails on its own"
        ),
        pytest.param(stored(a=STARTING), seen("a"), stored(a=READY), [], [], [], id="became ready meanwhile"),
        pytest.param({}, seen("a"), stored(a=STARTING), [], [], [], id="added meanwhile"),
        pytest.param(stored(a=STARTING), seen("a"), {}, [], [], [], id="the start failed meanwhile"),
        pytest.param(
            stored(a=READY, b=READY, c=STARTING),
            seen("a", "d", "e", dead=("f",)),
            stored(a=READY, b=READY, c=STARTING, e=STARTING),
            ["d", "f"],
            ["b"],
            ["a"],
            id="all cases together",
        ),
    ],
)
def test_an_audit_removes_or_ends_only_workers_whose_state_is_certain(
    before: dict[WorkerId, Worker],
    found: list[BackendWorker],
    after: dict[WorkerId, Worker],
    orphans: list[str],
    lost: list[str],
    adopted: list[str],
) -> None:
    assert compare(before, found, after) == AuditFindings(
        orphans=tuple(map(WorkerId, orphans)),
        lost=tuple(map(WorkerId, lost)),
        adopted=tuple(map(WorkerId, adopted)),
    )
