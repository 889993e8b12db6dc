"""The step log of a whole gateway: what an operator reads of episodes, over every protocol and after every failure."""

from __future__ import annotations

import base64
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from markupsafe import escape

from gateway.catalog.doctor import Status, unexpected_errors
from gateway.core.environment import StepLogging, StepLogPolicy
from gateway.core.ids import EnvironmentName
from gateway.core.session import CloseReason
from gateway.core.worker import WorkerState
from gateway.frontends.admin import app as admin
from gateway.stores.step_log.reader import StepLogReader
from gateway.tasks.task_ref import name_of, seed_of
from tests.fakes.eventually import eventually
from tests.service.stack import Replica, Stack, environment, running, stack, tasks
from tests.service.wire import EVENT_STREAM, call, create, delete, hang_up, under_way
from tests.unit.stores.test_step_log import segments

ONE, TWO = "1" * 64, "2" * 64
OPERATOR = {"X-API-Key": "operator-key-1"}
LOG: dict[str, Any] = {
    "step_log_bytes": 2**30,
    "operators": {"boss": "operator-key-1"},
    "trainers": {"alice": "alice-key-123"},
}


@contextlib.asynccontextmanager
async def logging(
    folder: Path, *environments: Any, **more: Any
) -> AsyncIterator[tuple[Stack, Replica, httpx.AsyncClient]]:
    async with running(*environments, step_log=folder, **LOG, **more) as (built, gateway, client):
        client.headers["X-API-Key"] = "alice-key-123"
        yield built, gateway, client


