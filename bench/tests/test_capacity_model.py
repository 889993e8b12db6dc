"""The model of what a cluster must have: its arithmetic, that more is never less, and runs that it must foretell.

The back test reads ``data/capacity.json``: of one run's results what the model is given, and what it is held against.
What is foretold is never read from where the model has its inputs; how far off it may be stands beside each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity import model as model
from bench.capacity.figures import KIB, MIB, PROTOCOLS, SOURCES, Figures, names, read_figures
from bench.capacity.inputs import Cluster, Workload
from bench.capacity.report import BEGIN, END, LEVERS, PAGE, Lever, cases, main, markdown, page, tables

FIXTURE = Path(__file__).parent / "data" / "capacity.json"
DATA: dict[str, Any] = json.loads(FIXTURE.read_text())
MEASURED: dict[str, Any] = DATA["figures"]
FIGURES = read_figures(DATA)
ALONE = Cluster(machines=1, cores=2, memory_bytes=24 * 2**30, replicas=1, is_remote=False)
"""What the runs were made on."""
MORE = "twice as many replicas"
RESTLESS = "without the pause between two turns"
FREE = replace(
    FIGURES,
    step_cpu_s=dict.fromkeys(PROTOCOLS, 0.0),
    **dict.fromkeys((name for name in names() if name != "step_cpu_s"), 0.0),
)
"""Nothing costs anything: a test says what does."""


def used(name: str, figures: Figures, work: Workload, cluster: Cluster) -> model.Use:
    (found,) = [use for use in model.uses(figures, work, cluster) if use.name == name]
    return found


# -- inputs -------------------------------------------------------------------------------------------------------


def test_each_input_says_where_it_comes_from() -> None:
    assert list(SOURCES) == names()


def test_the_last_results_have_all_that_is_read_by_name() -> None:
    found = read_figures(DATA)

    assert all(value > 0 for name in names() if name != "step_cpu_s" for value in [getattr(found, name)])
    assert all(value > 0 for value in found.step_cpu_s.values())


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda found: found["figures"].pop("areal"), "areal", id="a part is missing"),
        pytest.param(lambda found: found["figures"]["scale"]["idle"].pop("cpu_share_of_none"), "cpu_share", id="a row"),
        pytest.param(lambda found: found["figures"]["footprint"]["idle_sessions"].clear(), "'gateway'", id="a process"),
        pytest.param(lambda found: found["figures"]["many_containers"].update(sdk_s=0), "sdk_s", id="a time of zero"),
    ],
)
def test_results_that_lack_an_input_are_refused_by_its_name(spoil: Callable[[Any], object], named: str) -> None:
    found = json.loads(json.dumps(DATA))
    spoil(found)

    with pytest.raises(ValueError, match=named):
        read_figures(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("sessions", 0, id="no session"),
        pytest.param("period_s", math.nan, id="no number"),
        pytest.param("steps", math.inf, id="endless"),
        pytest.param("sandbox", 1.5, id="more than all"),
        pytest.param("wandering", -0.1, id="less than none"),
        pytest.param("step_cpu_s", -1.0, id="negative"),
        pytest.param("protocol", "smtp", id="unknown"),
    ],
)
def test_a_workload_that_cannot_be_is_refused_by_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Workload(**{"sessions": 100.0, field: value})


def test_shares_that_are_more_than_all_sessions_are_refused() -> None:
    with pytest.raises(ValueError, match="sandbox, exclusive"):
        Workload(sessions=1, sandbox=0.6, exclusive=0.6)


@pytest.mark.parametrize("field", ["machines", "cores", "memory_bytes", "replicas", "starts_at_once"])
def test_a_cluster_without_something_is_refused_by_its_field(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        replace(Cluster(), **{field: 0})  # type: ignore[arg-type]  # the one that is a bool is not among them


# -- arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("work", "steps_s", "ends_s", "containers"),
    [
        pytest.param(Workload(sessions=640, warm=0), 128, 6.4, 10, id="shared, 64 in a worker"),
        pytest.param(Workload(sessions=640, warm=0.1), 128, 6.4, 11, id="and a tenth kept free"),
        pytest.param(Workload(sessions=160, sandbox=1, warm=0), 32, 1.6, 10, id="sandboxes, 16 in a worker"),
        pytest.param(Workload(sessions=100, exclusive=1, warm=0), 20, 1, 100, id="a container each"),
        pytest.param(Workload(sessions=100, period_s=1, steps=4, shared_slots=1, warm=0), 100, 25, 100, id="faster"),
        pytest.param(
            Workload(sessions=640, sandbox=0.5, exclusive=0.25, warm=0), 128, 6.4, 2.5 + 20 + 160, id="of each some"
        ),
    ],
)
def test_the_pace_of_a_workload(work: Workload, steps_s: float, ends_s: float, containers: float) -> None:
    assert work.steps_s == pytest.approx(steps_s)
    assert work.ends_s == pytest.approx(ends_s)
    assert work.containers == pytest.approx(containers)


@pytest.mark.parametrize(
    ("calls", "replicas", "wandering", "seen"),
    [
        pytest.param(1, 8, 1, 1, id="the first call"),
        pytest.param(100, 1, 1, 1, id="one replica"),
        pytest.param(2, 2, 1, 1.5, id="the second may meet another one"),
        pytest.param(3, 2, 1, 1.75, id="and the third"),
        pytest.param(10_000, 8, 1, 8, id="in the end all"),
        pytest.param(10_000, 8, 0, 1, id="never, where a session keeps its own"),
    ],
)
def test_how_many_replicas_see_a_session(calls: float, replicas: float, wandering: float, seen: float) -> None:
    assert model.seen_by(calls, replicas, wandering) == pytest.approx(seen)


@pytest.mark.parametrize(
    ("cost", "work", "cluster", "cores"),
    [
        pytest.param(
            {"step_cpu_s": {"ors": 1e-3}}, Workload(sessions=1000), Cluster(replicas=2), 0.1, id="steps are shared"
        ),
        pytest.param({"episode_cpu_s": 1e-2}, Workload(sessions=1000), Cluster(replicas=2), 0.05, id="so are episodes"),
        pytest.param(
            {"notice_client_s": 1e-2}, Workload(sessions=1000), Cluster(replicas=2), 0.1, id="everybody hears of an end"
        ),
        pytest.param({"report_cpu_s": 1e-3}, Workload(sessions=1), Cluster(machines=50), 0.05, id="and asks each node"),
        pytest.param(
            {"note_client_s": 1e-3},
            Workload(sessions=1000, step_s=1, wandering=0),
            Cluster(replicas=2),
            0.2,
            id="a step of a second is noted twice",
        ),
        pytest.param(
            {"note_client_s": 1e-3},
            Workload(sessions=1000, period_s=0.1, wandering=0),
            Cluster(replicas=2),
            0.5,
            id="many steps of a second are noted once",
        ),
        pytest.param(
            {"report_cpu_s": 1.0, "tls_step_gateway_s": 1.0, "tls_dial_gateway_s": 1.0},
            Workload(sessions=1000, exclusive=1),
            ALONE,
            0,
            id="workers beside their gateway need no TLS",
        ),
    ],
)
def test_the_cpu_of_a_replica(cost: dict[str, Any], work: Workload, cluster: Cluster, cores: float) -> None:
    figures = replace(FREE, **cost, load_client_s=1e-9)

    assert model.replica_cpu(figures, work, cluster) == pytest.approx(cores)


@pytest.mark.parametrize(
    ("cost", "work", "cores"),
    [
        pytest.param({"open_redis_s": 1e-3}, Workload(sessions=1000), 0.01, id="each opening"),
        pytest.param({"notice_redis_s": 1e-3}, Workload(sessions=1000), 0.04, id="each end, for each replica"),
        pytest.param({"find_redis_s": 1e-3}, Workload(sessions=1000, wandering=0), 0, id="nobody has to look up"),
        pytest.param({"find_redis_s": 1e-3}, Workload(sessions=1000), 0.0299049, id="others have to"),
        pytest.param({"load_redis_s": 1e-4}, Workload(sessions=640, warm=0), 2.2e-3, id="two turns, and the audit's"),
        pytest.param({"turn_redis_s": 1e-3}, Workload(sessions=1), 8e-3, id="two turns of each replica"),
    ],
)
def test_the_cpu_of_redis(cost: dict[str, Any], work: Workload, cores: float) -> None:
    figures = replace(FREE, **{"load_client_s": 1e-9} | cost)

    assert model.redis_cpu(figures, work, Cluster(replicas=4)) == pytest.approx(cores, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("work", "rested", "restless"),
    [
        pytest.param(Workload(sessions=1000), 2, 2, id="nothing wakes it"),
        pytest.param(Workload(sessions=100, exclusive=1, warm=0), 5, 5, id="each end of a worker does"),
        pytest.param(Workload(sessions=1000, exclusive=1, warm=0), 1 / 0.052, 32, id="but it rests"),
        pytest.param(Workload(sessions=1_000_000, exclusive=1, warm=0), 0.4, 0.5, id="and has to read all of them"),
    ],
)
def test_turns_of_the_control_loop(work: Workload, rested: float, restless: float) -> None:
    figures = replace(FREE, load_redis_s=1e-6, load_client_s=1e-6)

    assert model.turns_s(figures, work, Cluster()) == pytest.approx(rested)
    assert model.turns_s(figures, work, Cluster(rests=False)) == pytest.approx(restless)


@pytest.mark.parametrize(
    ("cluster", "starts", "bound"),
    [
        pytest.param(Cluster(machines=1), 5, "the engines", id="one machine"),
        pytest.param(Cluster(machines=8), 40, "the engines", id="eight machines"),
        pytest.param(Cluster(machines=100), 500, "the engines", id="each its own"),
        pytest.param(Cluster(machines=100, starts_at_once=0.5), 250, "starts at once", id="no more than are asked for"),
    ],
)
def test_starts_are_bounded_by_the_engines_and_by_who_asks_them(cluster: Cluster, starts: float, bound: str) -> None:
    figures = replace(FIGURES, engine_starts_s=5.0, engine_start_s=0.2)

    assert model.starts_s(figures, cluster) == pytest.approx(starts)
    assert used("starts", figures, Workload(sessions=1, exclusive=1), cluster).bound == bound


def test_memory_is_that_of_the_containers_and_of_what_is_in_them() -> None:
    figures = replace(FREE, container_bytes=100.0, worker_session_bytes=1.0, sandbox_bytes=10.0, base_bytes=1000.0)
    work = Workload(sessions=640, sandbox=0.5, exclusive=0.25, warm=0, exclusive_bytes=5.0)

    assert model.memory_bytes(figures, work, Cluster(replicas=3)) == pytest.approx(
        182.5 * 100 + 160 * 1 + 320 * 10 + 160 * 5 + 3 * 1000
    )


def test_replicas_are_the_fewest_that_are_not_too_busy() -> None:
    figures = replace(FREE, step_cpu_s={"ors": 1e-3}, rest_cpu_s=0.2)

    assert model.replicas_needed(figures, Workload(sessions=12_400), Cluster()) == 5  # 2.48 of 0.5 each


def test_no_number_of_replicas_helps_where_each_of_them_hears_too_much() -> None:
    figures = replace(FREE, notice_client_s=1e-3)

    assert model.replicas_needed(figures, Workload(sessions=100_000), Cluster()) is None
    assert model.sized(figures, Workload(sessions=100_000), Cluster()).replicas == model.REPLICAS_MAX


def test_walls_stand_where_their_parts_are_full_and_in_that_order() -> None:
    work, cluster = Workload(sessions=100_000, exclusive=0.1), Cluster(replicas=13)

    found = model.walls(FIGURES, work, cluster)

    assert [wall.sessions for wall in found] == sorted(wall.sessions for wall in found)
    for wall in found:
        there = used(wall.name, FIGURES, replace(work, sessions=wall.sessions), cluster)
        assert there.utilisation == pytest.approx(1, rel=0.01)


def test_a_part_that_is_never_full_is_no_wall() -> None:
    assert "starts" not in {wall.name for wall in model.walls(FIGURES, Workload(sessions=1), Cluster())}


# -- more is never less ---------------------------------------------------------------------------------------------

WORKS = st.builds(
    lambda sessions, sandbox, exclusive, wandering, period_s, steps: Workload(
        sessions=sessions,
        sandbox=sandbox * (1 - exclusive),
        exclusive=exclusive,
        wandering=wandering,
        period_s=period_s,
        steps=steps,
    ),
    st.floats(1, 1e6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0.1, 60),
    st.floats(1, 500),
)
CLUSTERS = st.builds(
    lambda machines, replicas, is_remote: Cluster(machines=machines, replicas=replicas, is_remote=is_remote),
    st.integers(1, 200),
    st.integers(1, 60),
    st.booleans(),
)


@settings(max_examples=60)
@given(work=WORKS, cluster=CLUSTERS, times=st.floats(1, 20))
def test_more_sessions_use_no_part_less(work: Workload, cluster: Cluster, times: float) -> None:
    less = model.uses(FIGURES, work, cluster)
    more = model.uses(FIGURES, replace(work, sessions=work.sessions * times), cluster)

    for one, other in zip(less, more, strict=True):
        assert other.utilisation >= one.utilisation * (1 - 1e-9), one.name


@settings(max_examples=60)
@given(work=WORKS, cluster=CLUSTERS, times=st.integers(1, 20))
def test_more_replicas_make_each_of_them_less_busy_with_what_they_share(
    work: Workload, cluster: Cluster, times: int
) -> None:
    work = replace(work, wandering=0.0)
    more = replace(cluster, replicas=cluster.replicas * times)

    assert model.replica_cpu(FIGURES, work, more) <= model.replica_cpu(FIGURES, work, cluster) * (1 + 1e-9)
    assert model.redis_cpu(FIGURES, work, more) >= model.redis_cpu(FIGURES, work, cluster) * (1 - 1e-9)


@settings(max_examples=60)
@given(work=WORKS, cluster=CLUSTERS, times=st.integers(1, 20))
def test_more_machines_start_workers_no_more_slowly(work: Workload, cluster: Cluster, times: int) -> None:
    more = replace(cluster, machines=cluster.machines * times)

    assert model.starting_s(FIGURES, work, more) <= model.starting_s(FIGURES, work, cluster) * (1 + 1e-9)


# -- the back test --------------------------------------------------------------------------------------------------

SCALE, MANY = MEASURED["scale"], MEASURED["many_containers"]
IDLE = Workload(sessions=SCALE["plan"]["idle"], period_s=1e9, warm=0, shared_slots=25_064)
EACH_ALONE = Workload(sessions=MANY["plan"]["sessions"], exclusive=1, warm=0, exclusive_bytes=0)


def _at_once() -> tuple[float, float]:
    """Beyond the step's own second: that would be foretold by anybody."""
    plan = SCALE["plan"]
    callers_s = median(each["generator_cpu_s"] for each in SCALE["steps_at_once"]) / plan["at_once"]
    work = Workload(sessions=plan["at_once"], step_s=plan["step_s"], step_cpu_s=0)
    last_s = median(each["latency"]["max_ms"] for each in SCALE["steps_at_once"]) / 1e3
    foretold = model.burst_s(FIGURES, work, ALONE, caller_cpu_s=callers_s)
    return foretold - plan["step_s"], last_s - plan["step_s"]


