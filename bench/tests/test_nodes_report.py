"""The benchmark of many machines: its reports from invented samples, and its settings."""

from __future__ import annotations

import asyncio
import re
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from bench.load.closed_loop import Round
from bench.measures import nodes
from bench.measures.nodes import QUICK, Plan
from bench.measures.nodes_report import GATEWAY, NODES, WORKERS, Exclusive, Way, make_report, unevenness
from bench.reporting.grid import rotated
from bench.reporting.report import Goal, Report
from bench.reporting.results import results, show, write
from bench.run import Part, by_default
from bench.subjects.catalogs import STEPS, write_catalog
from bench.subjects.clusters import added_usage
from bench.subjects.lab import Lab, NodeSettings, node_variables, processes_of
from bench.subjects.processes import StartError, Usage
from bench.subjects.targets import BENCH
from gateway.catalog.catalog import load_catalog
from gateway.core.ids import EnvironmentName
from gateway.settings import unknown_variables

PLAN = asdict(replace(QUICK, callers=4, exclusive=6))


def goal(report: Report, what: str) -> Goal:
    (found,) = [each for each in report.goals if what in each.what]
    return found


def way(machines: int, *, steps: int, cpu_s: float, opened_s: float, containers: dict[str, int]) -> Way:
    """Return one round of each kind, with *steps* a second and *cpu_s* of all parts for them."""
    found = Way(machines, opens=[Round(0.1, samples_s=[0.1] * 4)], sessions=dict.fromkeys(containers, 2))
    parts = {GATEWAY: cpu_s / 2, WORKERS: cpu_s / 4, NODES: cpu_s / 4}
    before = {part: Usage(1.0, 0) for part in parts}
    after = {part: Usage(1.0 + used_s, 0) for part, used_s in parts.items()}
    found.steps.add(Round(1.0, samples_s=[0.01] * steps, generator_cpu_s=9.0), before, after)
    opened = Round(opened_s, samples_s=[opened_s] * sum(containers.values()))
    found.exclusive = [Exclusive(opened, containers=containers, gone_s=0.5)]
    return found


def ways() -> list[Way]:
    return [
        way(0, steps=2_000, cpu_s=2.0, opened_s=1.0, containers={"this one": 6}),
        way(1, steps=1_000, cpu_s=1.5, opened_s=2.0, containers={"node1": 6}),
        way(2, steps=500, cpu_s=1.0, opened_s=3.0, containers={"node1": 4, "node2": 2}),
    ]


# -- reports ------------------------------------------------------------------------------------------------------


def test_each_setup_is_reported_relative_to_the_local_one_and_starts_relative_to_one_node() -> None:
    report = make_report(ways(), 7.0, plan=PLAN)

    assert goal(report, "steps/s, 2 nodes ÷ local").value == pytest.approx(0.25)
    assert goal(report, "CPU time of a step, 1 node ÷ local").value == pytest.approx(1.5)
    assert goal(report, "CPU time of a step, 2 nodes ÷ local").value == pytest.approx(2.0)
    assert goal(report, "opens/s, 1 node ÷ local").value == pytest.approx(1.0)
    assert goal(report, "containers/s, 1 node ÷ local").value == pytest.approx(0.5)
    assert goal(report, "containers/s, 2 nodes ÷ 1 node").value == pytest.approx(2 / 3)
    assert goal(report, "until all machines have an image").value == 7.0


def test_the_load_generators_own_time_does_not_count_as_a_cost_of_a_step() -> None:
    (found, *_) = ways()

    assert found.cpu_s_per_1000 == pytest.approx(1.0)


def test_machines_with_more_than_their_share_are_reported() -> None:
    report = make_report(ways(), 7.0, plan=PLAN)

    assert goal(report, "shared sessions on the fullest of 2 nodes").value == pytest.approx(1.0)
    assert goal(report, "containers on the fullest of 2 nodes").value == pytest.approx(4 / 3)
    assert not [each for each in report.goals if "fullest of 1 node" in each.what]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        pytest.param({"a": 8, "b": 8, "c": 8}, 1.0, id="even"),
        pytest.param({"a": 24, "b": 0, "c": 0}, 3.0, id="all on one machine"),
        pytest.param({"a": 0, "b": 0}, 0.0, id="no sessions"),
        pytest.param({}, 0.0, id="no machines"),
    ],
)
def test_an_even_share_is_one(counts: dict[str, int], expected: float) -> None:
    assert unevenness(counts) == pytest.approx(expected)


