"""The benchmarks of sandboxes and of AReaL episodes: their readers and reports, and one short run of each."""

import asyncio
import json
import math
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.load.boxes import Taken, check_output, heavy_tasks, light_task, opened_at_once
from bench.load.closed_loop import KINDS_MAX, Round
from bench.load.episodes import WrongAnswer
from bench.load.http1 import Address
from bench.measures import areal, sandboxes
from bench.measures.areal import CALLERS
from bench.measures.cold import ENGINE
from bench.measures.footprint import Held
from bench.measures.opens import Bursts
from bench.measures.sandboxes_report import (
    CONTAINERS,
    LIBRARY,
    OS_SERVER,
    PROCESSES,
    SDK,
    HeldBoxes,
    Plan,
    Samples,
    Way,
    make_report,
)
from bench.reporting.grid import Cell
from bench.reporting.report import Goal, Report
from bench.run import Part, plan_of
from bench.subjects import containers
from bench.subjects.processes import StartError, Usage, descendants, pss_bytes
from bench.subjects.targets import servers
from tests.fakes.user import need_other_users

# -- answers of a session -----------------------------------------------------------------------------------------


def stream(result: object) -> bytes:
    return f"event: end\ndata: {json.dumps(result)}\n\n".encode()


def said(text: str, *, finished: bool = False) -> bytes:
    return stream({"ok": True, "output": {"blocks": [{"type": "text", "text": text}], "finished": finished}})


def test_an_output_with_the_commands_token_passes() -> None:
    check_output(said("The output of the OS:\ntoken"), "token")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(said("The output of the OS:\nother"), id="another token"),
        pytest.param(said("The output of the OS:\ntoken", finished=True), id="the session has ended"),
        pytest.param(said("The output of the OS:\ntoken\n[the shell has ended]"), id="a notice after the token"),
        pytest.param(stream({"ok": False, "error": "token"}), id="a refusal"),
        pytest.param(stream({"ok": True, "output": {"blocks": [], "finished": False}}), id="no block"),
        pytest.param(b"event: error\ndata: token\n\n", id="an error"),
        pytest.param(b"", id="no stream"),
    ],
)
def test_any_other_answer_to_a_command_does_not_pass(body: bytes) -> None:
    with pytest.raises(WrongAnswer, match="call"):
        check_output(body, "token")


def test_the_times_of_a_session_add_up() -> None:
    taken = Taken(open_s=0.01, command_s=0.005, close_s=0.1)

    assert taken.first_output_s == pytest.approx(0.015)
    assert taken.whole_s == pytest.approx(0.115)


def test_light_tasks_share_their_preparation_and_heavy_ones_do_not() -> None:
    first, second = heavy_tasks("a"), heavy_tasks("b")

    made = [first(), first(), second(), second()]

    assert light_task() == light_task()
    assert len({json.dumps(task["config"]) for task in made}) == 4


async def test_openings_that_fail_are_counted_once_each() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        found = await opened_at_once(Address(port=server.sockets[0].getsockname()[1]), [light_task()] * 3)

    assert (found.samples_s, sum(found.errors.values())) == ([], 3)


def test_errors_that_differ_by_an_id_are_one_kind_and_kinds_are_bounded() -> None:
    became = Round(1.0)

    for number in range(KINDS_MAX + 5):
        became.add_error(WrongAnswer(f"no session 00000000-0000-4000-8000-{number:012x}"))
    for number in range(KINDS_MAX + 5):
        became.add_error(WrongAnswer(f"kind {number}"))

    assert became.errors["WrongAnswer: no session <id>"] == KINDS_MAX + 5
    assert became.errors["others"] == 6
    assert len(became.errors) == KINDS_MAX + 1


# -- processes ----------------------------------------------------------------------------------------------------


async def test_descendants_are_found_at_any_depth_and_have_memory_until_they_end() -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", child, stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    await process.stdout.readline()

    (grandchild,) = descendants(process.pid)
    shares = pss_bytes(process.pid), pss_bytes(grandchild)
    await process.communicate(b"\n")

    assert min(shares) > 0
    assert (list(descendants(process.pid)), pss_bytes(process.pid)) == ([], 0)


@pytest.mark.parametrize(
    "stats",
    [
        pytest.param({"usage": 100, "stats": {"inactive_file": 30}}, id="control groups version 2"),
        pytest.param(
            {"usage": 100, "stats": {"total_inactive_file": 30, "inactive_file": 7}}, id="control groups version 1"
        ),
        pytest.param({"usage": 70}, id="no details"),
    ],
)
def test_inactive_file_pages_do_not_count_as_memory(stats: dict[str, object]) -> None:
    assert containers.charged_bytes({"memory_stats": stats}) == 70