def _notes() -> tuple[float, float]:
    """Commands of Redis for each step of sessions that step all the time: two for a note."""
    (trips,) = [each for each in MEASURED["store"]["trips"] if each["protocol"] == "ORS"]
    plan, steps_s = MEASURED["store"]["plan"], trips["steps"] / trips["seconds"]
    work = Workload(sessions=plan["callers"], period_s=plan["callers"] / steps_s, step_s=0)
    return 2 * model.notes_s(work, ALONE) / steps_s, trips["commands_a_step"]


def _sandboxes() -> tuple[float, float]:
    """A burst of sandboxes of one task, prepared before."""
    work = Workload(sessions=256, sandbox=1, prepare_cpu_s=0)
    return (
        model.opening_s(FIGURES, work, ALONE),
        MEASURED["sandboxes"]["bursts"]["gateway, Docker"]["n256"]["last_ms"] / 1e3,
    )


@pytest.mark.parametrize(
    ("foretold", "measured", "factor"),
    [
        pytest.param(*_at_once(), 2.0, id="4,096 steps of a second at once: s beyond it to the last"),
        pytest.param(model.opening_s(FIGURES, IDLE, ALONE), SCALE["idle"]["open_s"], 1.5, id="100,000 openings: s"),
        pytest.param(
            IDLE.sessions * FIGURES.session_bytes / MIB,
            SCALE["idle"]["rss_mib"]["gateway"],
            1.5,
            id="100,000 idle sessions: MiB of the gateway",
        ),
        pytest.param(
            model.redis_bytes(FIGURES, IDLE) / MIB,
            SCALE["idle"]["rss_mib"]["redis"],
            1.25,
            id="100,000 idle sessions: MiB of Redis",
        ),
        pytest.param(
            IDLE.sessions * FIGURES.worker_session_bytes / MIB,
            SCALE["idle"]["rss_mib"]["its workers"],
            2.0,
            id="100,000 idle sessions: MiB of their workers",
        ),
        pytest.param(
            model.replica_cpu(FIGURES, IDLE, ALONE) + model.control_cpu(FIGURES, IDLE, ALONE),
            SCALE["idle"]["cpu_share"]["gateway"],
            1.5,
            id="100,000 idle sessions: CPU of the gateway",
        ),
        pytest.param(model.starting_s(FIGURES, EACH_ALONE, ALONE), MANY["opened_s"], 2.0, id="500 containers: s"),
        pytest.param(
            EACH_ALONE.containers * FIGURES.container_bytes / MIB,
            MANY["machine_mib"],
            1.25,
            id="500 containers: MiB of the machine",
        ),
        pytest.param(*_notes(), 1.25, id="commands of Redis for a step"),
        pytest.param(*_sandboxes(), 1.5, id="256 sandboxes at once: s"),
    ],
)
def test_runs_that_the_model_was_not_made_from_are_foretold(foretold: float, measured: float, factor: float) -> None:
    assert measured / factor <= foretold <= measured * factor


