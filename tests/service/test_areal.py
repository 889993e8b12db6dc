"""AReaL's API on workers that hang, die and refuse: the clients' responses, and that no slot or session is left."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.core.environment import Areal
from gateway.core.episode import Action
from gateway.core.errors import StoreUnavailable
from gateway.core.worker import WorkerState
from gateway.sessions.cache import session_id
from gateway.sessions.service import ActiveSession
from gateway.tasks.task_ref import name_of, seed_of
from tests.deadlines import HANG_S
from tests.fakes.clock import Clock
from tests.fakes.eventually import until
from tests.fakes.workers import Start
from tests.service.stack import IDLE_S, OWNER, Replica, environment, impatience, running, stack, tasks
from tests.service.wire import call, hang_up, under_way

ONE_SLOT: dict[str, Any] = {"slots": 1, "max_workers": 1}
FIRST = seed_of(name_of({"question": "1+1"}).digest)
"""Seed of the task at index 0."""
TASKS: dict[str, Any] = {
    "tasks_math": tasks(
        train=[
            {"question": "1+1"},
            {"id": "gate", "question": "2+2", "on_create": "gate"},
            {"id": "refuse", "on_create": "refuse"},
            {"id": "fail", "on_create": "fail"},
            {"id": "die", "on_create": "die"},
            {"id": "slow", "question": "slow", "slow_setup": True},
            {"id": "stuck", "question": "stuck", "on_delete": "hang"},
        ]
    )
}


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> httpx.Response:
    answer = await client.post(f"/areal/math/api/episode/{path}", json=body)
    assert answer.headers["content-type"] == "application/json"
    return answer


async def start(client: httpx.AsyncClient, sample: str | int = 0, **fields: Any) -> httpx.Response:
    return await ask(client, "start", sample_id=sample, config={}, **fields)


async def started(client: httpx.AsyncClient, sample: str | int = 0) -> str:
    answer = await start(client, sample)
    assert answer.status_code == 200, answer.text
    episode: str = answer.json()["episode_id"]
    return episode


async def step(client: httpx.AsyncClient, episode: str, tool: str = "go_on", **headers: str) -> httpx.Response:
    body = {"episode_id": episode, "action": {"type": "text", "content": f"{tool}<|im_end|>"}}
    return await client.post("/areal/math/api/episode/step", json=body, headers=headers)


async def cancel(client: httpx.AsyncClient, episode: str) -> httpx.Response:
    return await ask(client, "cancel", episode_id=episode)


def status(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json().get("status", "")


# -- start ----------------------------------------------------------------------------------------------------------


async def test_a_start_waits_for_a_slot_and_for_the_setup() -> None:
    async with running(environment(**ONE_SLOT), **TASKS) as (_, gateway, client):
        first = await started(client)
        async with under_way(start(client, "slow")) as [waiting]:
            await gateway.eventually_waiting(1)
            await cancel(client, first)
            answer = await waiting

        assert answer.status_code == 200
        assert answer.json()["observation"]["content"] == "slow"
        assert await gateway.used() == 1


async def test_a_start_by_index_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_down(*_: Any, **__: Any) -> None:
        raise StoreUnavailable("the store does not answer")

    async with running(**TASKS) as (_, gateway, client):
        monkeypatch.setattr(gateway.stores.tasks, "version", is_down)

        by_index, by_id = await start(client, 0), await start(client, "slow")
        unknown, outside = await start(client, "nosuch"), await start(client, 99)

    assert (by_index.json()["observation"]["content"], by_id.json()["observation"]["content"]) == ("1+1", "slow")
    assert [answer.status_code for answer in (unknown, outside)] == [503, 503], "the store may know such tasks"


async def test_a_start_that_finds_no_slot_in_time_is_503_and_leaves_the_queue() -> None:
    async with running(environment(**ONE_SLOT), **TASKS) as (stack, gateway, client):
        await started(client)

        with impatience(gateway, areal={"start_s": 0.1}):
            refused = await start(client)

        assert status(refused) == (503, "capacity")
        assert await gateway.waiting() == 0
        assert stack.backend.only.created == 1


async def test_a_full_queue_refuses_immediately() -> None:
    async with running(environment(**ONE_SLOT), queue_max=1, **TASKS) as (_, gateway, client):
        await started(client)
        async with under_way(start(client)):
            await gateway.eventually_waiting(1)

            refused = await start(client)

            assert status(refused) == (503, "capacity")
            assert await gateway.waiting() == 1, "the one before still waits"


async def test_the_deadline_of_a_start_counts_the_wait_and_the_setup() -> None:
    async with running(**TASKS) as (stack, gateway, client):
        await started(client)

        with impatience(gateway, areal={"start_s": 2.0}):
            late = await start(client, "gate")

        assert status(late) == (500, "environment_lost")
        assert await gateway.used() == 1
        assert len(stack.backend.only.sessions) == 1


@pytest.mark.parametrize(
    ("sample", "said", "words"),
    [
        ("refuse", (500, "internal"), "this task is none"),
        ("fail", (500, "internal"), "the setup failed"),
        ("die", (500, "environment_lost"), "worker"),
    ],
)
async def test_a_start_that_fails_is_500_with_the_reason_and_releases_its_slot(
    sample: str, said: tuple[int, str], words: str
) -> None:
    async with running(**TASKS) as (_, gateway, client):
        failed = await start(client, sample)

        assert status(failed) == said
        assert words in failed.json()["detail"]
        assert failed.json()["error"]
        await gateway.eventually_used(0)


async def test_workers_that_do_not_start_are_500_with_the_end_of_their_log() -> None:
    async with running(**TASKS) as (stack, gateway, client):
        stack.backend.starts[gateway.catalog.default.name] = Start.DIES

        failed = await start(client)

        assert status(failed) == (500, "internal")
        assert "the last words of math" in failed.json()["detail"]


@pytest.mark.parametrize("sample", ["gate", "waits"])
async def test_a_client_that_disconnects_during_its_start_leaves_nothing_behind(sample: str) -> None:
    async with running(environment(**ONE_SLOT), **TASKS) as (stack, gateway, client):
        held = await started(client)
        if sample == "waits":
            async with under_way(start(client)) as [starting]:
                await gateway.eventually_waiting(1)
                await hang_up(starting)
                await gateway.eventually_waiting(0)
            await cancel(client, held)
        else:
            await cancel(client, held)
            async with under_way(start(client, "gate")) as [starting]:
                await until(lambda: stack.backend.only.waiting == 1)
                await hang_up(starting)

        await gateway.eventually_used(0)
        assert stack.backend.only.sessions == {}


async def test_a_client_that_disconnects_during_the_setup_leaves_nothing_behind() -> None:
    many = tasks(train=[{"question": "x", "slow_setup": True}])
    async with running(environment(**ONE_SLOT), tasks_math=many) as (stack, gateway, client):
        async with under_way(start(client)) as [starting]:
            await until(lambda: stack.backend.workers and stack.backend.only.created == 1)
            await hang_up(starting)

        await gateway.eventually_used(0)
        await until(lambda: stack.backend.only.sessions == {})


# -- step -----------------------------------------------------------------------------------------------------------


async def test_an_episode_goes_on_until_a_result_ends_it_and_is_closed_at_its_worker() -> None:
    async with running(**TASKS) as (stack, gateway, client):
        episode = await started(client)

        replies = [await step(client, episode, tool) for tool in ("go_on", "refuse", "go_on", "finish")]

        assert [reply.json()["done"] for reply in replies] == [False, False, False, True]
        assert [reply.json()["reward"] for reply in replies] == [0.0, 0.0, 0.0, 1.0]
        assert [reply.json()["info"]["turn"] for reply in replies] == [1, 2, 3, 4]
        assert stack.backend.only.deleted == [session_id(OWNER, episode)]
        assert await gateway.used() == 0
        assert (await step(client, episode)).status_code == 404


async def test_a_teardown_that_hangs_does_not_hold_up_the_last_reply() -> None:
    async with running(environment(close_s=20.0), **TASKS) as (stack, gateway, client):
        episode = await started(client, "stuck")

        reply = await step(client, episode, "finish")

        assert reply.json()["done"] is True
        assert await gateway.used() == 1  # the teardown still holds the slot after the reply
        assert (await cancel(client, episode)).status_code == 404
        await stack.backend.only.die()
        await gateway.eventually_used(0)


async def test_a_step_that_takes_too_long_loses_its_episode_and_is_no_reward() -> None:
    async with running(environment(areal=Areal(step_s=0.2)), **TASKS) as (stack, gateway, client):
        episode = await started(client)

        late = await step(client, episode, "quiet")
        after = await step(client, episode)

        assert status(late) == (500, "environment_lost")
        assert "(its environment.toml limits the time: areal.step_s = 0.2)" in late.text
        assert "reward" not in late.json()
        assert status(after) == (404, "environment_lost")
        await gateway.eventually_used(0)
        assert stack.backend.only.ran == ["quiet"]


async def test_a_session_that_breaks_in_its_worker_is_500_and_never_a_reward() -> None:
    async with running(**TASKS) as (stack, gateway, client):
        episode = await started(client)

        failed = await step(client, episode, "break")
        after = await step(client, episode)

        assert status(failed) == (500, "environment_failed")
        assert failed.json()["detail"] == "that is not an action"
        assert "reward" not in failed.json()
        assert status(after) == (404, "environment_failed")
        await gateway.eventually_used(0)
        assert stack.backend.only.ran == ["break"]


@pytest.mark.parametrize("tool", ["die", "fail", "garbage"])
async def test_a_worker_that_fails_in_mid_step_is_500_and_the_episode_is_gone(tool: str) -> None:
    async with running(**TASKS) as (stack, gateway, client):
        episode = await started(client)
        worker = stack.backend.only

        failed = await step(client, episode, tool)
        after = await step(client, episode)

        assert failed.status_code == 500
        assert failed.json()["episode_id"] == episode
        assert "reward" not in failed.json()
        assert status(after) == (404, "environment_lost")
        assert worker.ran == [tool]
        await gateway.eventually_used(0)


async def test_a_cancel_aborts_the_running_step() -> None:
    async with running(**TASKS) as (stack, gateway, client):
        episode = await started(client)
        async with under_way(step(client, episode, "quiet")) as [running_step]:
            await until(lambda: stack.backend.only.waiting == 1)

            cancelled = await cancel(client, episode)
            broken = await running_step

        assert cancelled.json() == {"status": "cancelled", "episode_id": episode}
        assert broken.status_code == 404
        assert (await cancel(client, episode)).status_code == 404
        assert await gateway.used() == 0


async def test_exactly_one_of_many_concurrent_cancels_succeeds() -> None:
    async with running(**TASKS) as (_, _gateway, client):
        episode = await started(client)

        answers = await asyncio.gather(*(cancel(client, episode) for _ in range(10)))

        assert sorted(answer.status_code for answer in answers) == [200] + [404] * 9


async def test_a_client_that_disconnects_during_a_step_leaves_the_episode_open() -> None:
    async with running(**TASKS) as (stack, gateway, client):
        episode = await started(client)
        async with under_way(step(client, episode, "quiet")) as [running_step]:
            await until(lambda: stack.backend.only.waiting == 1)
            await hang_up(running_step)

        stack.backend.only.gate.set()
        following = await step(client, episode)

        assert following.json()["info"]["turn"] == 1  # no client received the reply of the first step
        assert await gateway.used() == 1


async def test_a_second_step_waits_for_the_first() -> None:
    async with running(**TASKS) as (stack, gateway, client):
        episode = await started(client)
        async with under_way(step(client, episode, "quiet")) as [first]:
            await until(lambda: stack.backend.only.waiting == 1)
            async with under_way(step(client, episode)) as [second]:
                await until(lambda: [place.steps for place in gateway.areal._turns._places.values()] == [2])
                ran = list(stack.backend.only.ran)
                stack.backend.only.gate.set()
                answers = [await first, await second]

        assert ran == ["quiet"]
        assert [answer.status_code for answer in answers] == [200, 404]  # the first step ended the episode


async def test_of_256_concurrent_starts_as_many_succeed_as_there_are_slots_and_the_rest_leave_nothing() -> None:
    crowded = environment(slots=4, min_workers=2, max_workers=2, open_s=8.0, areal=Areal(start_s=HANG_S))
    async with running(crowded, **TASKS) as (stack, gateway, client):
        await gateway.eventually_workers(2, state=WorkerState.READY)
        answers = await asyncio.gather(*(start(client) for _ in range(256)))

        episodes = {answer.json()["episode_id"] for answer in answers if answer.status_code == 200}
        refused = [status(answer) for answer in answers if answer.status_code != 200]
        assert len(episodes) == 8
        assert refused == [(503, "capacity")] * 248
        assert (await gateway.used(), await gateway.waiting()) == (8, 0)
        assert sum(len(worker.sessions) for worker in stack.backend.workers.values()) == 8


async def test_a_start_that_gets_its_slot_at_its_deadline_is_refused_for_lack_of_capacity() -> None:
    hasty = environment(slots=1, min_workers=1, max_workers=1, areal=Areal(start_s=1e-9))
    async with running(hasty, **TASKS) as (stack, gateway, client):
        await gateway.eventually_workers(1, state=WorkerState.READY)

        answer = await start(client)

        assert status(answer) == (503, "capacity")
        assert (await gateway.used(), stack.backend.only.sessions) == (0, {})


async def test_a_step_after_an_end_whose_reply_was_lost_is_404() -> None:
    async with running(**TASKS) as (_, gateway, client):
        episode = await started(client)

        answer = await step(client, episode, "over")

        assert answer.status_code == 404
        assert await gateway.used() == 0


async def test_the_key_of_a_step_reaches_the_worker_and_its_turn_counts_once() -> None:
    async with running(**TASKS) as (stack, _, client):
        episode = await started(client)

        turns = [
            (await step(client, episode, **({"Idempotency-Key": key} if key else {}))).json()["info"]["turn"]
            for key in ("a", "a", "", "b")
        ]

        calls = [request for request in stack.backend.only.requests if request.target.endswith("/call")]
        assert turns == [1, 1, 2, 3]
        assert [request.headers.get("idempotency-key") for request in calls] == ["a", "a", None, "b"]


async def test_all_replicas_share_one_turn_count_also_after_a_restart() -> None:
    async with stack(**TASKS) as built:
        second = built.another()
        async with built.first.looping(), second.looping():
            async with built.first.serving() as one, second.serving() as other:
                episode = await started(one)
                turns = [(await step(client, episode)).json()["info"]["turn"] for client in (one, other, one, other)]
            restarted = built.another()
            async with restarted.serving() as client:
                turns.append((await step(client, episode)).json()["info"]["turn"])

        assert turns == [1, 2, 3, 4, 5]


async def test_the_turn_limit_ends_the_episode_at_its_worker() -> None:
    async with running(environment(areal=Areal(max_turns=2)), **TASKS) as (stack, gateway, client):
        episode = await started(client)

        replies = [(await step(client, episode)).json() for _ in range(2)]

        assert [reply["done"] for reply in replies] == [False, True]
        assert replies[1]["info"]["status"] == "task limit reached"
        assert stack.backend.only.deleted == [session_id(OWNER, episode)]
        assert await gateway.used() == 0


async def test_steps_go_on_without_the_store_which_counts_their_turns_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(environment(areal=Areal(max_turns=4)), **TASKS) as (stack, _, client):
        episode = await started(client)
        await step(client, episode)

        async def is_down(*_: Any, **__: Any) -> int:
            raise StoreUnavailable("the store does not answer")

        with monkeypatch.context() as away:
            away.setattr(stack.store, "count_turn", is_down)
            without = [(await step(client, episode)).json() for _ in range(2)]
        last = (await step(client, episode)).json()

        assert [reply["done"] for reply in without] == [False, False]
        assert (last["done"], last["info"]["status"]) == (True, "task limit reached")
        assert stack.backend.only.ran == ["go_on"] * 4


# -- expiry, keys and other cases -----------------------------------------------------------------------------------


async def test_an_idle_episode_expires_and_its_next_step_states_so() -> None:
    clock = Clock()
    async with running(clock=clock, **TASKS) as (stack, gateway, client):
        episode = await started(client)
        stack.backend.only.sessions[session_id(OWNER, episode)].idle_s = IDLE_S + 1

        clock.advance(IDLE_S - 1)
        alive = await step(client, episode)
        await gateway.session_cache.write_notes()  # later notes would renew the session
        stack.backend.only.sessions[session_id(OWNER, episode)].idle_s = IDLE_S + 1
        clock.advance(IDLE_S + 1)
        await gateway.eventually_used(0)
        late = await step(client, episode)

        assert alive.status_code == 200
        assert late.status_code == 404
        assert late.json()["error"] == "episode not found"
        assert late.json()["episode_id"] == episode
        assert "expired" in late.json()["detail"]
        assert (await client.get("/api/health")).json()["expired"] == 1


async def test_the_trainer_key_in_the_path_selects_the_owner_of_an_episode() -> None:
    keys = {"alice": "alice-key", "bob": "bobs-key"}
    async with running(trainers=keys, **TASKS) as (_, gateway, client):
        made = await client.post("/k/alice-key/areal/math/api/episode/start", json={"sample_id": 0})
        body = {"episode_id": made.json()["episode_id"]}

        answers = [
            await client.post(f"{prefix}/episode/cancel", json=body)
            for prefix in ("/areal/math/api", "/k/bobs-key/areal/math/api", "/k/alice-key/api", "/k/alice-key/api")
        ]

        assert [answer.status_code for answer in answers] == [401, 404, 200, 404]
        assert await gateway.used() == 0


async def test_an_episode_of_another_environment_is_not_found_there() -> None:
    async with running(environment("math"), environment("coding"), **TASKS) as (_, _gateway, client):
        episode = await started(client)

        elsewhere = await client.post("/areal/coding/api/episode/cancel", json={"episode_id": episode})

        assert elsewhere.status_code == 404
        assert (await cancel(client, episode)).status_code == 200


async def test_task_info_and_health_need_no_worker() -> None:
    async with running(**TASKS) as (stack, _, client):
        info = (await client.get("/areal/MATH/api/task/info/")).json()
        health = (await client.get("/api/health")).json()

        assert (info["name"], info["num_samples"], info["max_episode_length"]) == ("math", 7, 20)
        assert health == {
            "status": "healthy",
            "active_episodes": 0,
            "task_name": "math",
            "starting": 0,
            "queued": 0,
            "boxes": 0,
            "expired": 0,
            "leaked": 0,
        }
        assert stack.backend.asked == 0


async def test_health_counts_open_episodes_and_waiting_starts() -> None:
    async with running(environment(**ONE_SLOT), **TASKS) as (_, gateway, client):
        await started(client)
        async with under_way(start(client)):
            await gateway.eventually_waiting(1)
            health = (await client.get("/areal/math/api/health")).json()

        assert (health["active_episodes"], health["queued"], health["boxes"]) == (1, 1, 1)


async def test_a_fault_of_the_gateway_is_500_in_the_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(**TASKS) as (_, _gateway, client):
        episode = await started(client)

        async def has_a_bug(*_: Any, **__: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(ActiveSession, "play", has_a_bug)
        answer = await step(client, episode)

        assert status(answer) == (500, "internal")
        assert answer.json()["episode_id"] == episode
        assert "ZeroDivisionError" not in answer.text


async def test_a_session_that_was_opened_over_ors_can_be_cancelled_over_areal() -> None:
    async with running(**TASKS) as (_, gateway, client):
        await client.post("/create", json={"env_name": "math", "task_spec": {}}, headers={"X-Session-ID": "one"})

        answer = await cancel(client, "one")

        assert answer.status_code == 200
        assert (await call(client)).status_code == 404
        assert await gateway.used() == 0


@pytest.mark.parametrize("after", range(40))
async def test_a_start_that_is_cancelled_at_any_moment_leaves_no_slot_behind(after: int) -> None:
    async with stack(environment(**ONE_SLOT), **TASKS) as built, built.first.looping():
        first = built.first
        await _ready(first)
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": "/areal/math/api/episode/start",
            "headers": [],
            "gateway.owner": OWNER,
        }
        messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": b'{"sample_id": 0}', "more_body": False})
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        starting = asyncio.ensure_future(first.areal(scope, messages.get, send))
        for _ in range(after):
            await asyncio.sleep(0)
        messages.put_nowait({"type": "http.disconnect"})
        await asyncio.wait({starting})

        if not sent:
            await first.eventually_used(0)
        else:
            assert await first.used() == 1


async def _ready(replica: Replica) -> None:
    """Wait for a ready worker, so that a start takes few turns of the event loop."""
    chosen = replica.catalog.default
    await replica.queries.tools(chosen)
    await replica.eventually_used(0)


async def test_a_step_that_is_cancelled_at_any_moment_leaves_the_episode_idle() -> None:
    async with running(**TASKS) as (_, gateway, client):
        for after in range(30):
            episode = await started(client)
            acting = asyncio.ensure_future(gateway.act(episode, Action(text="go_on")))
            for _ in range(after):
                await asyncio.sleep(0)

            acting.cancel()
            await asyncio.wait({acting})

            assert not gateway.session_cache.is_busy()
            assert (await step(client, episode)).json()["info"]["turn"] == 1
            await ask(client, "cancel", episode_id=episode)


@pytest.mark.parametrize(
    ("fields", "seed", "config"),
    [({}, FIRST, None), ({"config": {"seed": 7}}, 7, {"seed": 7}), ({"config": {"a": 1}}, FIRST, {"a": 1})],
)
async def test_the_seed_and_the_configuration_reach_the_worker(
    fields: dict[str, Any], seed: int, config: dict[str, Any] | None
) -> None:
    async with running(**TASKS) as (stack, _, client):
        for sample in (0, "0"):
            await ask(client, "start", sample_id=sample, **fields)

        wishes = [json.loads(one.body) for one in stack.backend.only.requests if one.target == "/create"]
        assert [(wish["seed"], wish.get("config")) for wish in wishes] == [(seed, config)] * 2