@pytest.mark.docker
def test_a_missing_image_is_reported_before_the_run_waits_for_it() -> None:
    with (
        containers.containers(ENGINE, "env-gateway/no-such-image", "bench-test") as made,
        pytest.raises(StartError, match="scripts/build-images"),
    ):
        made.check_image()


# -- the report on sandboxes --------------------------------------------------------------------------------------


def cell(*rates: float) -> Cell:
    found = Cell()
    for rate in rates:
        found.add(Round(1.0, samples_s=[1 / rate] * int(rate)), {}, {})
    return found


def bursts(*last_s: float, errors: int = 0) -> Bursts:
    found = Bursts()
    for each in last_s:
        found.add(Round(each, samples_s=[each / 2, each]))
    if errors:
        found.errors["WrongAnswer: status 500"] = errors
    return found


def goal(found: Report, words: str) -> Goal:
    (one,) = [goal for goal in found.goals if words in goal.what]
    return one


def both() -> Samples:
    samples = Samples()
    for name, milliseconds in ((LIBRARY, 5), (OS_SERVER, 9), (PROCESSES, 10), (CONTAINERS, 20), (SDK, 300)):
        samples.in_turn[name] = [Taken(milliseconds / 2e3, milliseconds / 2e3, 0.001)] * 3
    samples.sustained = {
        PROCESSES: {4: cell(80), 8: cell(120, 100, 140)},
        CONTAINERS: {4: cell(90), 8: cell(60)},
        SDK: {4: cell(5), 8: cell(6)},
    }
    for name in (PROCESSES, CONTAINERS):
        samples.groups_s[name] = samples.groups_s[name] | {Way.KEPT: [0.1], Way.ONCE: [0.5, 0.7], Way.EACH: [3.0]}
    samples.bursts[PROCESSES] = {64: bursts(1.0), 256: bursts(4.0, 4.5, 6.0)}
    samples.bursts[CONTAINERS] = {64: bursts(1.0), 256: bursts(7.0, errors=2)}
    samples.held = [HeldBoxes(CONTAINERS, "control group", 16, 3.0)]
    return samples


def test_the_goals_of_sandboxes_are_reported_for_each_kind_of_worker() -> None:
    found = make_report(both(), plan=Plan(docker=True))

    values = {goal.what: (goal.value, goal.is_met) for goal in found.goals if goal.is_goal}
    assert values == {
        f"open to first command's output ({PROCESSES}), p50": (pytest.approx(10.0), True),
        f"open to first command's output ({CONTAINERS}), p50": (pytest.approx(20.0), False),
        f"sessions/s, each with a first command, c=8 ({PROCESSES})": (120.0, True),
        f"sessions/s, each with a first command, c=4 ({CONTAINERS})": (90.0, False),
        f"failures of bursts of 64 and 256 creates ({PROCESSES})": (0, True),
        f"failures of bursts of 64 and 256 creates ({CONTAINERS})": (2, False),
        f"last prompt of a burst of 256 creates of one task, sandbox ({PROCESSES})": (4.5, True),
        f"last prompt of a burst of 256 creates of one task, sandbox ({CONTAINERS})": (7.0, False),
    }
    assert found.errors == 2


def test_sandboxes_are_compared_with_containers_and_with_the_library() -> None:
    found = make_report(both(), plan=Plan(docker=True))

    assert goal(found, f"a container's ÷ open to first command's output ({CONTAINERS})").value == pytest.approx(15.0)
    assert goal(found, f"({PROCESSES}) ÷ the library alone").value == pytest.approx(2.0)
    assert goal(found, f"c=8 ({PROCESSES}) ÷ containers at best").value == pytest.approx(20.0)
    assert goal(found, f"prepared by each ÷ once ({CONTAINERS})").value == pytest.approx(5.0)


def test_cpu_time_is_reported_for_whole_sessions_and_only_if_it_was_counted() -> None:
    samples = both()
    counted = Cell()
    counted.add(
        Round(1.0, samples_s=[0.1] * 50, generator_cpu_s=0.1),
        {"gateway": Usage(1.0, 0), "workers": Usage(5.0, 0)},
        {"gateway": Usage(1.2, 0), "workers": Usage(6.0, 0)},
    )
    samples.sustained = {PROCESSES: {4: cell(80)}, CONTAINERS: {4: counted}}

    found = make_report(samples, plan=Plan(docker=True, callers=(4,)))

    (table,) = [table for table in found.tables if table.title.startswith("CPU ms")]
    assert [list(row) for row in table.rows][1:] == [
        [f"{CONTAINERS}: gateway", "4.00"],
        [f"{CONTAINERS}: workers", "20.0"],
        [f"{CONTAINERS}: generator", "2.00"],
    ]