def test_all_of_those_sessions_and_containers_were_there() -> None:
    assert SCALE["idle"]["opened"] == SCALE["plan"]["idle"]
    assert MANY["containers_alive"] == MANY["plan"]["sessions"]
    assert pytest.approx(0.84 * KIB) == FIGURES.redis_session_bytes


# -- the page -----------------------------------------------------------------------------------------------------


def test_the_page_has_what_the_model_says_of_the_last_results() -> None:
    figures = read_figures(DATA)
    found = markdown(tables(figures, cases(figures, Workload(sessions=100_000), Cluster())))

    text = PAGE.read_text()

    assert page(text, found) == text, "python -m bench.capacity --write-docs"


def test_results_go_between_the_marks_and_nothing_else_changes() -> None:
    assert page(f"a\n{BEGIN}\nold\n{END}\nb\n", "new") == f"a\n{BEGIN}\n\nnew\n\n{END}\nb\n"


@pytest.mark.parametrize("text", ["nothing", BEGIN, END], ids=["none", "no end", "no begin"])
def test_a_page_without_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no place"):
        page(text, "new")


@pytest.mark.parametrize(
    "lever", [lever for lever in LEVERS if lever.name not in (MORE, RESTLESS)], ids=lambda lever: lever.name
)
def test_what_would_move_the_first_wall_brings_it_no_nearer(lever: Lever) -> None:
    for case in cases(FIGURES, Workload(sessions=100_000), Cluster()):
        as_it_is = model.walls(FIGURES, case.work, case.cluster)[0].sessions
        moved = model.walls(*lever.pull(FIGURES, case.work, case.cluster))[0].sessions

        assert moved >= 0.99 * as_it_is, case.name


