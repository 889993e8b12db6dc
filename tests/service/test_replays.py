"""Replays of recorded episodes, and marks of flaky tasks, over the operators' API of a whole gateway."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.worker import WorkerState
from gateway.tasks.curricula.model import SamplerKind
from tests.fakes.eventually import eventually
from tests.service.stack import environment, tasks
from tests.service.test_curricula import SPLIT, curriculum, open_one, played
from tests.service.test_step_log import ONE, OPERATOR, TWO, listed, logging, shown
from tests.service.wire import call, create, delete, hang_up, under_way


async def replayed(client: httpx.AsyncClient, id: str, **query: str) -> dict[str, Any]:
    answer = await client.post(f"/admin/v1/episodes/{id}/replay", params=query, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    report: dict[str, Any] = answer.json()
    return report


async def sent(client: httpx.AsyncClient, document: Any) -> httpx.Response:
    return await client.post("/admin/v1/replays", json=document, headers=OPERATOR)


async def recorded(client: httpx.AsyncClient, sid: str = "one", **task: Any) -> dict[str, Any]:
    """Play an episode of one call, and return its record."""
    await create(client, sid, **task)
    await client.get("/math/prompt", headers={"X-Session-ID": sid})
    await call(client, sid=sid)
    await delete(client, sid)
    return await shown(client, sid)


async def test_an_episode_is_played_again_with_the_same_task_and_actions(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, gateway, client):
        episode = await recorded(client, question="6*7", seed=3)
        report = await replayed(client, episode["id"])
        replay = await shown(client, report["replay"])
        by_name = await replayed(client, "one")
        lines = await listed(client)
        await gateway.records.write()
        outcomes = await gateway.records.of("math")  # type: ignore[arg-type]

    assert report["differences"] == []
    assert (report["is_same"], report["differences"], report["stopped"], report["steps"]) == (True, [], None, 1)
    assert report["reward"] == {"recorded": 1.0, "replayed": 1.0}
    assert (replay["owner"], replay["protocol"], replay["begin"]["spec"]) == (
        "(replay)",
        "replay",
        {"question": "6*7", "seed": 3},
    )
    assert by_name["episode"] == episode["id"]
    assert [line["id"] for line in lines] == [episode["id"]], "replays are no episodes of trainers"
    assert sum(record.attempts for record in outcomes.values()) == 1, "replays do not count for the task"
    assert built.backend.only.ran == ["echo"] * 3


@pytest.mark.parametrize(
    ("path", "value", "kind", "field"),
    [
        (("steps", 0, "blocks", 0, "text"), "another prompt", "text", "blocks[0].text"),
        (("steps", 1, "error"), "it broke", "text", "error"),
        (("steps", 1, "reward"), 0.25, "reward", "reward"),
        (("reward",), 0.5, "reward", "reward"),
        (("steps", 1, "finished"), None, "end", "finished"),
        (("outcome",), "stopped", "end", "outcome"),
        (("unexpected_error",), "KeyError: 'x'", "end", "unexpected_error"),
    ],
)
async def test_an_exported_episode_that_differs_is_reported_with_its_place(
    tmp_path: Path, path: tuple[Any, ...], value: Any, kind: str, field: str
) -> None:
    async with logging(tmp_path) as (_, _, client):
        episode = await recorded(client)
        same = (await sent(client, episode)).json()
        *parents, last = path
        place: Any = episode
        for name in parents:
            place = place[name]
        place[last] = value
        report = (await sent(client, episode)).json()

    assert (same["is_same"], same["differs_in"]) == (True, [])
    assert (report["is_same"], report["differs_in"]) == (kind == "text", [kind])
    (difference,) = report["differences"]
    assert (difference["kind"], difference["field"], difference["recorded"]) == (kind, field, value)
    assert difference["number"] == (path[1] if len(path) > 1 else None)


async def test_rewards_come_before_any_number_of_texts(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        episode = await recorded(client)
        episode["steps"][1]["blocks"] = [{"text": "gone"}] * 50
        episode["reward"] = 0.5
        report = (await sent(client, episode)).json()

    assert report["differs_in"] == ["reward", "text"]
    assert [one["kind"] for one in report["differences"]] == ["reward", *["text"] * 19]


@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_a_replay_asks_for_results_in_the_form_in_which_they_came(tmp_path: Path, accept: str) -> None:
    async with logging(tmp_path) as (built, _, client):
        await create(client)
        body = {"name": "echo", "input": {"x": 1}}
        await client.post("/math/call", json=body, headers={"X-Session-ID": "one", "Accept": accept})
        await delete(client)
        report = await replayed(client, "one")
        forms = [one.headers["accept"] for one in built.backend.only.requests if one.target == "/math/call"]

    assert (report["is_same"], report["differs_in"]) == (True, [])
    assert forms == [accept] * 2


async def at_the_gate(built: Any) -> None:
    assert built.backend.only.waiting == 1


async def test_a_replay_that_its_worker_breaks_is_an_error_and_no_difference(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, _, client):
        await create(client)
        async with under_way(call(client, "gate")) as (asked,):
            await eventually(lambda: at_the_gate(built))
            built.backend.only.gate.set()
            await asked
            built.backend.only.gate.clear()
        await delete(client)
        path = f"/admin/v1/episodes/{(await shown(client, 'one'))['id']}/replay"
        async with under_way(client.post(path, headers=OPERATOR)) as (asked,):
            await eventually(lambda: at_the_gate(built))
            await built.backend.only.die()
            answer = await asked

    assert answer.status_code == 502, answer.text
    assert "broke, which shows nothing about its task: step 1 failed with" in answer.json()["detail"]


async def test_a_replay_whose_author_s_code_fails_has_another_end(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        episode = await recorded(client)
        episode["begin"]["spec"]["summary"] = {"fault": "author"}
        report = (await sent(client, episode)).json()
        episode["begin"]["spec"]["summary"] = {"fault": "infrastructure"}
        broken = await sent(client, episode)

    assert (report["is_same"], report["differs_in"]) == (False, ["reward", "end"])
    assert [(one["field"], one["replayed"]) for one in report["differences"]] == [
        ("reward", None),
        ("outcome", "author_fault"),
    ]
    assert (broken.status_code, "was lost" in broken.json()["detail"]) == (502, True)


async def test_the_replay_of_an_episode_that_broke_ends_where_it_broke(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, gateway, client):
        await create(client)
        await call(client)
        async with under_way(call(client, "gate")) as (asked,):

            async def is_waiting() -> None:
                assert built.backend.only.waiting == 1

            await eventually(is_waiting)
            await built.backend.only.die()
            await asked
        await gateway.eventually_used(0)
        report = await replayed(client, "one")

    assert (report["is_same"], report["steps"]) == (True, 1)
    assert (report["stopped"]["number"], report["stopped"]["outcome"]) == (2, "worker_lost")


async def test_a_replay_waits_for_a_setup_that_still_runs(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        await create(client, slow_setup=True)
        await call(client)
        await delete(client)
        report = await replayed(client, "one")

    assert (report["is_same"], report["steps"], report["differences"]) == (True, 1, [])


def _no_action(episode: dict[str, Any]) -> None:
    episode["steps"][1]["action"] = None


def _odd_tool(episode: dict[str, Any]) -> None:
    episode["steps"][1]["action"] = {"tool": 5, "input": {}}


def _no_form(episode: dict[str, Any]) -> None:
    episode["protocol"], episode["steps"][1]["action"] = "areal", {"colour": "red"}


def _odd_operation(episode: dict[str, Any]) -> None:
    episode["steps"][1]["operation"] = "delete"


def _no_steps(episode: dict[str, Any]) -> None:
    episode["steps"] = []


def _no_begin(episode: dict[str, Any]) -> None:
    del episode["begin"]


def _cut_action(episode: dict[str, Any]) -> None:
    episode["steps"][1]["action"] = '{"name": "ec'


def _secret(episode: dict[str, Any]) -> None:
    episode["id"] = "s123"


def _image(episode: dict[str, Any]) -> None:
    episode["image"] = "sha256:another"


def _scorer(episode: dict[str, Any]) -> None:
    episode["scorer"] = "5" * 64


def _environment(episode: dict[str, Any]) -> None:
    episode["environment"] = "mathe"


def _blob(episode: dict[str, Any]) -> None:
    episode["steps"][1]["action"]["input"] = {"x": "blob:sha256:" + "0" * 64}


@pytest.mark.parametrize(
    ("spoil", "status", "detail"),
    [
        (_no_steps, 400, "had 1 steps, of which 0 are recorded"),
        (_no_begin, 400, "begin: "),
        (_cut_action, 400, "step 1 of episode"),
        (_no_action, 400, "step 1 of episode"),
        (_odd_tool, 400, "step 1 of episode"),
        (_no_form, 400, "step 1 of episode"),
        (_odd_operation, 400, "operation"),
        (_secret, 400, "had secrets, which are not recorded"),
        (_image, 400, "sha256:another"),
        (_scorer, 400, "was judged by the scorer 5555"),
        (_environment, 404, "mathe"),
        (_blob, 400, "is not stored any more"),
    ],
)
async def test_a_record_that_cannot_be_replayed_is_refused(
    tmp_path: Path, spoil: Any, status: int, detail: str
) -> None:
    async with logging(tmp_path) as (_, gateway, client):
        episode = await recorded(client)
        spoilt = copy.deepcopy(episode)
        spoil(spoilt)
        answer = await sent(client, spoilt)
        await gateway.eventually_used(0)

    assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text


@pytest.mark.parametrize("body", [b"[]", b"{", b'"x"', b'{"id": 1}', b'{"steps": [1]}'])
async def test_a_body_that_is_no_episode_is_refused(tmp_path: Path, body: bytes) -> None:
    async with logging(tmp_path) as (_, _, client):
        headers = {**OPERATOR, "content-type": "application/json"}
        answer = await client.post("/admin/v1/replays", content=body, headers=headers)

    assert answer.status_code == 400
    assert answer.json()["code"] == "invalid_request"


async def test_a_replay_needs_an_operator_and_a_recorded_episode(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        episode = await recorded(client)
        as_trainer = await client.post(f"/admin/v1/episodes/{episode['id']}/replay")
        unknown = await client.post("/admin/v1/episodes/none/replay", headers=OPERATOR)

    assert (as_trainer.status_code, unknown.status_code) == (401, 404)


async def test_an_idle_replay_waits_for_no_slot_that_a_trainer_waits_for(tmp_path: Path) -> None:
    one = environment(slots=1, max_workers=1)
    async with logging(tmp_path, one) as (_, gateway, client):
        episode = await recorded(client)
        await create(client, "holds")
        async with under_way(create(client, "waits")):
            await gateway.eventually_waiting(1)
            answer = await client.post(
                f"/admin/v1/episodes/{episode['id']}/replay", params={"idle": "true"}, headers=OPERATOR
            )
            assert (answer.status_code, answer.json()["code"]) == (503, "pool_exhausted")
            assert int(answer.headers["retry-after"]) >= 1
        await delete(client, "holds")
        assert (await replayed(client, episode["id"], idle="true"))["is_same"]


async def test_an_operator_who_hangs_up_leaves_no_session_behind(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, gateway, client):
        await create(client)
        async with under_way(call(client, "gate")) as (asked,):

            async def is_waiting() -> None:
                assert built.backend.only.waiting == 1

            await eventually(is_waiting)
            built.backend.only.gate.set()
            await asked
            built.backend.only.gate.clear()
        await delete(client)
        path = f"/admin/v1/episodes/{(await shown(client, 'one'))['id']}/replay"
        async with under_way(client.post(path, headers=OPERATOR)) as (asked,):
            await eventually(is_waiting)
            await hang_up(asked)
            built.backend.only.gate.set()
            await gateway.eventually_used(0)


# -- flaky tasks ----------------------------------------------------------------------------------------------------

TASKS = tasks(train=[{"id": f"t{number}", "question": "1+1"} for number in range(3)])


async def added(client: httpx.AsyncClient, task: str, replays: int, differing: int, **more: Any) -> dict[str, Any]:
    """Add the counts of an audit, and return the sums."""
    body = {"replays": replays, "differing": differing, **more}
    answer = await client.post(f"/admin/v1/flaky/math/{task}", json=body, headers=OPERATOR)
    assert answer.status_code == 200, answer.text
    sums: dict[str, Any] = answer.json()
    return sums


async def marked(client: httpx.AsyncClient, task: str) -> httpx.Response:
    return await client.put(f"/admin/v1/flaky/math/{task}", headers=OPERATOR)


async def marks(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = (await client.get("/admin/v1/flaky", headers=OPERATOR)).json()["tasks"]
    return rows


async def test_curricula_do_not_draw_a_task_that_is_marked_as_flaky(tmp_path: Path) -> None:
    kind = curriculum(SamplerKind.SEQUENTIAL, handles=20)
    episode = {"episode": "e1", "recorded": 1.0, "replayed": 0.0}
    async with logging(tmp_path, tasks_math=TASKS, curricula=kind) as (built, gateway, client):
        await added(client, "train/1", 50, 3)
        sums = await added(client, "t1", 10, 1, episodes=[episode])
        gateway.curricula.weights.forget()
        for handle in range(3):
            await delete(client, await open_one(client, handle))
        unmarked = (await marks(client), played(built))
        assert (await marked(client, "train/1")).status_code == 200
        gateway.curricula.weights.forget()
        for handle in range(3, 9):
            await delete(client, await open_one(client, handle))
        state = (await client.get("/admin/v1/curriculum/mine", headers=OPERATOR)).json()
        row = await marks(client)
        skipped = played(built)[3:]
        gone = await client.delete("/admin/v1/flaky/math/t1", headers=OPERATOR)
        again = await client.delete("/admin/v1/flaky/math/t1", headers=OPERATOR)
        anew = await added(client, "t1", 5, 1)
        gateway.curricula.weights.forget()
        for handle in range(9, 15):
            await delete(client, await open_one(client, handle))

        assert unmarked == ([], ["t0", "t1", "t2"])
        assert sorted(skipped) == ["t0"] * 3 + ["t2"] * 3
        assert set(played(built)[9:]) == {"t0", "t1", "t2"}
        assert (gone.status_code, again.status_code) == (204, 404)
        assert (anew["replays"], anew["differing"], anew["marked_at"]) == (5, 1, None)
        assert state["flaky"] == row
        (mark,) = row
        assert (mark["environment"], mark["task"], mark["replays"], mark["differing"]) == ("math", "t1", 60, 4)
        assert (mark["rate"], sums["interval"]) == (pytest.approx(4 / 60), mark["interval"])
        assert (mark["episodes"], mark["marked_by"]) == ([episode], "boss")
        assert mark["interval"][0] < 4 / 60 < mark["interval"][1]


async def test_a_mark_lapses_while_another_scorer_judges(tmp_path: Path) -> None:
    async with logging(tmp_path, environment(min_workers=1), tasks_math=TASKS) as (built, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)
        built.backend.only.scorer = ONE
        await recorded(client)
        await added(client, "t1", 60, 4, scorer=ONE)
        assert (await marked(client, "t1")).status_code == 200
        (before,) = await marks(client)
        built.backend.only.scorer = TWO
        await recorded(client, "two")
        after = await marks(client)
        late = await marked(client, "t1")
        anew = await added(client, "t1", 10, 0)

    assert (before["scorer"], after) == (ONE, [])
    assert (late.status_code, "no audit by the current scorer" in late.json()["detail"]) == (404, True)
    assert (anew["scorer"], anew["replays"], anew["differing"]) == (TWO, 10, 0)


async def test_a_curriculum_whose_tasks_are_all_flaky_says_so(tmp_path: Path) -> None:
    async with logging(tmp_path, tasks_math=TASKS, curricula=curriculum(handles=2)) as (_, gateway, client):
        for number in range(3):
            await added(client, f"t{number}", 20, 5)
            await marked(client, f"t{number}")
        gateway.curricula.weights.forget()
        body = {"env_name": "math", "split": SPLIT, "index": 0}
        answer = await client.post("/create", json=body, headers={"X-Session-ID": "drawn"})

    assert answer.status_code == 400
    assert "all 3 tasks in split 'train' of math are marked as flaky" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ({"replays": 0, "differing": 0}, "replays"),
        ({"replays": 2, "differing": 3}, "differing: 3 is more than the 2 replays"),
        ({"replays": 2}, "differing"),
        ({"replays": 2, "differing": 1, "rate": 0.5}, "rate"),
        ({"replays": 2, "differing": 1, "episodes": [{"episode": ""}]}, "episodes.0.episode"),
    ],
)
async def test_wrong_counts_are_refused(tmp_path: Path, body: Any, detail: str) -> None:
    async with logging(tmp_path) as (_, _, client):
        answer = await client.post("/admin/v1/flaky/math/t0", json=body, headers=OPERATOR)
        unknown = await client.post("/admin/v1/flaky/none/t0", json={"replays": 1, "differing": 1}, headers=OPERATOR)
        unaudited = await marked(client, "t0")

    assert (answer.status_code, detail in answer.json()["detail"]) == (400, True), answer.text
    assert (unknown.status_code, unaudited.status_code) == (404, 404)


async def test_replays_run_side_by_side(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, gateway, client):
        episode = await recorded(client)
        reports = await asyncio.gather(*(replayed(client, episode["id"]) for _ in range(10)))
        await gateway.eventually_used(0)

    assert all(report["is_same"] for report in reports)
    assert len({report["replay"] for report in reports}) == 10
