"""The capacity model: its arithmetic, its monotonic behaviour, and runs that it must predict.

The back test reads ``data/capacity.json``. It has the model's inputs from one run's results, and the figures to
predict. No prediction uses a figure that is also an input. Each prediction has its own tolerance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.capacity import BEGIN, COSTS, LEVERS, MIB, PAGE, Model, Plan, cases, main, read_costs, tables
from bench.reporting import results

FIXTURE = Path(__file__).parent / "data" / "capacity.json"
DATA: dict[str, Any] = json.loads(FIXTURE.read_text())
MEASURED: dict[str, Any] = DATA["figures"]
MEASURED_COSTS = read_costs(DATA)
ALONE: dict[str, Any] = {"machines": 1, "cores": 2, "memory_gib": 24, "replicas": 1, "remote": 0}
"""The machine of the runs."""


def free(**costs: float) -> SimpleNamespace:
    """Return costs that are 0 except for *costs*. Costs used as divisors are tiny instead."""
    nothing = dict.fromkeys(COSTS, 0.0) | {"load_client_s": 1e-9, "engine_starts_s": 1.0, "engine_start_s": 1.0}
    return SimpleNamespace(**(nothing | costs))


def model(costs: SimpleNamespace = MEASURED_COSTS, **plan: Any) -> Model:
    """Return a model of a plan."""
    return Model(costs, Plan(**plan))


# -- inputs -------------------------------------------------------------------------------------------------------


def test_each_cost_has_a_source_and_a_value_in_the_fixture() -> None:
    assert {name for name, source in COSTS.items() if not {"at", "over", "from"} & set(source)} == set()
    assert all(value > 0 for value in vars(MEASURED_COSTS).values())


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        pytest.param(lambda found: found["figures"].pop("areal"), "areal", id="a part is missing"),
        pytest.param(
            lambda found: found["figures"]["scale"]["idle"].pop("cpu_share_of_none"), "cpu_share", id="a row is missing"
        ),
        pytest.param(
            lambda found: found["figures"]["footprint"]["idle_sessions"].clear(), "gateway", id="a process is missing"
        ),
        pytest.param(lambda found: found["figures"]["many_containers"].update(sdk_s=0), "sdk_s", id="a time is zero"),
    ],
)
def test_results_without_an_input_are_refused_with_its_name(spoil: Callable[[Any], object], named: str) -> None:
    found = json.loads(json.dumps(DATA))
    spoil(found)

    with pytest.raises(ValueError, match=named):
        read_costs(found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 0) for name in ("sessions", "machines", "cores", "memory_gib", "replicas", "starts_at_once")),
        pytest.param("period_s", math.nan, id="NaN"),
        pytest.param("steps", math.inf, id="infinite"),
        pytest.param("sandbox", 1.5, id="a share above 1"),
        pytest.param("wandering", -0.1, id="a negative share"),
        pytest.param("step_cpu_s", -1.0, id="a negative time"),
        pytest.param("protocol", "smtp", id="an unknown protocol"),
    ],
)
def test_an_impossible_plan_is_refused_with_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        Plan(**{field: value})


def test_shares_that_sum_to_more_than_1_are_refused() -> None:
    with pytest.raises(ValueError, match="sandbox, exclusive"):
        Plan(sandbox=0.6, exclusive=0.6)


# -- arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "steps_s", "ends_s", "containers"),
    [
        pytest.param({"sessions": 640, "warm": 0}, 128, 6.4, 10, id="shared, 64 in a worker"),
        pytest.param({"sessions": 640, "warm": 0.1}, 128, 6.4, 11, id="shared, with a tenth kept free"),
        pytest.param({"sessions": 160, "sandbox": 1, "warm": 0}, 32, 1.6, 10, id="sandboxes, 16 in a worker"),
        pytest.param({"sessions": 100, "exclusive": 1, "warm": 0}, 20, 1, 100, id="one container for each session"),
        pytest.param(
            {"sessions": 640, "sandbox": 0.5, "exclusive": 0.25, "warm": 0}, 128, 6.4, 182.5, id="a mix of all kinds"
        ),
    ],
)
def test_the_pace_of_a_plan(plan: dict[str, Any], steps_s: float, ends_s: float, containers: float) -> None:
    found = model(**plan)

    assert (found.steps_s, found.ends_s, found.containers) == pytest.approx((steps_s, ends_s, containers))


@pytest.mark.parametrize(
    ("steps", "replicas", "wandering", "seen"),
    [
        pytest.param(100, 1, 1, 1, id="one replica"),
        pytest.param(1, 2, 1, 1.5, id="a second call may reach another replica"),
        pytest.param(2, 2, 1, 1.75, id="a third call may reach another replica"),
        pytest.param(10_000, 8, 1, 8, id="many calls reach all replicas"),
        pytest.param(10_000, 8, 0, 1, id="a session that stays on its replica"),
    ],
)
def test_the_replicas_that_see_a_session(steps: float, replicas: float, wandering: float, seen: float) -> None:
    assert model(steps=steps, replicas=replicas, wandering=wandering).seen_by == pytest.approx(seen)


@pytest.mark.parametrize(
    ("cost", "plan", "cores"),
    [
        pytest.param({"ors_step_cpu_s": 1e-3}, {}, 0.1, id="steps are shared"),
        pytest.param({"episode_cpu_s": 1e-2}, {}, 0.05, id="episodes are shared"),
        pytest.param({"notice_client_s": 1e-2}, {}, 0.1, id="every replica reads the notice of an end"),
        pytest.param({"report_cpu_s": 1e-3}, {"machines": 50}, 0.05, id="every replica queries each node"),
        pytest.param({"note_client_s": 1e-3}, {"step_s": 1, "wandering": 0}, 0.2, id="steps of 1 s: two notes"),
        pytest.param(
            {"note_client_s": 1e-3}, {"period_s": 0.1, "wandering": 0}, 0.5, id="steps within one second: one note"
        ),
        pytest.param(
            {"report_cpu_s": 1.0, "tls_step_gateway_s": 1.0, "tls_dial_gateway_s": 1.0},
            {"exclusive": 1} | ALONE,
            0,
            id="workers beside their gateway need no TLS",
        ),
    ],
)
def test_the_cpu_of_a_replica(cost: dict[str, Any], plan: dict[str, Any], cores: float) -> None:
    assert model(free(**cost), **({"sessions": 1000, "replicas": 2} | plan)).replica_cpu == pytest.approx(cores)


@pytest.mark.parametrize(
    ("cost", "plan", "cores"),
    [
        pytest.param({"open_redis_s": 1e-3}, {}, 0.01, id="each opening"),
        pytest.param({"notice_redis_s": 1e-3}, {}, 0.04, id="each end, for each replica"),
        pytest.param({"find_redis_s": 1e-3}, {"wandering": 0}, 0, id="no session is looked up without wandering"),
        pytest.param({"find_redis_s": 1e-3}, {}, 0.0299049, id="other replicas look up the session"),
        pytest.param(
            {"load_redis_s": 1e-4}, {"sessions": 640, "warm": 0}, 2.2e-3, id="two turns and the audit's reads"
        ),
        pytest.param({"turn_redis_s": 1e-3}, {"sessions": 1}, 8e-3, id="two turns of each replica"),
    ],
)
def test_the_cpu_of_redis(cost: dict[str, Any], plan: dict[str, Any], cores: float) -> None:
    found = model(free(**cost), **({"sessions": 1000, "replicas": 4} | plan)).redis_cpu

    assert found == pytest.approx(cores, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    ("plan", "rested", "restless"),
    [
        pytest.param({"sessions": 1000}, 2, 2, id="no event wakes the loop"),
        pytest.param({"sessions": 100, "exclusive": 1, "warm": 0}, 5, 5, id="each end of a worker wakes the loop"),
        pytest.param(
            {"sessions": 1000, "exclusive": 1, "warm": 0}, 1 / 0.052, 32, id="the loop rests between two turns"
        ),
        pytest.param({"sessions": 1e6, "exclusive": 1, "warm": 0}, 0.4, 0.5, id="each turn reads all workers"),
    ],
)
def test_turns_of_the_control_loop(plan: dict[str, Any], rested: float, restless: float) -> None:
    found = model(free(load_redis_s=1e-6, load_client_s=1e-6), **plan)

    assert found.turns_s == pytest.approx(rested)
    assert found.but(rests=0).turns_s == pytest.approx(restless)


@pytest.mark.parametrize(
    ("machines", "at_once", "starts"), [(1, 8, 5), (8, 8, 40), (100, 8, 500), (100, 0.5, 250)], ids=str
)
def test_starts_are_bounded_by_the_engines_and_by_the_leader(machines: float, at_once: float, starts: float) -> None:
    costs = free(engine_starts_s=5.0, engine_start_s=0.2)

    assert model(costs, machines=machines, starts_at_once=at_once).starts_s == pytest.approx(starts)


def test_memory_is_the_sum_of_containers_sessions_sandboxes_and_replicas() -> None:
    costs = free(container_bytes=100.0, worker_session_bytes=1.0, sandbox_bytes=10.0, base_bytes=1000.0)
    found = model(costs, sessions=640, sandbox=0.5, exclusive=0.25, warm=0, exclusive_mib=5 / MIB, replicas=3)

    assert found.memory_bytes == pytest.approx(182.5 * 100 + 160 * 1 + 320 * 10 + 160 * 5 + 3 * 1000)


def test_the_needed_replicas_are_the_fewest_that_are_not_too_busy() -> None:
    costs = free(ors_step_cpu_s=1e-3, rest_cpu_s=0.2)

    assert model(costs, sessions=12_400).replicas_needed() == 5  # 2.48 CPUs, with at most 0.5 on each replica.


def test_no_number_of_replicas_helps_if_each_replica_reads_too_many_notices() -> None:
    assert model(free(notice_client_s=1e-3)).replicas_needed() is None


def test_walls_are_the_loads_at_which_parts_are_full_in_ascending_order() -> None:
    found = model(exclusive=0.1, replicas=13)

    assert found.walls() == sorted(found.walls())
    assert all(found.but(sessions=at).uses()[name] == pytest.approx(1, rel=0.01) for at, name in found.walls())
    assert "starts" not in {name for _, name in model().walls()}, "a part that is never full"


# -- monotonic behaviour --------------------------------------------------------------------------------------------

PLANS = st.fixed_dictionaries(
    {
        "sessions": st.floats(1, 1e6),
        "sandbox": st.floats(0, 0.5),
        "exclusive": st.floats(0, 0.5),
        "wandering": st.floats(0, 1),
        "period_s": st.floats(0.1, 60),
        "steps": st.floats(1, 500),
        "machines": st.integers(1, 200),
        "replicas": st.integers(1, 60),
        "remote": st.integers(0, 1),
    }
)


@settings(max_examples=60)
@given(plan=PLANS, times=st.integers(1, 20))
def test_more_load_never_needs_less_and_more_machines_never_start_less(plan: dict[str, Any], times: int) -> None:
    found = model(**plan)
    more = found.but(sessions=found.plan.sessions * times)
    machines = found.but(machines=found.plan.machines * times)
    one = found.but(wandering=0)
    replicas = one.but(replicas=found.plan.replicas * times)

    assert [name for name, used in found.uses().items() if more.uses()[name] < used * (1 - 1e-9)] == []
    assert machines.starts_s >= found.starts_s * (1 - 1e-9)
    assert replicas.replica_cpu <= one.replica_cpu * (1 + 1e-9)
    assert replicas.redis_cpu >= one.redis_cpu * (1 - 1e-9)


# -- the back test --------------------------------------------------------------------------------------------------

SCALE, MANY, STORE = MEASURED["scale"], MEASURED["many_containers"], MEASURED["store"]
IDLE = model(sessions=SCALE["plan"]["idle"], period_s=1e9, warm=0, shared_slots=25_064, **ALONE)
EACH_ALONE = model(sessions=MANY["plan"]["sessions"], exclusive=1, warm=0, exclusive_mib=0, **ALONE)
BOXES = model(sessions=256, sandbox=1, prepare_cpu_s=0, **ALONE)
(TRIPS,) = (each for each in STORE["trips"] if each["protocol"] == "ORS")
CALLERS = STORE["plan"]["callers"]
STEPPING = model(sessions=CALLERS, period_s=CALLERS / (TRIPS["steps"] / TRIPS["seconds"]), step_s=0, **ALONE)


@pytest.mark.parametrize(
    ("predicted", "measured", "factor"),
    [
        pytest.param(IDLE.opening_s(), SCALE["idle"]["open_s"], 1.5, id="100,000 openings: s"),
        pytest.param(
            IDLE.plan.sessions * MEASURED_COSTS.session_bytes / MIB,
            SCALE["idle"]["rss_mib"]["gateway"],
            1.5,
            id="100,000 idle sessions: MiB of the gateway",
        ),
        pytest.param(
            IDLE.redis_bytes / MIB, SCALE["idle"]["rss_mib"]["redis"], 1.25, id="100,000 idle sessions: MiB of Redis"
        ),
        pytest.param(
            IDLE.plan.sessions * MEASURED_COSTS.worker_session_bytes / MIB,
            SCALE["idle"]["rss_mib"]["its workers"],
            2.0,
            id="100,000 idle sessions: MiB of their workers",
        ),
        pytest.param(
            IDLE.replica_cpu + IDLE.control_cpu,
            SCALE["idle"]["cpu_share"]["gateway"],
            1.5,
            id="100,000 idle sessions: CPU of the gateway",
        ),
        pytest.param(EACH_ALONE.containers / EACH_ALONE.starts_s, MANY["opened_s"], 2.0, id="500 containers: s"),
        pytest.param(
            EACH_ALONE.containers * MEASURED_COSTS.container_bytes / MIB,
            MANY["machine_mib"],
            1.25,
            id="500 containers: MiB of the machine",
        ),
        pytest.param(
            2 * STEPPING.notes_s / STEPPING.steps_s, TRIPS["commands_a_step"], 1.25, id="commands of Redis for a step"
        ),
        pytest.param(
            BOXES.opening_s(),
            MEASURED["sandboxes"]["bursts"]["gateway, Docker"]["n256"]["last_ms"] / 1e3,
            1.5,
            id="256 sandboxes at once: s",
        ),
    ],
)
def test_figures_that_are_not_inputs_of_the_model_are_predicted(
    predicted: float, measured: float, factor: float
) -> None:
    assert measured / factor <= predicted <= measured * factor


def test_all_sessions_and_containers_of_the_back_test_were_open() -> None:
    assert SCALE["idle"]["opened"] == SCALE["plan"]["idle"]
    assert MANY["containers_alive"] == MANY["plan"]["sessions"]


# -- the page -----------------------------------------------------------------------------------------------------


def test_the_page_has_the_models_tables_for_the_fixture() -> None:
    found = results.markdown_tables(tables(cases(MEASURED_COSTS, Plan())))

    text = PAGE.read_text()

    assert results.between_marks(text, found, begin=BEGIN) == text, "python -m bench.capacity --write-docs"


def test_levers_move_the_first_wall_in_the_expected_direction() -> None:
    for case in cases(MEASURED_COSTS, Plan()):
        moved = {name: pull(case).walls()[0] for name, pull in LEVERS.items()}
        (as_it_is, part) = moved.pop("as it is")
        (restless, _), (more, _) = moved.pop("without the pause between two turns"), moved.pop("twice as many replicas")

        assert min(at for at, _ in moved.values()) >= 0.99 * as_it_is
        assert restless < 0.7 * as_it_is if case.plan.exclusive else restless == as_it_is
        assert more < as_it_is if part == "CPU of Redis" else more > as_it_is


def test_the_command_prints_tables_of_another_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--results", str(FIXTURE), "--sessions", "500", "--machines", "3", "--protocol", "areal"])

    printed = capsys.readouterr().out
    assert status == 0
    assert {"|  | areal |", "| sessions at once | 500 |", "| machines | 3 |"} <= set(printed.splitlines())


@pytest.mark.parametrize("wrong", [["--machines", "0"], ["--results", "missing.json"]], ids=" ".join)
def test_the_command_refuses_an_impossible_option_by_its_name(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--results", str(FIXTURE), *wrong])

    assert wrong[0 if wrong[1] == "0" else 1].strip("-") in capsys.readouterr().err