def test_without_its_pause_the_control_loop_brings_the_wall_of_exclusive_sessions_nearer() -> None:
    (restless,) = [lever for lever in LEVERS if lever.name == RESTLESS]
    *_, exclusive = cases(FIGURES, Workload(sessions=100_000), Cluster())
    as_it_is = model.walls(FIGURES, exclusive.work, exclusive.cluster)[0].sessions
    moved = model.walls(*restless.pull(FIGURES, exclusive.work, exclusive.cluster))[0].sessions

    assert moved < 0.7 * as_it_is


def test_more_replicas_bring_the_wall_of_redis_nearer() -> None:
    (more,) = [lever for lever in LEVERS if lever.name == MORE]
    shared = cases(FIGURES, Workload(sessions=100_000), Cluster())[0]

    as_it_is = model.walls(FIGURES, shared.work, shared.cluster)[0]
    moved = model.walls(*more.pull(FIGURES, shared.work, shared.cluster))[0]

    assert as_it_is.name == moved.name == "CPU of Redis"
    assert moved.sessions < as_it_is.sessions


def test_the_command_prints_tables_of_another_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--results", str(FIXTURE), "--sessions", "500", "--machines", "3", "--protocol", "areal"])

    printed = capsys.readouterr().out
    assert status == 0
    assert "| sessions at once | 500 |" in printed
    assert "3 of 16 cores" in printed
    assert "areal" in printed


def test_the_command_refuses_a_cluster_that_cannot_be_by_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--machines", "0"])

    assert "machines" in capsys.readouterr().err