def test_a_subject_that_was_not_measured_has_no_goal_and_no_row_but_a_sentence() -> None:
    samples = both()
    for found_by in (samples.in_turn, samples.sustained, samples.groups_s, samples.bursts):
        for name in (CONTAINERS, SDK):
            found_by.pop(name, None)
    samples.held.clear()
    samples.missing.append("No memory.")

    found = make_report(samples, plan=Plan())

    told = [row[0] for table in found.tables for row in table.rows] + [goal.what for goal in found.goals]
    assert not [words for words in told if CONTAINERS in words or SDK in words]
    assert "No memory." in found.not_comparable


def test_a_machine_without_sandboxes_has_an_empty_report() -> None:
    found = make_report(Samples(missing=["No sandboxes: install bubblewrap."]), plan=Plan())

    assert (list(found.goals), list(found.tables), found.errors) == ([], [], 0)
    assert found.not_comparable == ["No sandboxes: install bubblewrap."]


def test_each_row_of_each_table_has_as_many_cells_as_the_header() -> None:
    reports = [make_report(both(), plan=Plan(callers=(4, 8))), areal.make_report(held(), plan=areal.Plan(episodes=2))]

    widths = {len(row) - len(table.columns) for found in reports for table in found.tables for row in table.rows}
    assert widths == {0}


def test_sandboxes_use_an_engine_only_with_docker() -> None:
    plans = [plan_of(Part.SANDBOXES, quick=True, docker=docker, engine="unix:///x") for docker in (False, True)]

    assert [(each.docker, each.engine) for each in plans] == [(False, "unix:///x"), (True, "unix:///x")]


@pytest.mark.parametrize("part", list(Part))
def test_each_part_has_different_short_and_full_plans(part: Part) -> None:
    quick, full = (
        plan_of(part, quick=quick, docker=True, engine="unix:///x", base_image="b") for quick in (True, False)
    )

    assert type(quick) is type(full)
    assert quick != full


# -- the report on AReaL episodes ---------------------------------------------------------------------------------


def held() -> areal.Samples:
    samples = areal.Samples(active=2, bursts=bursts(0.2, 0.3, 0.9))
    samples.acts = {"start, c=1": Round(1.0, samples_s=[0.001, 0.002, 0.003]), "step, c=1": Round(1.0)}
    samples.held = [Held("gateway", 2, 3.0), Held("its workers", 2, 9.0)]
    return samples


def test_areal_goals_require_that_no_episode_is_lost_and_a_burst_is_quick() -> None:
    samples = held()
    samples.active = 1
    samples.acts["step, c=1"].errors = Counter({"WrongAnswer: status 404": 3})

    found = areal.make_report(samples, plan=areal.Plan(episodes=2))

    assert [(goal.id, goal.value, goal.is_met) for goal in found.goals] == [
        ("S13", 1, False),
        ("S13", 3, False),
        ("S9", 0, True),
        ("S11", 3.0, True),
        ("S9", 0.3, True),
    ]
    assert found.errors == 3


def test_percentiles_of_areal_requests_are_reported_only_if_there_are_samples() -> None:
    found = areal.make_report(held(), plan=areal.Plan(episodes=2))

    assert found.figures["acts"]["start, c=1"]["latency"]["p95_ms"] == pytest.approx(3.0)
    assert found.figures["acts"]["step, c=1"]["latency"] is None
    assert found.tables[0].rows[1] == ["step, c=1", "0.000", "-", "-", "-", "0"]


# -- short runs ---------------------------------------------------------------------------------------------------

SHORT = Plan(
    docker=True,
    rounds=1,
    opens=2,
    sdk_opens=1,
    callers=(2,),
    sustain_s=0.0,
    sustain_rounds=1,
    group=2,
    groups=1,
    bursts=(4,),
    burst_rounds=1,
    held=2,
)


@pytest.mark.sandbox
@pytest.mark.docker
@pytest.mark.needs("image:os")
async def test_every_sandbox_of_a_short_run_opens_in_processes_and_in_containers() -> None:
    need_other_users()

    async with servers(Path("/dev/shm")) as made:
        found = await sandboxes.run(made, SHORT)

    gateways = {PROCESSES, CONTAINERS}
    assert found.errors == 0, json.dumps(found.figures, default=str)  # a text is shown whole, with the kinds of errors
    assert found.figures["missing"] == []
    assert set(found.figures["in_turn_ms"]) == {LIBRARY, OS_SERVER, SDK} | gateways
    assert set(found.figures["bursts"]) == set(found.figures["groups_last_prompt_ms"]) == gateways
    assert {each["subject"] for each in found.figures["idle_sessions"]} == gateways
    assert all(math.isfinite(goal.value) for goal in found.goals)


async def test_every_areal_episode_of_a_short_run_is_held() -> None:
    async with servers() as made:
        found = await areal.run(made, areal.Plan(episodes=16, idle_s=0.0, alone=2, burst=8, bursts=1))

    assert found.errors == 0, found.figures
    assert found.figures["active_after_idle"] == 16
    assert found.figures["acts"][f"cancel, c={CALLERS}"]["latency"]["count"] == 16
