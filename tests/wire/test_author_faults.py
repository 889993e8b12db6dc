"""A fault in the environment author's code is a typed error in every protocol, and never a reward.

A client of every protocol plays every row of `ROWS` on its kind of worker. The error that the client gets depends only
on where the author's code fails.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.envs.plain_sandbox import need_bubblewrap
from tests.fakes.eventually import eventually
from tests.fakes.user import need_other_users
from tests.sandbox.conftest import sandbox_dir
from tests.service.wire import events
from tests.wire.areal_client import ArealClient
from tests.wire.author_faults import (
    AGENT,
    AREAL,
    CALL,
    FAIL,
    FAULTY,
    IMPORT,
    JSON,
    MCP,
    NEMO,
    OPENENV,
    OPENREWARD,
    ORS,
    OS,
    OWN,
    OWN_ROWS,
    PROTOCOLS,
    SSE,
    WAYS,
    counted,
    counted_as,
    failed_calls,
    finished,
    play_and_check,
    told,
)
from tests.wire.author_faults import fault_line as _fault_line
from tests.wire.gateways import OPERATOR_KEY, Gateway, short_folder
from tests.wire.openenv.clients import NEWEST, python_of

pytestmark = [pytest.mark.wire, pytest.mark.needs("openenv-clients")]

ROWS = [
    # kind     what fails  what the client gets
    *((OWN, fails, expected) for fails, expected in OWN_ROWS),
    *((kind, "constructor", "no opening") for kind in (ORS, OPENREWARD, OPENENV)),
    *((kind, "reset", "no opening") for kind in (ORS, OPENREWARD, OPENENV, MCP, AREAL)),
    *((kind, "tool", "the end") for kind in (FAIL, AREAL)),
    (AREAL, "reward", "the end"),
    (AREAL, "infinite reward", "the end"),
]
CELLS = [(*row, way) for row in ROWS for way in WAYS]
AGENTS = [(OWN, "tool error"), (AGENT, "tool"), *((kind, "tool") for kind in (ORS, OPENREWARD, OPENENV, MCP))]
"""Kinds of workers, and the errors of their tools that are the agent's own."""
AGENTS_CELLS = [(*row, way) for row in AGENTS for way in WAYS if (row[0], way) != (OPENENV, "openenv-mcp")]
"""Leaves out OpenEnv's Gym kind over MCP: such an image has no tools that JSON-RPC could call."""
_LINES = (FAULTY / "catalog/faulty/faulty_own.py").read_text().splitlines()
_TOOL = next(i for i, line in enumerate(_LINES) if "async def answer" in line)
RAISES = 1 + _LINES.index('            raise KeyError("toop")', _TOOL)
"""The line of the tool that raises."""
LOG_BYTES = 100_000
"""More than the log of an episode, whatever its exceptions say."""
OS_ROWS = [("reference", "no opening"), ("reference at the end", "the end")]
"""A failing reference solution, which the os environment runs before the agent's first action or at the end."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    python_of(NEWEST)  # creates the venv that the OpenEnv server runs in
    folder = short_folder()
    folder.chmod(0o755)  # the os environment's sandboxes are below it, and their root is another user
    settings = {
        "GATEWAY_CATALOG_DIR": str(FAULTY / "catalog"),
        "GATEWAY_ENVIRONMENTS": ",".join((OWN, FAIL, AGENT, IMPORT, OS, ORS, OPENREWARD, OPENENV, MCP, AREAL)),
        "GATEWAY_DEFAULT_ENVIRONMENT": OWN,
        "GATEWAY_TRAINER_KEYS": "",
        "GATEWAY_SANDBOX_DIR": str(sandbox_dir(folder)),
    }
    gateway = Gateway(folder, settings)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("environment", "fails", "expected", "way"), CELLS)
async def test_an_authors_fault_is_a_typed_error_and_never_a_reward(
    gateway: Gateway, environment: str, fails: str, expected: str, way: str
) -> None:
    if (environment, fails) == (OPENENV, "constructor"):
        await _let_the_next_constructor_fail(gateway)
    await play_and_check(gateway, environment, fails, expected, way)


@pytest.mark.parametrize(("environment", "fails", "way"), AGENTS_CELLS)
async def test_an_error_of_the_agent_is_no_fault_and_the_episode_goes_on(
    gateway: Gateway, environment: str, fails: str, way: str
) -> None:
    play, _ = WAYS[way]
    before, already_logged = await counted(gateway, environment), len(gateway.log)
    calls_before = await failed_calls(gateway, environment)

    async with play(gateway.url, environment, fails) as heard:
        pass

    is_step = (environment, way) != (MCP, "openenv-mcp")  # a call over JSON-RPC is no step on these servers
    await counted_as(gateway, environment, before, **({"stopped": 1, "rewards": 1} if is_step else {"unplayed": 1}))
    reasons = {reason for _, reason in heard.errors}
    if way == "areal":
        assert (heard.errors, heard.is_done) == ([], True), "the limit of turns ended the episode"
    else:
        assert len(heard.errors) == 2
        assert reasons <= {"tool_error", ""}
        assert not heard.is_done
    if way == "ors-json":
        assert heard.errors[0] == (200, "tool_error")
    assert not any(heard.rewards)
    log = gateway.log[already_logged:]
    assert "author_fault" not in log
    assert "episode_marked" not in log
    assert await failed_calls(gateway, environment) == calls_before


@pytest.mark.parametrize("way", [*PROTOCOLS, "nemo"])
async def test_an_environment_that_raises_at_its_import_starts_no_episode(gateway: Gateway, way: str) -> None:
    play, _ = PROTOCOLS.get(way, NEMO)

    async with play(gateway.url, IMPORT, "nothing") as heard:
        pass

    [(_, reason)] = heard.errors
    assert (reason, heard.rewards, heard.is_done) == ("start_failed", [], False)
    assert 'faulty_import.py", line 3' in gateway.log, "the end of the worker's log"


@pytest.mark.parametrize("way", [*WAYS, "nemo"])
@pytest.mark.parametrize("text", ["no text", "long text", "control characters"])
@pytest.mark.parametrize("place", ["reset", "tool", "judge", "close"])
async def test_an_exception_of_any_text_has_the_form_of_its_protocol(
    gateway: Gateway, place: str, text: str, way: str
) -> None:
    play, says = WAYS.get(way, NEMO)
    expected = {"reset": "no opening", "tool": "a failed tool", "judge": "the end"}.get(place)
    before, already_logged = await counted(gateway, OWN), len(gateway.log)

    async with play(gateway.url, OWN, f"{place}, {text}") as heard:
        pass

    if expected is None:  # the teardown, after the trainer has its reward
        await counted_as(gateway, OWN, before, finished=1, rewards=1)
    else:
        await counted_as(gateway, OWN, before, author_fault=1, **({"marked": 1} if place == "tool" else {}))
        assert heard.errors[0] == says[expected][0], heard
        assert set(heard.errors) <= set(says[expected]), heard
        assert not any(heard.rewards)

    async def is_logged() -> None:
        assert "author_fault environment=" in gateway.log[already_logged:]

    await eventually(is_logged)
    log = gateway.log[already_logged:]
    assert len(log) < LOG_BYTES
    assert not re.search(r"[\x00\x1b\x85\u2028]", log), "each record is one line of plain text"


@pytest.mark.parametrize("way", [way for way in WAYS if way != "openenv-mcp"])
async def test_an_unexpected_exception_marks_the_episode_and_leaves_it_out_of_records(
    gateway: Gateway, way: str
) -> None:
    """The second answer wins. The trainer gets its reward."""
    play, _ = WAYS[way]
    before, already_logged = await counted(gateway, OWN), len(gateway.log)
    mark = {"X-API-Key": OPERATOR_KEY}

    async with play(gateway.url, OWN, "tool once") as heard:
        pass

    await counted_as(gateway, OWN, before, finished=1, rewards=1, marked=1)
    assert heard.is_done
    assert sum(reward or 0.0 for reward in heard.rewards) == 1.0
    log = gateway.log[already_logged:]
    error = f"KeyError: 'toop' (faulty_own.py, line {RAISES})"
    assert _fault_line(log).count("place='tool:answer'") == 1
    assert f"episode_marked environment={OWN} task=" in log
    assert error in log
    newest = (await gateway.ask(f"episodes?environment={OWN}&unexpected_error=*&limit=1"))["episodes"][0]
    assert (newest["outcome"], newest["reward"], newest["unexpected_error"]) == ("finished", 1.0, error)
    assert '"task":"tool once"' not in (await told(gateway, f"/admin/v1/records?environment={OWN}")).text
    async with httpx.AsyncClient(headers=mark, trust_env=False, verify=False, timeout=HANG_S) as http:
        page = await http.get(f"{gateway.url}/dashboard/episodes/{newest['id']}")
    assert "unexpected error</span>" in page.text


@pytest.mark.parametrize("over", ["ors", "ors-json", "openenv"])
@pytest.mark.parametrize("environment", [OWN, ORS, OPENREWARD, OPENENV, AREAL])
async def test_a_finished_episode_keeps_its_reward_if_its_worker_dies(
    gateway: Gateway, environment: str, over: str
) -> None:
    before = await counted(gateway, environment)

    async with finished(gateway.url, environment, over) as reward:
        await gateway.kill_worker_of(environment)
        await counted_as(gateway, environment, before, finished=1, rewards=1)

    newest = (await gateway.ask(f"episodes?environment={environment}&limit=1"))["episodes"][0]
    assert reward == 1.0
    assert (newest["outcome"], newest["reason"], newest["reward"]) == ("finished", "worker_lost", 1.0)


async def test_a_mark_outlives_the_worker(gateway: Gateway) -> None:
    before = await counted(gateway, OWN)

    async with finished(gateway.url, OWN, "ors", "tool once"):
        await gateway.kill_worker_of(OWN)
        await counted_as(gateway, OWN, before, finished=1, rewards=1, marked=1)


@pytest.mark.sandbox
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("fails", "expected"), OS_ROWS)
async def test_a_failing_reference_solution_is_an_author_fault(
    gateway: Gateway, fails: str, expected: str, way: str
) -> None:
    need_bubblewrap()
    need_other_users()
    await play_and_check(gateway, OS, fails, expected, way)


async def _let_the_next_constructor_fail(gateway: Gateway) -> None:
    """Play a task that makes the next constructor fail: OpenEnv servers create environments before they have a task."""
    before = await counted(gateway, OPENENV)
    spec = {"id": "next constructor", "config": {"fails": "next constructor"}}
    async with httpx.AsyncClient(
        base_url=gateway.url, headers={"X-Session-ID": "before"}, trust_env=False, verify=False, timeout=HANG_S
    ) as http:
        created = await http.post("/create", json={"env_name": OPENENV, "task_spec": spec})
        assert created.status_code == 200, created.text
        await http.post("/delete")
    await counted_as(gateway, OPENENV, before, unplayed=1)


@pytest.mark.parametrize("accept", [SSE, JSON])
async def test_a_lost_box_is_reported_by_its_call_and_by_later_calls(gateway: Gateway, accept: str) -> None:
    headers = {"X-Session-ID": f"box {accept}", "Accept": accept}
    async with httpx.AsyncClient(
        base_url=gateway.url, headers=headers, trust_env=False, verify=False, timeout=HANG_S
    ) as http:
        created = await http.post("/create", json={"env_name": OWN, "task_spec": {"config": {"fails": "box"}}})
        assert created.status_code == 200, created.text
        broke, later = [await http.post(f"/{OWN}/call", json=CALL) for _ in range(2)]
        await http.post("/delete")

    if accept == SSE:
        assert events(broke.text)[-1] == ("error", "session_failed: the box is gone")
    else:
        assert broke.json() == {"ok": False, "error": "the box is gone", "reason": "session_failed"}
    assert (broke.status_code, later.status_code) == (200, 410)
    assert later.json()["reason"] == later.json()["code"] == "session_failed"
    assert later.json()["detail"].startswith("session_failed: ")


async def test_only_episodes_that_an_agent_played_count_as_rewarded(gateway: Gateway) -> None:
    before = await counted(gateway, OWN)
    client = ArealClient(f"{gateway.url}/areal/{OWN}")

    won = await client.step((await client.start("nothing"))["episode_id"], "4")
    await client.cancel((await client.start("nothing"))["episode_id"])
    task = {"id": "probed", "env_type": OWN, "instruction": "Answer.", "config": {"fails": "nothing"}}
    already_logged = len(gateway.log)
    broken = {**task, "id": "broken", "config": {"fails": "reset"}}
    tried = (await told(gateway, "/admin/v1/tasks/validate", {"tasks": [task, broken]})).json()["results"]

    assert (won["reward"], won["done"]) == (1.0, True)
    assert [(result["ok"], result.get("code")) for result in tried] == [(True, None), (False, "author_fault")]
    assert [" ERROR " in line for line in gateway.log[already_logged:].splitlines()].count(True) == 1
    assert "environment=faulty task=" in _fault_line(gateway.log[already_logged:])
    await counted_as(gateway, OWN, before, finished=1, unplayed=2, author_fault=1, rewards=1)


async def test_agent_author_and_infrastructure_differ_in_answer_log_metrics_record_and_dashboard(
    gateway: Gateway,
) -> None:
    before, already_logged = await counted(gateway, OWN), len(gateway.log)
    answers = {}
    for who, fails in (("agent", "nothing"), ("author", "judge"), ("infrastructure", "box")):
        headers = {"X-Session-ID": f"cause-{who}", "Accept": JSON}
        async with httpx.AsyncClient(
            base_url=gateway.url, headers=headers, trust_env=False, verify=False, timeout=HANG_S
        ) as http:
            created = await http.post("/create", json={"env_name": OWN, "task_spec": {"config": {"fails": fails}}})
            assert created.status_code == 200, created.text
            answers[who] = (await http.post(f"/{OWN}/call", json=CALL)).json()
            await http.post("/delete")
    await counted_as(gateway, OWN, before, finished=1, author_fault=1, infrastructure=1, rewards=1)
    outcomes = {"agent": "finished", "author": "author_fault", "infrastructure": "infrastructure"}

    assert answers["agent"]["output"]["reward"] == 1.0
    assert (answers["author"]["reason"], answers["infrastructure"]["reason"]) == ("author_fault", "session_failed")
    logged = gateway.log[already_logged:].splitlines()
    assert len([line for line in logged if " ERROR " in line and "author_fault" in line]) == 1
    assert len([line for line in logged if " WARNING " in line and "infrastructure_fault" in line]) == 1
    for who, outcome in outcomes.items():
        recorded = await gateway.ask(f"episodes/cause-{who}")
        assert (recorded["outcome"], recorded["reward"]) == (outcome, 1.0 if who == "agent" else None)
        async with httpx.AsyncClient(headers={"X-API-Key": OPERATOR_KEY}, trust_env=False, verify=False) as http:
            page = await http.get(f"{gateway.url}/dashboard/episodes?name=cause-{who}")
        assert f'class="outcome {outcome}">' in page.text


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    ("environment", "fails"),
    [(OWN, "no rewards"), (ORS, "reward"), (ORS, "no rewards"), (OPENENV, "reward"), (OPENENV, "no rewards")],
)
async def test_an_episode_that_ends_without_any_reward_is_not_a_reward_of_0(
    gateway: Gateway, environment: str, fails: str, protocol: str
) -> None:
    """Unmodified servers write a NaN reward as null, which cannot be distinguished from no reward."""
    play, _ = PROTOCOLS[protocol]
    before, already_logged = await counted(gateway, environment), len(gateway.log)

    async with play(gateway.url, environment, fails) as heard:
        pass

    assert not any(heard.rewards)
    await counted_as(gateway, environment, before, author_fault=1)
    assert gateway.log[already_logged:].count("author_fault environment=") == 1
    assert "gave no reward in any of its" in _fault_line(gateway.log[already_logged:])
    if protocol == "areal":  # AReaL's clients need a number
        assert heard.errors == [(500, "author_fault")]
        assert not heard.is_done
    else:
        assert heard.is_done
        assert 0.0 not in heard.rewards
    assert f'"task":"{fails}"' not in (await told(gateway, f"/admin/v1/records?environment={environment}")).text


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("task", ["late reward", "early reward"])
@pytest.mark.parametrize("environment", [OWN, ORS, OPENENV])
async def test_steps_without_a_reward_leave_the_rewards_of_other_steps_unchanged(
    gateway: Gateway, environment: str, task: str, protocol: str
) -> None:
    play, _ = PROTOCOLS[protocol]
    before = await counted(gateway, environment)

    async with play(gateway.url, environment, task) as heard:
        pass

    assert not heard.errors
    assert heard.is_done
    assert sum(reward or 0.0 for reward in heard.rewards) == 1.0
    await counted_as(gateway, environment, before, finished=1, rewards=1)

    async def is_recorded() -> None:
        assert f'"task":"{task}"' in (await told(gateway, f"/admin/v1/records?environment={environment}")).text

    await eventually(is_recorded)
