"""The life of a session: it opens once, may be deleted at any time, and a waiting create leaves no session behind."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire.raw import RawEpisode, create, episode, new_sid
from tests.wire.targets import ALL, BOTH_GATEWAYS, ENVSERVER, OFFICIAL, OURS, Folder, Target, on, token

pytestmark = pytest.mark.wire

EXISTS = '{"detail":"Session already exists"}'


@on(ENVSERVER, *BOTH_GATEWAYS)
async def test_many_identical_concurrent_creates_of_a_live_session_leave_one_session(
    http: httpx.AsyncClient, target: Target
) -> None:
    sid = new_sid()
    body: dict[str, Any] = {"env_name": "counter", "task_spec": {"start": 7}}

    async with episode(http, {"start": 7}, environment="counter", sid=sid) as opened:
        responses = await asyncio.gather(*(create(http, sid, **body) for _ in range(50)))
        prompt = (await opened.get("prompt")).json()
        held = await target.gateway.sessions() if target.gateway else [{"name": sid}]

    assert {response.status_code for response in responses} == {200}
    assert prompt[0]["text"] == "The counter stands at 7."
    assert [session["name"] for session in held] == [sid]


@on(ENVSERVER, *BOTH_GATEWAYS)
async def test_creates_that_race_from_the_start_open_one_session(http: httpx.AsyncClient, target: Target) -> None:
    sid = new_sid()
    body: dict[str, Any] = {"env_name": "counter", "task_spec": {"start": 7}}

    responses = await asyncio.gather(*(create(http, sid, **body) for _ in range(50)))
    held = await target.gateway.sessions() if target.gateway else [{"name": sid}]
    added = [(await RawEpisode(http, sid, "counter").call("add", {"n": 1})).text for _ in range(2)]
    await http.post("/delete", headers={"X-Session-ID": sid})

    assert {response.status_code for response in responses} == {200}
    assert [session["name"] for session in held] == [sid]
    assert added == ["8", "9"]


@on(*OURS)
@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"env_name": "probe", "task_spec": {"question": "other"}}, id="another task"),
        pytest.param({"env_name": "counter", "task_spec": {"start": 1}}, id="another environment"),
        pytest.param({"env_name": "probe", "split": "train", "index": 0}, id="a reference"),
        pytest.param({"env_name": "probe", "task_spec": {"question": "first"}, "secrets": {"A": "b"}}, id="secrets"),
    ],
)
async def test_another_create_of_a_live_session_is_refused(http: httpx.AsyncClient, other: dict[str, Any]) -> None:
    async with episode(http, {"question": "first"}) as opened:
        refused = await create(http, opened.sid, **other)
        prompt = (await opened.get("prompt")).json()

    assert (refused.status_code, refused.text) == (400, EXISTS)
    assert prompt[0]["text"] == "first"


@on("openreward-server", *OURS)
async def test_a_create_for_a_live_session_is_refused_as_such_even_for_an_unknown_environment(
    http: httpx.AsyncClient,
) -> None:
    async with episode(http) as opened:
        refused = await create(http, opened.sid, env_name="nope", task_spec={})

    assert (refused.status_code, refused.text) == (400, EXISTS)


@on(*ALL)
async def test_deleting_an_unknown_session_succeeds(http: httpx.AsyncClient) -> None:
    headers = {"X-Session-ID": "never-created"}

    deleted = await http.post("/delete", headers=headers)
    session_deleted = await http.post("/delete_session", headers=headers)

    for response in (deleted, session_deleted):
        assert response.status_code == 200
        assert response.json()["sid"] == "never-created"


@on(*OFFICIAL, ENVSERVER, *BOTH_GATEWAYS)
async def test_a_session_can_be_deleted_twice(http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        responses = [await opened.delete() for _ in range(3)]

    assert [response.status_code for response in responses] == [200, 200, 200]


@on(*ALL)
async def test_delete_session_does_not_end_the_episode(http: httpx.AsyncClient) -> None:
    async with episode(http, {"start": 1}, environment="counter") as opened:
        await opened.call("add", {"n": 1})
        response = await opened.post("/delete_session")
        after = await opened.call("add", {"n": 1})

    assert response.json() == {"sid": opened.sid}
    assert after.text == "3"


@on(ENVSERVER, *BOTH_GATEWAYS)
async def test_sessions_deleted_as_soon_as_they_are_created_are_torn_down(
    http: httpx.AsyncClient, target: Target
) -> None:
    # At the deletion, the setup may not have started, may run, or may just have ended.
    already_logged = len(target.log())

    async with asyncio.timeout(HANG_S):
        for _ in range(100):
            async with episode(http):
                pass

    # A gateway gives up on a worker that does not answer, without an error for the trainer. Only the log shows it.
    assert "session_close_failed" not in target.log()[already_logged:]


@on("openreward-server", ENVSERVER, *BOTH_GATEWAYS)
async def test_a_deletion_during_the_setup_ends_the_requests_that_wait_for_the_setup(
    http: httpx.AsyncClient, folder: Folder
) -> None:
    task = {"folder": folder.inside, "gate": f"{folder.inside}/{token()}.gate"}

    async with (
        episode(http, environment="slowsetup") as bystander,
        episode(http, task, environment="slowsetup") as opened,
    ):
        waiting = asyncio.create_task(opened.get("prompt"))
        for _ in range(5):
            assert (await bystander.get("prompt")).status_code == 200
        deleted = await opened.delete()
        ended = await waiting
        after = await opened.get("prompt")

    assert deleted.status_code == 200
    assert (ended.status_code, ended.text) == (410, '{"detail":"Session deleted"}')
    assert after.status_code == 404


@on(*OFFICIAL, ENVSERVER, *BOTH_GATEWAYS)
@pytest.mark.parametrize("sid", ["a b/c?d=e&f", "x" * 200, "../../etc", "ünï".encode().decode("latin-1"), "%2F%00"])
async def test_any_text_can_be_a_session_id(http: httpx.AsyncClient, sid: str) -> None:
    headers = [(b"X-Session-ID", sid.encode("latin-1"))]
    body = {"env_name": "counter", "task_spec": {"start": 3}}

    created = await http.post("/create", headers=headers, json=body)
    prompt = await http.get("/counter/prompt", headers=headers)
    deleted = await http.post("/delete", headers=headers)

    assert created.json() == {"sid": sid}
    assert prompt.json()[0]["text"] == "The counter stands at 3."
    assert deleted.status_code == 200


@pytest.mark.usefixtures("narrow_worker")
@on(*BOTH_GATEWAYS)
async def test_a_create_waits_for_a_free_slot(http: httpx.AsyncClient) -> None:
    async with episode(http, environment="narrow") as first:
        waiting = asyncio.create_task(create(http, sid := new_sid(), env_name="narrow", task_spec={}))
        for _ in range(3):
            assert (await first.get("prompt")).status_code == 200
        admitted_beside = waiting.done()
        await first.delete()
        response = await waiting
        await http.post("/delete", headers={"X-Session-ID": sid})

    assert not admitted_beside
    assert response.status_code == 200


@pytest.mark.usefixtures("narrow_worker")
@on(*BOTH_GATEWAYS)
async def test_a_create_that_gets_no_slot_in_time_is_429_with_a_retry_after(
    http: httpx.AsyncClient, target: Target
) -> None:
    async with episode(http, environment="narrow") as first:
        response = await create(http, new_sid(), env_name="narrow", task_spec={})
        assert target.gateway is not None
        held = await target.gateway.sessions()

    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert isinstance(response.json()["detail"], str)
    assert [session["name"] for session in held] == [first.sid]


@pytest.mark.usefixtures("narrow_worker")
@on(*BOTH_GATEWAYS)
async def test_a_trainer_that_disconnects_while_it_waits_leaves_the_queue(
    http: httpx.AsyncClient, target: Target
) -> None:
    async with episode(http, environment="narrow") as first:
        waiting = [asyncio.create_task(create(http, new_sid(), env_name="narrow", task_spec={})) for _ in range(3)]
        for _ in range(3):
            assert (await first.get("prompt")).status_code == 200
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
    async with episode(http, environment="narrow") as next_one:
        assert target.gateway is not None
        held = await target.gateway.sessions()

    assert [session["name"] for session in held] == [next_one.sid]


@on(*BOTH_GATEWAYS)
async def test_a_trainer_that_disconnects_while_a_worker_starts_leaves_no_session(
    http: httpx.AsyncClient, target: Target
) -> None:
    gateway = target.gateway
    assert gateway is not None

    async def idle() -> None:
        assert [worker for worker in await gateway.workers() if worker["used"]] == []
        assert await gateway.sessions() == []

    await gateway.ask("environments/counter/restart", "POST")  # a worker that runs would answer before the hang-up
    for delay_turns in range(0, 40, 4):
        opening = asyncio.create_task(create(http, new_sid(), env_name="counter", task_spec={"start": 0}))
        for _ in range(delay_turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait({opening})

    await eventually(idle)


@on(*BOTH_GATEWAYS)
async def test_operators_see_the_owner_and_task_and_worker_of_each_session(
    http: httpx.AsyncClient, target: Target
) -> None:
    gateway = target.gateway
    assert gateway is not None

    async with episode(http, {"start": 1, "id": "mine"}, environment="counter") as opened:
        (session,) = await gateway.sessions()
        workers = await gateway.workers("counter")

    assert (session["name"], session["environment"]) == (opened.sid, "counter")
    assert (session["owner"], session["state"], session["task"]) == ("alice", "open", "mine")
    assert session["worker"] in [worker["id"] for worker in workers]
    assert sum(worker["used"] for worker in workers) == 1
