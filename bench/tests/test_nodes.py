"""The benchmark of many machines, on the fewest machines: a whole run, and the removal of labs in any case."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import docker
import pytest

from bench.measures.nodes import Plan, run
from bench.measures.nodes_report import NODES, PARTS
from bench.subjects import lab as bench_lab
from bench.subjects.clusters import HERE
from bench.subjects.processes import StartError
from bench.subjects.targets import servers
from gateway.backends.docker.container import LABEL_INSTANCE
from tests.contract.backend_world import ENGINE_URL
from tests.docker.swarm_lab import Lab, expect_namespaces, left_of, own_lab
from tests.fakes.eventually import eventually

pytestmark = [
    pytest.mark.docker,
    pytest.mark.cluster,
    pytest.mark.redis,
    pytest.mark.needs("image:gateway", "image:redis"),
]
pytest_plugins = ["tests.contract.backend_fixtures"]

PLAN = Plan(
    engine=ENGINE_URL,
    machines=2,
    callers=8,
    workers=2,
    rest_s=1.0,
    rounds=1,
    bursts=2,
    steps_s=1.0,
    exclusive=2,
    exclusive_rounds=1,
)
WITHIN_S = 60.0


@pytest.fixture
def lab(docker_engine: docker.APIClient) -> Iterator[Lab]:
    """Yield a lab with a unique name. Remove all of it in any case."""
    expect_namespaces()
    with own_lab(nodes=PLAN.machines) as lab:
        yield lab


def plan_for(lab: Lab) -> Plan:
    return replace(PLAN, lab_name=lab.name, lab_net=lab.net)


@pytest.fixture
def images(docker_engine: docker.APIClient) -> None:
    """Check that the engine has the images that the run needs."""
    for name in (PLAN.base_image, PLAN.gateway_image):
        assert docker_engine.images(name, quiet=True), f"no image {name}: scripts/build-images base gateway"


async def test_each_setup_of_a_short_run_opens_steps_and_starts_containers_on_all_machines(
    docker_engine: docker.APIClient, images: None, lab: Lab, instance: str
) -> None:
    async with servers(Path("/dev/shm")) as made:
        report = await run(made, plan_for(lab), instance=instance, lock=lab.lock)

    assert report.errors == 0, report.figures
    assert [goal.what for goal in report.goals if goal.is_goal and not goal.is_met] == []
    for name, machines in (("local", [HERE]), ("1 node", ["node1"]), ("2 nodes", ["node1", "node2"])):
        way = report.figures[name]
        assert way["sessions_by_machine"] == {machine: 8 // len(machines) for machine in machines}
        assert [each["containers_by_machine"] for each in way["exclusive"]] == [
            {machine: 2 // len(machines) for machine in machines}
        ]
        assert way["steps"]["per_s_by_round"][0] > 0
        measured = {part for part in PARTS if part != NODES or name != "local"}
        assert way["steps"]["cpu_s_per_1000"].keys() >= measured
        assert way["rss_mib"].keys() == way["cpu_share_at_rest"].keys() == measured
    assert json.loads(json.dumps(report.figures))["plan"]["machines"] == 2
    assert left_of(lab) == []
    assert docker_engine.containers(all=True, filters={"label": f"{LABEL_INSTANCE}={instance}-0"}) == []


async def test_a_lab_that_is_cancelled_during_its_start_is_removed(lab: Lab) -> None:
    async def use() -> None:
        async with bench_lab.running_lab(bench_lab.Lab(lab.name, lab.net, 1, lab.lock)):
            await asyncio.Event().wait()

    using = asyncio.create_task(use())

    async def comes_up() -> None:
        assert not using.done()
        assert (lab.directory / "node1").exists()

    await eventually(comes_up)
    using.cancel()
    with pytest.raises(asyncio.CancelledError):
        await using

    assert left_of(lab) == []


async def test_a_lab_of_another_process_is_left_alone(lab: Lab) -> None:
    lab.directory.mkdir()
    mine = lab.directory / "mine"
    mine.touch()

    with pytest.raises(StartError, match=f"the lab {lab.name} belongs to process {os.getpid()} of "):
        async with bench_lab.running_lab(bench_lab.Lab(lab.name, lab.net, 1)):
            pass

    assert mine.exists()


async def test_no_machine_is_started_if_the_gateways_image_is_missing(images: None, lab: Lab) -> None:
    lacking = replace(plan_for(lab), gateway_image="env-gateway-tests/nothing:latest")

    async with servers(Path("/dev/shm")) as made:
        with pytest.raises(StartError, match="scripts/build-images gateway"):
            await run(made, lacking, lock=lab.lock)

    assert left_of(lab) == []
