"""The choice of the machine for the next worker, as tables of numbers."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.errors import BackendError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import Need, NodeId, NodeReport
from gateway.core.scaling import place

GIB = 2**30
MATH, OS = EnvironmentName("math"), EnvironmentName("os")
A, B = NodeId("a"), NodeId("b")
IMAGE = {"env-gateway/math": "sha256:1"}
NEED = Need(environment=MATH, memory_bytes=GIB, cpus=1.0, images=IMAGE)
TAKES = {MATH: NEED, OS: Need(environment=OS, memory_bytes=4 * GIB, cpus=2.0)}


def node(id: str = "a", *, math: int = 0, os: int = 0, **more: Any) -> NodeReport:
    names = [*[MATH] * math, *[OS] * os]
    given: dict[str, Any] = {
        "cpus": 8.0,
        "memory_bytes": 16 * GIB,
        "available_bytes": 12 * GIB,
        "max_containers": 100,
        "containers": len(names),
        "images": IMAGE,
    }
    workers = {WorkerId(f"{id}-{number}"): name for number, name in enumerate(names)}
    return NodeReport(id=NodeId(id), name=f"machine-{id}", workers=workers, **(given | more))


@pytest.mark.parametrize(
    ("one", "other", "chosen"),
    [
        pytest.param(node("a"), node("b"), A, id="the first id of equal machines"),
        pytest.param(node("a", is_draining=True), node("b", math=9), B, id="a draining machine takes none"),
        pytest.param(node("a", images={}), node("b", math=9), B, id="a machine with the image comes first"),
        pytest.param(
            node("a", images={"env-gateway/math": "sha256:2"}),
            node("b", math=9),
            B,
            id="an image with another id does not count",
        ),
        pytest.param(node("a", math=2), node("b", math=1), B, id="the machine with fewer workers of the environment"),
        pytest.param(node("a", os=3), node("b", math=1), A, id="workers of other environments count less"),
        pytest.param(node("a", os=1), node("b"), B, id="the machine with more free resources"),
        pytest.param(
            node("a", memory_bytes=14 * GIB, os=1),
            node("b", memory_bytes=64 * GIB, os=1),
            B,
            id="free resources count in proportion",
        ),
        pytest.param(node("a", cpus=4, os=1), node("b", cpus=16, os=1), B, id="CPUs count as memory does"),
        pytest.param(
            node("a", containers=100), node("b", math=9), B, id="a machine at its limit of containers is full"
        ),
        pytest.param(
            node("a", available_bytes=GIB - 1), node("b", math=9), B, id="a machine without free memory is full"
        ),
        pytest.param(node("a", available_bytes=0), node("b", math=9), A, id="unknown free memory counts as enough"),
        pytest.param(node("a", os=16), node("b", math=9), B, id="at most four times the memory is promised"),
        pytest.param(node("a", cpus=0.5), node("b", math=9), B, id="a worker's CPUs must exist"),
    ],
)
def test_the_better_of_two_machines_is_chosen(one: NodeReport, other: NodeReport, chosen: NodeId) -> None:
    assert place([one, other], NEED, takes=TAKES) == chosen
    assert place([other, one], NEED, takes=TAKES) == chosen


@pytest.mark.parametrize(
    ("only", "says"),
    [
        pytest.param(node(is_draining=True), "machine-a: it drains", id="draining"),
        pytest.param(
            node(containers=99, max_containers=99), "99 of 99 containers, and 1 more are needed", id="containers"
        ),
        pytest.param(
            node(available_bytes=GIB // 2), "0.5 GiB of memory available, and 1.0 GiB are needed", id="available memory"
        ),
        pytest.param(
            node(os=16), "64.0 GiB of memory promised to workers of at most 64.0 GiB, and 1.0 GiB are", id="promises"
        ),
        pytest.param(
            node(memory_bytes=GIB // 2), "0.5 GiB of memory, and 1.0 GiB are needed", id="more than the whole memory"
        ),
        pytest.param(node(cpus=0.5), "0.5 CPUs, and 1 are needed", id="CPUs"),
    ],
)
def test_a_machine_without_room_gets_no_worker_and_the_reason_is_stated(only: NodeReport, says: str) -> None:
    with pytest.raises(BackendError, match=re.escape(says)):
        place([only], NEED, takes=TAKES)


def test_without_machines_nothing_is_placed() -> None:
    with pytest.raises(BackendError, match="no node takes a worker of math: none answers"):
        place([], NEED)


def test_the_reason_of_each_machine_is_stated() -> None:
    with pytest.raises(BackendError, match="no node takes a worker of math: machine-a: it drains; machine-b: "):
        place([node("a", is_draining=True), node("b", available_bytes=1)], NEED)


def test_starting_workers_count_as_existing_workers() -> None:
    begun = {A: [NEED, NEED]}

    assert place([node("a"), node("b", math=1)], NEED, starting=begun, takes=TAKES) == B
    for full in (node("a", available_bytes=3 * GIB - 1), node("a", max_containers=2)):
        with pytest.raises(BackendError):
            place([full], NEED, starting=begun, takes=TAKES)


def test_a_burst_is_spread_evenly() -> None:
    reports = [node("a"), node("b"), node("c")]
    begun: dict[NodeId, list[Need]] = {}

    for _ in range(30):
        chosen = place(reports, NEED, starting=begun, takes=TAKES)
        begun.setdefault(chosen, []).append(NEED)

    assert {id: len(needs) for id, needs in begun.items()} == {"a": 10, "b": 10, "c": 10}


def test_a_worker_of_two_containers_needs_room_for_both() -> None:
    pair = replace(NEED, containers=2)

    assert place([node(containers=98)], pair) == A
    with pytest.raises(BackendError, match="99 of 100 containers, and 2 more are needed"):
        place([node(containers=99)], pair)


def test_an_image_with_an_unknown_id_may_be_any_image_of_that_name() -> None:
    anyone = replace(NEED, images={"env-gateway/math": ""})

    assert place([node("a", images={}), node("b", math=5)], anyone) == B