def test_errors_of_openings_steps_and_ends_are_all_counted() -> None:
    local, one, two = ways()
    local.opens[0].errors["a"] = 1
    one.steps.rounds[0].errors["b"] = 2
    two.errors = Counter(c=3)
    two.exclusive[0].opened.errors["d"] = 4

    report = make_report([local, one, two], 7.0, plan=PLAN)

    assert report.errors == 10
    assert not goal(report, "failed opens, steps and ends").is_met


def test_missing_or_leftover_containers_fail_their_goals() -> None:
    local, one, two = ways()
    two.exclusive.append(Exclusive(Round(1.0, samples_s=[1.0] * 5), containers={"node1": 3, "node2": 2}, left=1))

    report = make_report([local, one, two], 7.0, plan=PLAN)

    assert goal(report, "1 node: containers alive").is_met
    assert not goal(report, "2 nodes: containers alive").is_met
    assert not goal(report, "left after their end").is_met


def test_a_report_without_any_success_is_made_shown_and_written(tmp_path: Path) -> None:
    report = make_report([Way(0), Way(1), Way(2)], 7.0, plan=PLAN)

    found = results([report], {"machine": {}, "versions": {}})
    write(found, tmp_path / "found.json")
    show(found, console := Console(record=True, width=200, file=(tmp_path / "shown").open("w")))
    console.file.close()

    assert not goal(report, "1 node: containers alive").is_met
    assert "2 nodes" in console.export_text()


# -- parts, environments and settings ---------------------------------------------------------------------------


@pytest.mark.parametrize("docker", [False, True])
def test_machines_are_not_started_by_default(docker: bool) -> None:
    chosen = by_default(docker=docker)

    assert Part.NODES not in chosen
    assert Part.CALLS in chosen
    assert (Part.MANY_CONTAINERS in chosen) is docker


def test_each_setup_has_its_turn_and_each_round_starts_with_another_setup() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [[*"abc"], [*"bca"], [*"cab"], [*"abc"]]


@pytest.mark.parametrize("plan", [pytest.param(Plan(), id="full"), pytest.param(QUICK, id="quick")])
def test_the_gateway_accepts_the_benchmarks_environments_and_they_have_room_for_all_callers(
    plan: Plan, tmp_path: Path
) -> None:
    settings = write_catalog(tmp_path, **nodes.environments(plan))

    catalog = load_catalog(Path(settings["GATEWAY_CATALOG_DIR"]))

    shared = catalog.named(EnvironmentName(STEPS)).pool
    others = [environment.pool for environment in catalog if environment.name != STEPS]
    assert shared.min_workers == shared.max_workers == plan.workers
    assert shared.slots * plan.workers >= 2 * plan.callers
    assert len(others) == plan.exclusive_rounds
    assert {(pool.min_workers, pool.max_workers) for pool in others} == {(0, plan.exclusive)}


def test_a_node_has_the_variables_of_the_swarm_stack() -> None:
    stack = (BENCH.parent / "deploy" / "swarm" / "stack.yaml").read_text()
    service = yaml.safe_load(re.sub(r"\$\{[A-Z_]+:-([^}]*)\}", r"\1", stack))["services"]["node"]["environment"]
    made = node_variables(
        NodeSettings(
            instance=service["GATEWAY_INSTANCE"],  # A template. Swarm replaces it with the stack's name.
            port=7443,
            image="an image",
            catalog=Path("/somewhere"),
            environments="steps,alone",
            certificates=Path("/elsewhere"),
        )
    )

    ours = {"GATEWAY_CATALOG_DIR", "GATEWAY_ENVIRONMENTS", "GATEWAY_DEFAULT_ENVIRONMENT"}
    defaults = {"GATEWAY_DRAIN_NOTICE_S", "GATEWAY_NODE_DRAIN_S", "GATEWAY_NODE_MAX_CONTAINERS", "GATEWAY_ENVIRONMENTS"}
    assert unknown_variables(made) == []
    assert {name: value for name, value in made.items() if name not in ours} == {
        name: value for name, value in service.items() if name not in defaults
    }


# -- machines -----------------------------------------------------------------------------------------------------


async def test_a_failed_command_of_the_script_reports_the_reason() -> None:
    lab = Lab("much-too-long", "198.18.99", 1)

    with pytest.raises(StartError, match="at most 6 lower-case letters"):
        await lab.run("up")


def test_a_container_without_a_local_process_is_reported() -> None:
    with pytest.raises(StartError, match="no process of the containers ffffffffffff"):
        processes_of(["f" * 64])


async def test_the_usage_of_an_ended_process_is_an_error_and_not_zero() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()

    with pytest.raises(StartError, match="has ended"):
        added_usage([process.pid])
