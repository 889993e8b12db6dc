"""NeMo Gym's protocol on fake workers: whole episodes, cookies, replicas, errors, and that no slot is left."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.core.environment import Nemo, ServerProtocol
from gateway.core.errors import StoreUnavailable
from gateway.core.session import CloseReason
from gateway.sessions.cache import session_id
from tests.deadlines import HANG_S
from tests.fakes.clock import Clock
from tests.fakes.eventually import until
from tests.fakes.workers import Start
from tests.service.foreign_world import foreign, image
from tests.service.stack import IDLE_S, OWNER, environment, impatience, running, tasks
from tests.service.wire import hang_up, under_way

COOKIE = "nemo_math"
TASKS: dict[str, Any] = {
    "tasks_math": tasks(
        train=[
            {"question": "1+1"},
            {"id": "half", "summary": {"reward": 0.5, "finished": False}},
            {"id": "unrewarded", "summary": {"reward": 0.0, "rewarded": False}},
            {"id": "judged", "summary": {"reward": 0.0, "rewarded": False, "judged": True}},
            {"id": "author", "summary": {"fault": "author"}},
            {"id": "broken", "summary": {"fault": "infrastructure"}},
            {"id": "no-number", "summary": {"reward": None}},
            {"id": "silent", "on_delete": "fail"},
            {"id": "refuse", "on_create": "refuse"},
            {"id": "fail", "on_create": "fail"},
            {"id": "die", "on_create": "die"},
            {"id": "gate", "on_create": "gate"},
            {"id": "slow", "question": "slow", "slow_setup": True},
        ],
        test=[{"question": "3+3"}],
    )
}


def row(id: str = "", **metadata: Any) -> dict[str, Any]:
    """Return a row of a data set, as NeMo Gym sends it to a resources server."""
    task = {"id": id} if id else {"split": "train", "index": 0}
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "1+1"}], "tools": [], "temperature": None},
        "verifier_metadata": {"environment": "math", **task, **metadata},
        "_ng_task_index": 0,
    }


def response(*outputs: dict[str, Any]) -> dict[str, Any]:
    return {"response": {"id": "resp_1", "object": "response", "output": list(outputs)}}


def said(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "role": "assistant", "content": content, "id": "msg_1", "status": "completed"}


CALLED = {"type": "function_call", "name": "go_on", "arguments": "{}", "call_id": "c1"}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": []}


class Agent:
    """A client that keeps the cookies of the responses, and drops them from the connection."""

    def __init__(self, http: httpx.AsyncClient, place: str = "/nemo/math") -> None:
        self.http = http
        self.place = place
        self.cookies: dict[str, str] = {}

    async def post(self, route: str, body: Any = None) -> httpx.Response:
        headers = {"Cookie": "; ".join(f"{name}={value}" for name, value in self.cookies.items())}
        self.http.cookies.clear()
        answer = await self.http.post(f"{self.place}/{route}", json=body, headers=headers)
        self.cookies.update(answer.cookies)
        return answer

    async def seed(self, id: str = "", **metadata: Any) -> httpx.Response:
        return await self.post("seed_session", row(id, **metadata))

    async def seeded(self, id: str = "") -> str:
        answer = await self.seed(id)
        assert answer.status_code == 200, answer.text
        return self.cookies[COOKIE]

    async def call(self, tool: str = "go_on", **arguments: Any) -> httpx.Response:
        return await self.post(tool, arguments)

    async def verify(self, *outputs: dict[str, Any]) -> httpx.Response:
        return await self.post("verify", row() | response(*outputs))


def refused(answer: httpx.Response, status: int, *words: str) -> None:
    """Check an error: its status, its form, its words, and that it has no reward."""
    assert answer.status_code == status, answer.text
    assert "reward" not in answer.json()
    for word in words:
        assert word in str(answer.json()["detail"])


# -- an episode -----------------------------------------------------------------------------------------------------


async def test_an_episode_is_seeded_played_and_verified_and_leaves_nothing() -> None:
    async with running(**TASKS) as (stack, gateway, http):
        agent = Agent(http)

        seeded = await agent.seed()
        name = agent.cookies[COOKIE]
        steps = [await agent.call("go_on", x=1), await agent.call("echo", x=2)]
        verified = await agent.verify(CALLED)

        assert seeded.json() == {"prompt": "1+1"}
        assert [step.json() for step in steps] == [{"result": '{"x": 1}'}, {"result": '{"x": 2}', "finished": True}]
        assert verified.json() == row() | response(CALLED) | {"reward": 1.0, "mask_sample": False}
        assert stack.backend.only.ran == ["go_on", "echo"]
        assert stack.backend.only.deleted == [session_id(OWNER, name)]
        assert await gateway.used() == 0


@pytest.mark.parametrize(
    "where",
    [
        pytest.param({"split": "train", "index": 1}, id="place"),
        pytest.param({"id": "half"}, id="id"),
        pytest.param({"split": "train", "id": "half"}, id="id in a split"),
        pytest.param({"split": "train", "index": 1, "id": "half"}, id="place and id"),
        pytest.param({"split": "train", "index": 3, "id": "half"}, id="another task is at the place now"),
        pytest.param({"split": "train", "index": 99, "id": "half"}, id="no task is at the place now"),
    ],
)
async def test_a_row_names_its_task_by_id_or_by_place(where: dict[str, Any]) -> None:
    async with running(**TASKS) as (stack, _, http):
        body = row() | {"verifier_metadata": where | {"seed": 7, "config": {"hard": True}}}

        answer = await Agent(http).post("seed_session", body)

        assert answer.status_code == 200, answer.text
        [session] = stack.backend.only.sessions.values()
        assert session.task["id"] == "half"


async def test_the_cookie_reaches_any_path_of_any_host_over_http() -> None:
    async with running(**TASKS) as (_, _, http):
        answer = await Agent(http).seed()

        [cookie] = answer.headers.get_list("set-cookie")
        name, _, attributes = cookie.partition("; ")
        assert name.startswith(f"{COOKIE}=")
        assert attributes == "Path=/; HttpOnly; SameSite=lax"


async def test_each_response_sets_the_cookie_again_because_some_agents_keep_only_the_last() -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http)
        name = await agent.seeded()

        answers = [await agent.call("go_on"), await agent.call("refuse"), await agent.verify()]

        assert [answer.cookies[COOKIE] for answer in answers] == [name] * 3


async def test_cookies_of_other_servers_change_nothing() -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http)
        name = await agent.seeded()
        agent.cookies = {"Model___policy": "a=b==", "nemo_os": name, COOKIE: f'"{name}"', "flag": ""}

        assert (await agent.call()).status_code == 200


async def test_any_replica_plays_and_verifies_an_episode() -> None:
    async with running(**TASKS) as (stack, gateway, http), stack.another().serving() as second:
        agent = Agent(http)
        await agent.seeded()
        agent.http = second

        step, verified = await agent.call(), await agent.verify()

        assert step.status_code == 200
        assert verified.json()["reward"] == 1.0
        agent.http = http
        refused(await agent.call(), 404, "seed_session")
        await gateway.eventually_used(0)


async def test_a_key_in_the_path_opens_its_own_episodes_only() -> None:
    keys = {"alice": "alice-has-a-long-key", "bob": "bob-has-a-long-key-too"}
    async with running(trainers=keys, **TASKS) as (_, _, http):
        alice, bob = (Agent(http, f"/k/{key}/nemo/math") for key in keys.values())
        assert (await alice.seed()).status_code == 200
        bob.cookies = alice.cookies

        assert (await Agent(http).seed()).status_code == 401
        refused(await bob.call(), 404)
        assert (await alice.call()).status_code == 200


async def test_the_address_of_a_host_and_a_port_and_a_recorded_rollout_reach_the_same_episode() -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http, "/nemo/math:1")
        await agent.seeded()
        agent.place = "/nemo/MATH:80/ng-rollout/0-1-a2"

        assert (await agent.verify()).json()["reward"] == 0.0


# -- the reward -----------------------------------------------------------------------------------------------------


async def test_the_final_text_goes_to_the_default_tool() -> None:
    async with running(**TASKS) as (stack, _, http):
        agent = Agent(http)
        await agent.seeded()

        verified = await agent.verify(THOUGHT, CALLED, said("  echo\n"), THOUGHT)

        assert verified.json()["reward"] == 1.0
        assert stack.backend.only.ran == ["echo"]
        [call] = [one for one in stack.backend.only.requests if one.target == "/math/call"]
        assert call.headers["idempotency-key"], "a repeated verify must not run the text again"


@pytest.mark.parametrize("is_answer", [True, False])
async def test_an_environment_says_whether_the_final_text_is_an_answer(is_answer: bool) -> None:
    async with running(replace(environment(), nemo=Nemo(final_text=is_answer)), **TASKS) as (stack, _, http):
        agent = Agent(http)
        await agent.seeded()
        await agent.call()

        assert (await agent.verify(CALLED, said("echo"))).status_code == 200
        assert stack.backend.only.ran == ["go_on", *(["echo"] if is_answer else [])]


@pytest.mark.parametrize("final_text", [None, False, True])
@pytest.mark.parametrize("protocol", [ServerProtocol.OPENENV, ServerProtocol.AREAL])
async def test_the_closing_remark_of_an_agent_is_no_move_on_a_third_party_server(
    protocol: ServerProtocol, final_text: bool | None
) -> None:
    async with foreign(replace(image(protocol), nemo=Nemo(final_text=final_text))) as world:
        agent = Agent(world.http, "/nemo/image")
        assert (await agent.seed(environment="image")).status_code == 200

        verified = await agent.verify(said("inc"))

    assert verified.json()["reward"] == (1.0 if final_text else 0.0)


@pytest.mark.parametrize("outputs", [(), (said(" "),), (said("echo"), CALLED), (said("echo"), {"type": "new"})])
async def test_an_agent_that_did_nothing_and_says_nothing_at_the_end_earns_0(outputs: tuple[Any, ...]) -> None:
    async with running(**TASKS) as (stack, _, http):
        agent = Agent(http)
        await agent.seeded()

        assert (await agent.verify(*outputs)).json()["reward"] == 0.0
        assert stack.backend.only.ran == []


async def test_an_unfinished_episode_earns_the_sum_of_its_rewards() -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http)
        await agent.seeded("half")
        await agent.call()

        assert (await agent.verify(CALLED)).json()["reward"] == 0.5


@pytest.mark.parametrize("text", ["over", "refuse"])
async def test_a_text_that_the_environment_refuses_does_not_change_the_reward(text: str) -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http)
        await agent.seeded("half")
        await agent.call()

        assert (await agent.verify(said(text))).json()["reward"] == 0.5


@pytest.mark.parametrize("task", ["unrewarded", "judged", "author", "broken", "no-number", "silent"])
async def test_an_episode_that_failed_or_has_no_reward_is_an_error_and_never_a_0(task: str) -> None:
    async with running(**TASKS) as (_, gateway, http):
        agent = Agent(http)
        await agent.seeded(task)
        await agent.call("go_on" if task == "silent" else "echo")

        verified = await agent.verify()

        assert verified.status_code in (500, 502)
        assert "reward" not in verified.json()
        assert "reward" in verified.json()["detail"]
        await gateway.eventually_used(0)


@pytest.mark.parametrize("event", ["the worker dies", "an operator ends it", "the teardown fails"])
async def test_a_finished_episode_is_verified_whatever_happens_to_its_worker(event: str) -> None:
    async with running(**TASKS) as (stack, gateway, http):
        agent = Agent(http)
        name = await agent.seeded("silent" if event == "the teardown fails" else "")
        await agent.call("echo")
        if event == "the worker dies":
            await stack.backend.only.die()
            await gateway.eventually_used(0)
        if event == "an operator ends it":
            await gateway.sessions.end(OWNER, name, CloseReason.OPERATOR, wait_s=HANG_S)

        verified = await agent.verify(CALLED)

        assert verified.json() == row() | response(CALLED) | {"reward": 1.0, "mask_sample": False}


# -- environment servers --------------------------------------------------------------------------------------------


def named(id: str = "resources-session-1", **task_data: Any) -> dict[str, Any]:
    """Return the body with which an environment server seeds a session."""
    row_data = {"verifier_metadata": row()["verifier_metadata"], **task_data}
    return {
        "resources_session_id": id,
        "episode_id": {"rollout_id": "0-1", "attempt": 0},
        "task_id": {"taskset": "math", "task_id": "train/0"},
        "task_data": row_data,
    }


def closing(id: str = "resources-session-1") -> dict[str, Any]:
    return {"resources_session_id": id, "episode_id": {"rollout_id": "0-1", "attempt": 0}}


async def test_a_repeated_seed_of_an_environment_server_gets_the_same_session_at_any_replica() -> None:
    async with running(**TASKS) as (stack, gateway, http), stack.another().serving() as second:
        agent, again = Agent(http), Agent(second)

        answers = [await agent.post("seed_session", named()), await again.post("seed_session", named())]

        assert [answer.json() for answer in answers] == [{"resources_session_id": "resources-session-1"}] * 2
        assert agent.cookies == again.cookies
        assert stack.backend.only.created == 1
        refused(await agent.post("seed_session", named(other=1)), 409, "resources-session-1")
        assert (await agent.verify(said("echo"))).json()["reward"] == 1.0
        assert await gateway.used() == 0


async def test_a_close_needs_no_cookie_and_is_repeatable() -> None:
    async with running(**TASKS) as (_, gateway, http):
        agent = Agent(http)
        await agent.post("seed_session", named())

        closes = [await Agent(http).post("close_session", closing()) for _ in range(2)]

        assert [close.json() for close in closes] == [{"resources_session_id": "resources-session-1"}] * 2
        assert await gateway.used() == 0
        refused(await agent.verify(), 404)


async def test_a_close_by_the_cookie_ends_the_episode_and_one_without_a_session_does_nothing() -> None:
    async with running(**TASKS) as (_, gateway, http):
        agent = Agent(http)
        await agent.seeded()

        assert (await Agent(http).post("close_session", {})).json() == {}
        assert await gateway.used() == 1
        assert (await agent.post("close_session", {})).json() == {}
        assert await gateway.used() == 0


async def test_metrics_are_the_mean_reward_of_the_valid_samples() -> None:
    async with running(**TASKS) as (_, _, http):
        rows = [{"reward": 1.0}, {"reward": 0}, {"reward": 1.0, "mask_sample": True}, {"error": "lost"}]

        metrics = (await Agent(http).post("aggregate_metrics", {"verify_responses": rows})).json()

        expected = {"mean/reward": 0.5}
        assert metrics == {"agent_metrics": expected, "key_metrics": expected, "group_level_metrics": []}


async def test_the_routes_that_clients_poll_answer() -> None:
    async with running(**TASKS) as (_, _, http):
        for route in ("", "/", "/health", "/healthz", "/livez", "/readyz"):
            assert (await http.get(f"/nemo/math{route}")).json() == {"status": "ok"}
        assert (await http.get("/nemo/math/reverify_mode")).json() == "unsupported"


# -- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "status", "words"),
    [
        ({"id": "none-such"}, 404, ("none-such",)),
        ({"split": "trian", "index": 0}, 404, ("trian", "train")),
        ({"split": "train", "index": 99}, 404, ("99", "13")),
        ({"split": "train", "index": 1, "id": "none-such"}, 404, ("none-such",)),
        ({"index": 0, "id": 3}, 422, ("id", "valid string")),
        ({"environment": "os", "id": "half"}, 400, ("verifier_metadata.environment", "'os'")),
        ({"split": "train"}, 422, ("verifier_metadata", "split and index")),
        ({"split": "train", "index": "0"}, 422, ("index", "valid integer")),
        ({"split": "train", "index": True}, 422, ("index", "valid integer")),
        ({"id": ""}, 422, ("'id'", "at least 1 character")),
        ([], 422, ("verifier_metadata",)),
        (None, 422, ("verifier_metadata",)),
    ],
)
async def test_a_wrong_row_says_what_is_wrong_and_leaves_the_open_episode_as_it_is(
    metadata: Any, status: int, words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(**TASKS) as (stack, gateway, http):
        agent = Agent(http)
        await agent.seeded()
        with caplog.at_level(logging.INFO):
            refused(await agent.post("seed_session", row() | {"verifier_metadata": metadata}), status, *words)

        assert await gateway.used() == 1
        assert stack.backend.only.created == 1
        assert (await agent.call()).status_code == 200
        assert ("nemo_not_found" in caplog.text) == (status in (400, 404))


@pytest.mark.parametrize(
    ("route", "body", "status", "words"),
    [
        ("seed_session", b"", 422, "verifier_metadata"),
        ("seed_session", b"{", 422, "JSON decode error"),
        ("seed_session", b"[]", 422, "valid dictionary"),
        ("seed_session", b'{"resources_session_id": ""}', 422, "resources_session_id"),
        ("seed_session", b'{"resources_session_id": "a"}', 422, "task_data"),
        ("verify", b"{}", 422, "responses_create_params"),
        ("verify", b'{"responses_create_params": {}, "response": {}}', 422, "output"),
        ("go_on", b"[1]", 422, "valid dictionary"),
        ("go_on", b'{"x": NaN}', 422, "NaN"),
        ("aggregate_metrics", b"{}", 422, "verify_responses"),
        ("a/b", b"{}", 404, "seed_session"),
        ("go_on", b'{"x": "' + 2**21 * b"x" + b'"}', 413, "exceeds"),
    ],
)
async def test_a_wrong_body_is_refused_with_its_place_and_runs_nothing(
    route: str, body: bytes, status: int, words: str
) -> None:
    async with running(**TASKS) as (stack, _, http):
        agent = Agent(http)
        name = await agent.seeded()

        headers = {"Cookie": f"{COOKIE}={name}", "Content-Type": "application/json"}
        refused(await http.post(f"/nemo/math/{route}", content=body, headers=headers), status, words)

        assert stack.backend.only.ran == []
        assert (await agent.call()).status_code == 200


async def test_another_method_and_another_environment_are_refused() -> None:
    async with running(**TASKS) as (_, _, http):
        refused(await http.get("/nemo/math/go_on"), 405, "POST")
        refused(await http.post("/nemo/math/health"), 405, "GET")
        refused(await http.post("/nemo/maths/seed_session"), 404, "math")
        refused(await http.get("/nemo"), 404, "math")


@pytest.mark.parametrize("change", ["none", "made up", "other proof", "other environment"])
async def test_a_request_without_a_valid_cookie_finds_no_episode(change: str) -> None:
    environments = environment("math"), environment("os")
    async with running(*environments, **TASKS) as (stack, _, http):
        agent = Agent(http)
        name = await agent.seeded()
        other = Agent(http, "/nemo/os" if change == "other environment" else "/nemo/math")
        other.cookies = {
            "none": {},
            "made up": {COOKIE: f"{'0' * 32}.{'0' * 16}"},
            "other proof": {COOKIE: name[:-1] + ("0" if name[-1] != "0" else "1")},
            "other environment": {"nemo_os": name},
        }[change]

        for answer in (await other.call(), await other.verify(said("echo"))):
            refused(answer, 404, "seed_session", "cookie")
        assert stack.backend.only.ran == []


async def test_a_tool_that_refuses_is_an_error_that_the_model_reads_and_the_episode_goes_on() -> None:
    async with running(**TASKS) as (_, _, http):
        agent = Agent(http)
        await agent.seeded()

        refused(await agent.call("refuse"), 422, "that is not an action")
        refused(await agent.call("over"), 409, "that is not an action")
        assert (await agent.call()).status_code == 200


async def test_a_new_seed_with_the_cookie_ends_the_episode_before() -> None:
    async with running(environment(slots=1, max_workers=1), **TASKS) as (stack, gateway, http):
        agent = Agent(http)
        first = await agent.seeded()

        second = await agent.seeded()

        assert first != second
        assert stack.backend.only.deleted == [session_id(OWNER, first)]
        assert await gateway.used() == 1


# -- losses ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "status", "words"),
    [("refuse", 400, "this task is none"), ("fail", 502, "the setup failed"), ("die", 502, "")],
)
async def test_a_seed_that_fails_says_why_and_releases_its_slot(task: str, status: int, words: str) -> None:
    async with running(**TASKS) as (_, gateway, http):
        agent = Agent(http)

        refused(await agent.seed(task), status, words)

        assert agent.cookies == {}
        await gateway.eventually_used(0)


async def test_a_seed_waits_for_the_setup_and_a_full_pool_says_when_to_come_again() -> None:
    async with running(environment(slots=1, max_workers=1), **TASKS) as (_, gateway, http):
        assert (await Agent(http).seed("slow")).json() == {"prompt": "slow"}

        with impatience(gateway, timeouts={"open_s": 0.2}):
            full = await Agent(http).seed()

        refused(full, 503)
        assert int(full.headers["retry-after"]) > 0
        assert await gateway.waiting() == 0


async def test_workers_that_do_not_start_are_an_error_with_the_end_of_their_log() -> None:
    async with running(**TASKS) as (stack, gateway, http):
        stack.backend.starts[gateway.catalog.default.name] = Start.DIES

        refused(await Agent(http).seed(), 503, "the last words of math")


async def test_a_client_that_disconnects_during_the_seed_leaves_nothing_behind() -> None:
    async with running(**TASKS) as (stack, gateway, http):
        async with under_way(Agent(http).seed("gate")) as [seeding]:
            await until(lambda: stack.backend.workers and stack.backend.only.waiting == 1)
            await hang_up(seeding)

        await gateway.eventually_used(0)
        assert stack.backend.only.sessions == {}


@pytest.mark.parametrize(("tool", "status"), [("die", 500), ("fail", 502), ("garbage", 502), ("break", 502)])
async def test_a_step_that_breaks_loses_the_episode_and_verify_never_gives_a_reward(tool: str, status: int) -> None:
    async with running(**TASKS) as (stack, gateway, http):
        agent = Agent(http)
        await agent.seeded()
        worker = stack.backend.only

        lost = await agent.call(tool)
        verified = await agent.verify(said("echo"))

        assert lost.status_code == status, lost.text
        refused(verified, 500)
        assert verified.json()["reason"]
        assert worker.ran == [tool]
        await gateway.eventually_used(0)


async def test_a_step_that_takes_too_long_ends_the_episode() -> None:
    async with running(environment(call_s=0.2), **TASKS) as (stack, gateway, http):
        agent = Agent(http)
        await agent.seeded()

        refused(await agent.call("quiet"), 504)
        refused(await agent.verify(), 500, "timeout")
        assert stack.backend.only.ran == ["quiet"]
        await gateway.eventually_used(0)


async def test_a_verify_that_the_store_did_not_answer_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(**TASKS) as (stack, _, http):
        agent = Agent(http)
        await agent.seeded()
        await agent.call("echo")

        async def is_down(*_: Any, **__: Any) -> None:
            raise StoreUnavailable("the store does not answer")

        with monkeypatch.context() as away:
            away.setattr(stack.store, "begin_close", is_down)
            refused(await agent.verify(), 503, "the store does not answer")
        assert (await agent.verify()).json()["reward"] == 1.0


async def test_an_expired_episode_says_so() -> None:
    clock = Clock()
    async with running(clock=clock, **TASKS) as (stack, gateway, http):
        agent = Agent(http)
        name = await agent.seeded()
        await gateway.session_cache.write_notes()  # later notes would renew the session
        stack.backend.only.sessions[session_id(OWNER, name)].idle_s = IDLE_S + 1
        clock.advance(IDLE_S + 1)
        await gateway.eventually_used(0)

        refused(await agent.verify(said("echo")), 500, "expired")
        assert stack.backend.only.ran == []


async def test_the_policy_tag_and_the_group_of_the_headers_are_those_of_the_session() -> None:
    async with running(**TASKS) as (_, gateway, http):
        agent = Agent(http)
        http.headers.update({"X-Policy-Tag": "step-7", "X-Group-ID": "g1", "X-Group-Size": "1"})
        name = await agent.seeded()

        assert (await gateway.found(name)).policy == "step-7"
        http.headers["X-Group-Size"] = "none"
        refused(await agent.seed(), 400, "X-Group-Size")
        assert await gateway.used() == 1