async def listed(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    answer = await client.get("/admin/v1/episodes", params=query, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    episodes: list[dict[str, Any]] = answer.json()["episodes"]
    return episodes


async def shown(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    answer = await client.get(f"/admin/v1/episodes/{id}", headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    episode: dict[str, Any] = answer.json()
    return episode


async def recorded(client: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    """Return the task records of ``math``."""
    answer = await client.get("/admin/v1/records", params={"environment": "math", **query}, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def content(folder: Path, pattern: str = "*") -> list[bytes]:
    """Return the content of each file in *folder*."""
    return [path.read_bytes() for path in folder.glob(pattern)]


async def test_a_task_has_one_name_and_one_seed_over_all_protocols(tmp_path: Path) -> None:
    first, second = {"id": "a", "question": "1+1", "tags": ["x"]}, {"question": "2+2"}
    async with logging(tmp_path, environment(slots=32, max_workers=1), tasks_math=tasks(train=[first, second])) as (
        built,
        _,
        client,
    ):

        async def ors(**wish: Any) -> None:
            sid = {"X-Session-ID": f"ors{len(asked)}"}
            asked.append(await client.post("/create", json={"env_name": "math", **wish}, headers=sid))

        async def areal(**wish: Any) -> None:
            asked.append(await client.post("/areal/math/api/episode/start", json=wish))

        async def openenv(**wish: Any) -> None:
            session = {"X-Session-ID": f"openenv{len(asked)}"}
            asked.append(await client.post("/openenv/math/reset", json=wish, headers=session))

        async def nemo(**wish: Any) -> None:
            row = {"responses_create_params": {"input": []}, "verifier_metadata": {"environment": "math", **wish}}
            asked.append(await client.post("/nemo/math/seed_session", json=row))
            client.cookies.clear()

        asked: list[httpx.Response] = []
        await ors(split="train", index=0)
        await ors(split="train", index=-2)
        await ors(task_spec={"id": "a"})
        await ors(task_spec=first)  # the complete task, as a listing with `view = "full"` shows it
        await areal(sample_id=0)
        await areal(sample_id="a")
        await openenv(index=0)
        await openenv(task="a")
        await nemo(split="train", index=0)
        await nemo(id="a")
        await ors(split="train", index=1)
        await openenv(index=1)
        lines = (await listed(client))[::-1]

    assert {answer.status_code for answer in asked} == {200}, [answer.text for answer in asked]
    names = [(line["task"], line["task_digest"]) for line in lines]
    assert names == [("a", name_of(first).digest)] * 10 + [(name_of(second).label, name_of(second).digest)] * 2
    seeds = [line["seed"] for line in lines]
    played = [json.loads(one.body)["seed"] for one in built.backend.only.requests if one.target == "/create"]
    assert seeds == played
    assert set(seeds[:10]) == {seed_of("a")}
    assert set(seeds[10:]) == {seed_of(name_of(second).digest)}


async def test_only_the_listed_task_itself_counts_in_its_record(tmp_path: Path) -> None:
    listed_task: dict[str, Any] = {"id": "a", "question": "1+1"}
    wishes: list[dict[str, Any]] = [
        {"split": "train", "index": 0},
        {"task_spec": {**listed_task, "tags": ["mine"]}},
        {"task_spec": {**listed_task, "question": "0"}},
    ]
    async with logging(tmp_path, tasks_math=tasks(train=[listed_task])) as (_, gateway, client):
        for sid, wish in enumerate(wishes):
            await client.post("/create", json={"env_name": "math", **wish}, headers={"X-Session-ID": str(sid)})
            await call(client, sid=str(sid))
            await delete(client, str(sid))
        await gateway.records.write()
        records = await recorded(client)
        table = await gateway.curricula.weights._tables.of(EnvironmentName("math"), "train")

    assert sorted((one["task"], one["attempts"]) for one in records) == [("a", 1), ("a", 2)]
    (own,) = [one for one in records if one["task_digest"] == name_of(listed_task).digest]
    assert (own["attempts"], table[0].task) == (2, name_of(listed_task).key)


async def test_an_episode_is_shown_with_its_task_and_every_step(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        await create(client, question="6*7", seed=3)
        await client.get("/math/prompt")
        await call(client)
        await delete(client)
        (line,) = await listed(client)
        episode = await shown(client, line["id"])

    assert (line["outcome"], line["reason"], line["reward"]) == ("finished", "deleted", 1.0)
    assert (line["name"], line["owner"], line["environment"], line["protocol"]) == ("one", "alice", "math", "ors")
    assert line["opened_at"] < line["closed_at"]
    assert line["steps"] == 1
    assert episode["begin"]["spec"] == {"question": "6*7", "seed": 3}
    prompt, step = episode["steps"]
    assert (prompt["operation"], prompt["number"], prompt["blocks"]) == ("prompt", 0, [{"text": "6*7"}])
    assert (step["number"], step["outcome"]) == (1, "ok")
    assert step["action"] == {"tool": "echo", "input": {"x": 1}}
    assert step["blocks"] == [{"text": '{"x": 1}'}]
    assert step["began_at"] >= line["opened_at"]


async def test_the_version_of_the_scorer_is_in_each_episode_and_no_mean_mixes_two(tmp_path: Path) -> None:
    math = environment(min_workers=1)
    async with logging(tmp_path, math, tasks_math=tasks(train=[{"id": "t"}])) as (built, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        rewards = {"": 0.25, "no version": 0.5, ONE: 0.75, TWO: 1.0}
        for sid, (scorer, reward) in enumerate(rewards.items()):
            built.backend.only.scorer = scorer
            await create(client, str(sid), id="t", summary={"reward": reward})
            await call(client, sid=str(sid))
            await delete(client, str(sid))
        await gateway.records.write()
        lines = await listed(client)
        chosen = await listed(client, scorer=ONE)
        (record,) = await recorded(client)
        former = await recorded(client, former=1)
        exported = (await client.get(f"/admin/v1/episodes/{lines[0]['id']}/record", headers=OPERATOR)).json()
        page = (await client.get("/dashboard/episodes", headers=OPERATOR)).text

    assert [line["scorer"] for line in lines] == [TWO, ONE, None, None]
    assert [line["reward"] for line in chosen] == [0.75]
    assert (record["scorer"], record["mean"], record["attempts"]) == (TWO, 1.0, 1)
    assert sorted((one["scorer"] or "", one["mean"], one["attempts"]) for one in former) == [
        ("", 0.25, 1),
        ("", 0.5, 1),
        (ONE, 0.75, 1),
        (TWO, 1.0, 1),
    ]
    assert exported["episode"]["scorer"] == exported["records"][0]["scorer"] == TWO
    assert "mean reward 1 without 3 episodes of former scorers" in page


async def test_episodes_with_unexpected_errors_have_rewards_and_count_nowhere(tmp_path: Path) -> None:
    math = environment(min_workers=1)
    error = "KeyError: 'x (y)' (server.py, line 3)"
    group = {"X-Group-ID": "g", "X-Group-Size": "3"}
    async with logging(tmp_path, math, tasks_math=tasks(train=[{"id": "t"}])) as (_, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        client.headers.update(group)
        for sid, (reward, unexpected) in enumerate([(1.0, error), (0.5, ""), (0.0, "")]):
            await create(client, str(sid), id="t", summary={"reward": reward, "unexpected": unexpected})
            await call(client, sid=str(sid))
            await delete(client, str(sid))
        await gateway.records.write()
        lines = await listed(client)
        marked, same = await listed(client, unexpected_error="*"), await listed(client, unexpected_error=error)
        other = await listed(client, unexpected_error="KeyError")
        whole = await shown(client, marked[0]["id"])
        records = await recorded(client)
        pages = [
            (await client.get(f"/dashboard/{place}", headers=OPERATOR)).text
            for place in ("episodes", "groups/math/g", "environments/math", "now")
        ]
        trainers = (await client.get("/dashboard/episodes.json")).json()["episodes"][-1]
        own = (await client.get(f"/dashboard/episodes/{trainers['id']}.json")).json()
        findings = await unexpected_errors(StepLogReader(tmp_path))
        metrics = (await client.get("/metrics", headers=OPERATOR)).text

    assert [(line["reward"], line["unexpected_error"]) for line in lines] == [(0.0, None), (0.5, None), (1.0, error)]
    assert [line["name"] for line in (*marked, *same)] == ["0", "0"]
    assert other == []
    assert (whole["unexpected_error"], whole["end"]["unexpected_error"]) == (error, error)
    assert sorted((record["mean"], record["attempts"]) for record in records) == [(0.0, 1), (0.5, 1)]
    assert "mean reward 0.25 without 1 episode with unexpected errors" in pages[0]
    assert "2 of 3 episodes, mean reward 0.25, spread 0.5 without 1 episode with unexpected errors" in pages[1]
    assert "mean reward 0.25 without 1 episode with unexpected errors" in pages[2]
    assert (
        f"math: tools raised unexpected errors in 1 of 3 episodes of the last hour, in 1 of them {escape(error)}"
        in (pages[3])
    )
    assert (
        trainers["unexpected_error"] == own["unexpected_error"] == own["end"]["unexpected_error"] == "KeyError: 'x (y)'"
    )
    assert [finding.status for finding in findings] == [Status.WARNING]
    assert 'gateway_episodes_marked_total{environment="math"} 1.0' in metrics
    assert 'gateway_episode_reward_count{environment="math"} 3.0' in metrics


async def test_few_unexpected_errors_are_no_finding(tmp_path: Path) -> None:
    async with logging(tmp_path, environment(slots=64, min_workers=1)) as (_, gateway, client):
        for sid in range(40):
            await create(client, str(sid), summary={"unexpected": "KeyError: 'x'" if sid < 2 else ""})
            await call(client, sid=str(sid))
            await delete(client, str(sid))
        await gateway.log.flush()
        few = await unexpected_errors(StepLogReader(tmp_path))
        await create(client, "open")
        await create(client, "one more", summary={"unexpected": "KeyError: 'y'"})
        await delete(client, "one more")
        await gateway.log.flush()
        (many,) = await unexpected_errors(StepLogReader(tmp_path))

    assert few == [], "2 of 40 are 5 %"
    assert many.detail.endswith("in 3 of 41 episodes of the last hour, in 2 of them KeyError: 'x'")


async def test_the_scorer_of_an_image_that_reports_none_is_the_image(tmp_path: Path) -> None:
    async with logging(tmp_path, replace(environment(), image_id="sha256:5")) as (_, gateway, client):
        await create(client)
        (held,) = await gateway.store.sessions()
        await delete(client)
        (line,) = await listed(client)

    assert held.scorer == line["scorer"] == "sha256:5"


async def test_episodes_that_fail_for_different_reasons_look_different(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, gateway, client):
        await create(client, "dies")
        await call(client, "go_on", sid="dies")
        await built.backend.only.die()
        await gateway.eventually_used(0)
        await create(client, "ended")
        await gateway.sessions.end("alice", "ended", CloseReason.OPERATOR, wait_s=5)  # type: ignore[arg-type]
        await create(client, "unplayed")
        await delete(client, "unplayed")

        async def all_have_ended() -> None:
            assert all(line["closed_at"] for line in await listed(client))

        await eventually(all_have_ended)
        lines = {line["name"]: line for line in await listed(client)}

    assert {name: (line["reason"], line["outcome"], line["reward"]) for name, line in lines.items()} == {
        "dies": ("worker_lost", "infrastructure", None),
        "ended": ("operator", "infrastructure", None),
        "unplayed": ("deleted", "unplayed", None),
    }


@pytest.mark.parametrize("headers", [EVENT_STREAM, {"Accept": "application/json"}])
async def test_steps_have_the_workers_numbers_behind_a_lost_one(tmp_path: Path, headers: dict[str, str]) -> None:
    async with logging(tmp_path) as (built, _, client):
        await create(client)
        built.backend.only.counts_turns = True
        (session,) = built.backend.only.sessions.values()
        for number in range(3):
            if number == 1:
                session.ran.append("a step of which the log knows nothing")
            body = {"name": "echo", "input": {"x": 1}}
            assert (await client.post("/math/call", json=body, headers=headers)).status_code == 200
        episode = await shown(client, "one")

    assert [step["number"] for step in episode["steps"]] == [1, 3, 4]


async def test_a_failed_call_is_shown_with_its_error(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, _, client):
        await create(client)
        body = {"name": "gate", "input": {}}
        async with under_way(client.post("/math/call", json=body)) as (asked,):

            async def is_waiting() -> None:
                assert built.backend.only.waiting == 1

            await eventually(is_waiting)
            await built.backend.only.die()
            answer = await asked
        episode = await shown(client, "one")

    assert answer.status_code == 410 or "error" in answer.text
    (step,) = episode["steps"]
    assert step["outcome"] == "worker_lost"
    assert step["error"]
    assert "reward" not in step


async def test_a_call_whose_trainer_left_is_shown_without_a_result(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, _, client):
        await create(client)
        async with under_way(client.post("/math/call", json={"name": "gate", "input": {}})) as (asked,):

            async def is_waiting() -> None:
                assert built.backend.only.waiting == 1

            await eventually(is_waiting)
            await hang_up(asked)

            async def is_left() -> None:
                (step,) = (await shown(client, "one"))["steps"]
                assert step["outcome"] == "left"
                assert "blocks" not in step

            await eventually(is_left)


async def test_areal_s_steps_are_shown_as_the_gateway_understood_them(tmp_path: Path) -> None:
    splits = tasks(train=[{"id": "a", "question": "1+1"}])
    async with logging(tmp_path, tasks_math=splits) as (_, _, client):
        begun = await client.post("/areal/math/api/episode/start", json={"sample_id": 0})
        id = begun.json()["episode_id"]
        action = {"type": "structured", "content": {"tool": "go_on", "input": {"y": 2}}}
        await client.post("/areal/math/api/episode/step", json={"episode_id": id, "action": action})
        (line,) = await listed(client, environment="math", split="train")
        episode = await shown(client, line["id"])

    assert line["protocol"] == "areal"
    assert [step["operation"] for step in episode["steps"]] == ["prompt", "call"]
    assert episode["steps"][1]["action"] == {"fields": {"tool": "go_on", "input": {"y": 2}}}
    assert episode["steps"][1]["blocks"]


async def test_neither_keys_nor_secrets_of_sessions_are_stored(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, gateway, client):
        secret, key = "session-secret-1", "alice-key-123"
        wish = {"env_name": "math", "task_spec": {"question": f"{secret} {key}"}, "secrets": {"TOKEN": secret}}
        assert (await client.post("/create", json=wish)).status_code == 200
        await client.get("/math/prompt")
        await client.post("/math/call", json={"name": "echo", "input": {"said": f"{secret} {key}"}})
        episode = await shown(client, "one")
        await gateway.log.flush()

    stored = b"".join(content(tmp_path))
    assert secret.encode() not in stored
    assert key.encode() not in stored
    assert episode["begin"]["spec"] == {"question": f"{'*' * len(secret)} {'*' * len(key)}"}
    assert episode["steps"][1]["action"]["input"] == {"said": f"{'*' * len(secret)} {'*' * len(key)}"}


async def test_a_replica_that_does_not_know_a_session_s_secrets_records_none_of_its_calls(tmp_path: Path) -> None:
    async with stack(step_log=tmp_path, **LOG) as built:
        first, second = built.first, built.another()
        async with first.looping(), second.looping(), first.serving() as one, second.serving() as other:
            for client in (one, other):
                client.headers["X-API-Key"] = "alice-key-123"
            wish = {"env_name": "math", "task_spec": {}, "secrets": {"TOKEN": "session-secret-1"}}
            assert (await one.post("/create", json=wish)).status_code == 200
            for client in (one, other):
                body = {"name": "echo", "input": {"said": "session-secret-1"}}
                assert (await client.post("/math/call", json=body)).status_code == 200
            await second.log.flush()
            episode = await shown(one, "one")

    assert [step["action"]["input"] for step in episode["steps"]] == [{"said": "*" * 16}]
    assert b"session-secret-1" not in b"".join(content(tmp_path))


@pytest.mark.parametrize(
    ("mode", "episodes", "steps"), [(StepLogging.FULL, 1, 1), (StepLogging.SAMPLED, 1, 0), (StepLogging.OFF, 0, 0)]
)
async def test_an_environment_chooses_what_is_kept(
    tmp_path: Path, mode: StepLogging, episodes: int, steps: int
) -> None:
    kept = replace(environment(), step_log=StepLogPolicy(mode=mode, share=1e-9))
    async with logging(tmp_path, kept) as (_, _, client):
        await create(client)
        await call(client)
        await delete(client)
        lines = await listed(client)
        found = [await shown(client, line["id"]) for line in lines]

    assert len(lines) == episodes
    assert sum(len(episode["steps"]) for episode in found) == steps


async def test_replicas_share_one_log(tmp_path: Path) -> None:
    async with stack(step_log=tmp_path, **LOG) as built:
        first, second = built.first, built.another()
        async with first.looping(), second.looping(), first.serving() as one, second.serving() as other:
            for client in (one, other):
                client.headers["X-API-Key"] = "alice-key-123"
            await create(one)
            await call(one)
            await call(other)
            await delete(other)

            async def both_are_shown() -> None:
                for client in (one, other):
                    episode = await shown(client, "one")
                    assert [step["outcome"] for step in episode["steps"]] == ["ok", "ok"]
                    assert episode["closed_at"]

            await eventually(both_are_shown)


async def test_gateways_with_one_folder_list_their_own_episodes_and_environments(tmp_path: Path) -> None:
    async with (
        logging(tmp_path, tasks_math=tasks(train=[{"id": "a", "question": "1+1"}])) as (_, one, first),
        logging(tmp_path, environment("words")) as (_, two, second),
    ):
        one.log.gateway, two.log.gateway = "1" * 32, "2" * 32
        for client, name in ((first, "math"), (second, "words")):
            opened = await client.post("/create", json={"env_name": name, "task_spec": {"question": "1+1"}})
            assert opened.status_code == 200, opened.text
            await delete(client)
        own = [[line["environment"] for line in await listed(client)] for client in (first, second)]
        both = [line["environment"] for line in await listed(first, gateway="*")]
        asked = await listed(first, gateway="2" * 32)
        pages = []
        for client in (first, second):
            client.headers.pop("X-API-Key")
            await client.post("/dashboard/sign-in", data={"key": OPERATOR["X-API-Key"], "path": "/dashboard/"})
            pages.append((await client.get("/dashboard/episodes.json")).json())

    assert own == [["math"], ["words"]]
    assert sorted(both) == ["math", "words"]
    assert [(line["environment"], line["gateway"]) for line in asked] == [("words", "2" * 32)]
    assert [[line["environment"] for line in page["episodes"]] for page in pages] == own
    assert [page["environments"] for page in pages] == own


async def test_episodes_are_listed_by_filters_and_in_pages(tmp_path: Path) -> None:
    splits = tasks(train=[{"id": "a", "question": "1+1"}, {"id": "b", "question": "2+2"}])
    async with logging(tmp_path, tasks_math=splits) as (_, _, client):
        for number in range(5):
            wish = {"env_name": "math", "split": "train", "index": number % 2}
            headers = {"X-Session-ID": f"s{number}", "X-Policy": f"p{number}"}
            assert (await client.post("/create", json=wish, headers=headers)).status_code == 200
        page = (await client.get("/admin/v1/episodes", params={"limit": 3}, headers=OPERATOR)).json()
        rest = await listed(client, limit=3, before=page["next"])
        of_task = await listed(client, task="b")
        nothing = await listed(client, outcome="finished")
        paid = await listed(client, reward_min=0.5)

    assert [line["name"] for line in (*page["episodes"], *rest)] == ["s4", "s3", "s2", "s1", "s0"]
    assert {line["name"] for line in of_task} == {"s1", "s3"}
    assert nothing == paid == []


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("episodes?limit=0", 400, "limit: must be a number from 1 to 1000"),
        ("episodes?color=red", 400, "color: no such parameter"),
        ("episodes?reward_min=much", 400, "reward_min: 'much' is not a number"),
        ("episodes?before=x", 400, "before: must be the value"),
        ("episodes/nobody", 404, "no episode 'nobody' is recorded"),
        ("blobs/../../secret", 404, ""),
        (f"blobs/{'0' * 64}", 404, "no blob"),
    ],
)
async def test_a_wrong_question_is_refused(tmp_path: Path, path: str, status: int, told: str) -> None:
    async with logging(tmp_path) as (_, _, client):
        answer = await client.get(f"/admin/v1/{path}", headers=OPERATOR)
        as_trainer = await client.get("/admin/v1/episodes")

    assert answer.status_code == status
    assert told in answer.text
    assert as_trainer.status_code in (401, 403)


async def test_an_image_is_stored_once_and_shown_by_its_digest(tmp_path: Path) -> None:
    image = b"\x89PNG\r\n" + bytes(range(256)) * 40
    async with logging(tmp_path) as (_, _, client):
        await create(client)
        said = base64.b64encode(image).decode()
        for _ in range(3):
            await client.post("/math/call", json={"name": "echo", "input": {"picture": said}})
        episode = await shown(client, "one")
        reference = episode["steps"][0]["action"]["input"]["picture"]
        answer = await client.get(f"/admin/v1/blobs/{reference.rpartition(':')[2]}", headers=OPERATOR)

    assert reference.startswith("blob:sha256:")
    assert answer.content == image
    assert answer.headers["content-type"] == "image/png"
    with contextlib.closing(sqlite3.connect(tmp_path / "episodes.sqlite")) as database:
        assert database.execute("SELECT count(*) FROM blobs").fetchone() == (1,)
    assert len(b"".join(content(tmp_path, "*.calls"))) < len(image)


async def test_a_folder_that_cannot_be_written_costs_records_and_no_call(tmp_path: Path) -> None:
    blocked = tmp_path / "log"
    blocked.write_text("a file where the folder should be")
    async with logging(blocked) as (_, gateway, client):
        await create(client)
        answers = [await call(client) for _ in range(3)]
        await gateway.log.flush()
        metrics = (await client.get("/metrics", headers=OPERATOR)).text

    assert {answer.status_code for answer in answers} == {200}
    assert gateway.log.lost == 4
    assert "gateway_step_log_lost 4.0" in metrics


async def test_an_operator_pages_through_all_sessions_and_ends_any_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "MAX_LISTED", 3)
    async with logging(tmp_path, environment(slots=8)) as (_, _, client):
        names = {f"s{number}" for number in range(8)}
        for name in names:
            await create(client, sid=name)

        seen: list[str] = []
        after = ""
        while not seen or after:
            query = {"limit": "3"} | ({"after": after} if after else {})
            page = (await client.get("/admin/v1/sessions", params=query, headers=OPERATOR)).json()
            seen += [session["name"] for session in page["sessions"]]
            after = page["next"]
        ended = [await client.delete(f"/admin/v1/sessions/{name}", headers=OPERATOR) for name in sorted(names)]
        refused = [
            await client.get("/admin/v1/sessions", params=query, headers=OPERATOR)
            for query in ({"limit": "0"}, {"limit": "4"}, {"from": "1"})
        ]

    assert sorted(seen) == sorted(names)
    assert [answer.status_code for answer in ended] == [200] * 8
    assert [answer.status_code for answer in refused] == [400] * 3


async def test_a_damaged_batch_is_counted_in_the_episode_and_costs_its_own_calls(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, gateway, client):
        await create(client)
        for action in ("go_on", "echo"):
            await call(client, action)
            await gateway.log.flush()
        whole = await shown(client, "one")
        (segment,) = segments(tmp_path)
        segment.write_bytes(segment.read_bytes().replace(b"echo", b"ecko"))
        damaged = await shown(client, "one")

    assert [step["action"]["tool"] for step in whole["steps"]] == ["go_on", "echo"]
    assert "damaged_batches" not in whole
    assert [step["action"]["tool"] for step in damaged["steps"]] == ["go_on"]
    assert damaged["damaged_batches"] == 1
