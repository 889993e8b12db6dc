"""The benchmarks of scale and of the store: their arithmetic and reports, and one short run of each."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from bench.load.closed_loop import Round
from bench.load.episodes import WrongAnswer
from bench.load.steps import Stepped, read_stream, read_text
from bench.measures import many_containers, scale, store_trips
from bench.measures.scale import Idle
from bench.measures.store_trips import Trips
from bench.reporting.report import Goal, Report
from bench.run import ON_DOCKER, Part
from bench.subjects.catalogs import STEPS, steps_toml, write_catalog
from bench.subjects.redis_server import Counted, redis_server
from bench.subjects.targets import servers
from gateway.catalog.catalog import load_catalog
from gateway.core.ids import EnvironmentName


def goal(report: Report, what: str) -> Goal:
    (found,) = [each for each in report.goals if what in each.what]
    return found


# -- the environment ----------------------------------------------------------------------------------------------


def test_the_gateway_accepts_the_benchmarks_catalog(tmp_path: Path) -> None:
    settings = write_catalog(tmp_path, **{STEPS: steps_toml(STEPS, pool={"slots": 7}), "alone": steps_toml("alone")})

    catalog = load_catalog(Path(settings["GATEWAY_CATALOG_DIR"]))

    assert catalog.named(EnvironmentName(STEPS)).pool.slots == 7
    assert catalog.named(EnvironmentName("alone")).pool.slots == 64


def said(text: str, *, reward: float | None = 1.0, ok: bool = True) -> bytes:
    output = {"blocks": [{"type": "text", "text": text}], "reward": reward, "finished": False}
    return f"event: end\ndata: {json.dumps({'ok': ok, 'output': output})}\n\n".encode()


def test_a_step_contains_the_counts_of_its_worker() -> None:
    assert read_stream(said("token 3 0")) == Stepped("token", 3, 0)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(said("token 3"), id="too few words"),
        pytest.param(said("token three 0"), id="not a number"),
        pytest.param(said("token 3 0", reward=0.0), id="another reward"),
        pytest.param(said("token 3 0", reward=None), id="no reward"),
        pytest.param(said("token 3 0", ok=False), id="a tool that failed"),
        pytest.param(b"event: error\ndata: worker_lost: gone\n\n", id="an error"),
    ],
)
def test_an_invalid_step_result_is_a_wrong_answer(body: bytes) -> None:
    with pytest.raises(WrongAnswer):
        read_stream(body)


def test_a_text_of_four_words_is_refused_as_a_step() -> None:
    with pytest.raises(WrongAnswer):
        read_text("a 1 2 3")


# -- round trips --------------------------------------------------------------------------------------------------


def trips(*, steps: int, idle: Counted, busy: Counted) -> Trips:
    return Trips("ORS", steps, 10.0, idle, busy, Counter())


def test_round_trips_of_an_idle_gateway_do_not_count_for_the_steps() -> None:
    found = trips(steps=100, idle=Counted(10, 40), busy=Counted(30, 90))

    assert (found.reads_a_step, found.commands_a_step) == (0.2, 0.5)


def test_fewer_round_trips_than_an_idle_gateway_count_as_0() -> None:
    assert trips(steps=100, idle=Counted(10, 40), busy=Counted(9, 30)).reads_a_step == 0.0


def test_a_run_without_a_step_meets_no_goal() -> None:
    report = store_trips.make_report([trips(steps=0, idle=Counted(0, 0), busy=Counted(1, 1))], plan=store_trips.QUICK)

    assert not goal(report, "ORS").is_met


# -- scale --------------------------------------------------------------------------------------------------------


def test_sessions_that_end_late_never_or_early_are_reported() -> None:
    idle = Idle(
        opened=5, open_s=1.0, cpu_share={"gateway": 0.02, "its workers": 0.5}, late_s=[-0.1, 0.5, 2.0], early=1, never=1
    )

    report = scale.make_report([Round(1.0, samples_s=[1.0] * 4)], idle, plan=replace(scale.QUICK, at_once=5, idle=6))

    assert goal(report, "ended before their time").value == 1
    assert goal(report, "not opened or never ended").value == 2
    assert goal(report, "behind its time, the last").value == 2.0
    assert not goal(report, "none is due, gateway").is_met
    assert goal(report, "at once, failed").value == 1
    assert report.errors == 1
    assert not [each for each in report.goals if "its workers" in each.what]


def test_a_report_is_made_if_no_session_was_opened() -> None:
    report = scale.make_report([Round(1.0)], Idle(), plan=scale.QUICK)

    assert not goal(report, "at once, failed").is_met
    assert not goal(report, "not opened or never ended").is_met


def test_lines_that_are_still_being_written_are_not_read(tmp_path: Path) -> None:
    for worker, text in (("a", "1 10.5\n2 11.5\n"), ("b", "3 12.5\n4")):
        (tmp_path / worker).mkdir()
        (tmp_path / worker / "ends").write_text(text)

    assert scale._read_ends(tmp_path) == {1: 10.5, 2: 11.5, 3: 12.5}


def test_missing_or_leftover_containers_fail_their_goals() -> None:
    samples = many_containers.Samples(Round(2.0, samples_s=[1.0]), Round(1.0), alive=3, left=1, sdk_s=0.0)

    report = many_containers.make_report(samples, plan=replace(many_containers.QUICK, sessions=4))

    assert not goal(report, "alive at once").is_met
    assert not goal(report, "left after their end").is_met
    assert math.isfinite(goal(report, "÷").value)


# -- short runs ---------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_the_commands_and_reads_of_redis_are_counted(tmp_path: Path) -> None:
    async with servers() as made, redis_server(made.folder) as store:
        before = await store.counted()
        with store.client() as client, client.pipeline(transaction=False) as pipeline:
            for _ in range(200):
                pipeline.get("nothing")
            pipeline.execute()
        after = await store.counted()

    assert after.commands - before.commands >= 200
    assert after.reads - before.reads < 100  # A pipeline is one round trip.


@pytest.mark.redis
async def test_the_steps_of_a_short_run_are_counted() -> None:
    async with servers() as made:
        found = await store_trips.run(made, store_trips.Plan(callers=4, seconds=0.3, pause_s=0.05))

    assert found.errors == 0, found.figures
    assert {each["protocol"] for each in found.figures["trips"]} == {"ORS", "OpenEnv", "AReaL"}
    assert all(each["steps"] > 0 for each in found.figures["trips"])


@pytest.mark.redis
async def test_every_session_of_a_short_run_steps_and_expires() -> None:
    plan = scale.Plan(at_once=8, step_s=0.1, rounds=1, idle=8, idle_s=2, still_s=0.3)

    async with servers() as made:
        found = await scale.run(made, plan)

    assert found.errors == 0, found.figures
    assert goal(found, "not opened or never ended").value == 0
    assert goal(found, "ended before their time").value == 0


@pytest.mark.docker
@pytest.mark.redis
async def test_each_session_of_a_short_run_has_a_container() -> None:
    async with servers(Path("/dev/shm")) as made:
        found = await many_containers.run(made, many_containers.Plan(sessions=2, by_sdk=1))

    assert found.errors == 0, found.figures
    assert found.figures["containers_alive"] == 2
    assert goal(found, "left after their end").value == 0


def test_the_parts_can_be_chosen() -> None:
    assert {Part.STORE, Part.SCALE, Part.MANY_CONTAINERS} <= set(Part)
    assert Part.MANY_CONTAINERS in ON_DOCKER
