"""Each call runs once on two replicas that share Redis and an official ORS server, even when a replica or Redis dies.

The server keeps no idempotency keys. Its tools write each run into a ledger, and the tests count the runs there. The
server keeps no sum of rewards either: the replica that ends an episode adds up the rewards that both replicas saw.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.wire.any.places import Pair
from tests.wire.gateways import TRAINER_KEYS, Gateway
from tests.wire.raw import Outcome, parse
from tests.wire.stack import Redis
from tests.wire.targets import Folder, Roots, World, token

pytestmark = [pytest.mark.wire, pytest.mark.redis]

JSON, STREAM = "application/json", "text/event-stream"


@dataclass(frozen=True)
class Replicas:
    """Gateways A and B, the server behind both, and the folder in which its tools record their runs."""

    a: Gateway
    b: Gateway
    redis: Redis
    folder: Folder
    sid: str

    def client(self, gateway: Gateway, headers: Mapping[str, str]) -> httpx.Client:
        every = {"X-Session-ID": self.sid, "X-API-Key": TRAINER_KEYS["alice"]}
        headers = every | dict(headers)
        return httpx.Client(base_url=gateway.url, headers=headers, verify=False, trust_env=False, timeout=HANG_S)

    def post(self, gateway: Gateway, path: str, body: Any = None, **headers: str) -> httpx.Response:
        with self.client(gateway, headers) as http:
            return http.post(path, json=body) if body is not None else http.post(path)

    def create(self) -> None:
        response = self.post(self.a, "/create", {"env_name": "probe", "task_spec": {"folder": self.folder.inside}})
        assert response.status_code == 200, response.text

    def call(self, gateway: Gateway, tool: str, word: str, *, key: str = "", task_id: str = "") -> httpx.Response:
        """Call a tool and request its answer as one JSON object."""
        headers = {"Idempotency-Key": key} if key else {}
        body = {"name": tool, "input": {"token": word}} | ({"task_id": task_id} if task_id else {})
        return self.post(gateway, "/probe/call", body, Accept=JSON, **headers)

    def play(self, gateway: Gateway, tool: str, arguments: Mapping[str, Any]) -> None:
        """Call one of the agent's tools."""
        assert self.post(gateway, "/probe/call", {"name": tool, "input": arguments}, Accept=JSON).status_code == 200

    def ended(self, gateway: Gateway) -> str:
        """End the episode and return the line that the gateway logs about its end."""
        before = len(gateway.log)
        assert self.post(gateway, "/delete").status_code == 200

        def logged() -> str:
            lines = [line for line in gateway.log[before:].splitlines() if "session_closed" in line]
            assert lines
            return lines[-1]

        return eventually_now(logged)

    def stored_calls(self) -> set[str]:
        """Return the store's keys that hold calls, across all sessions."""
        with contextlib.closing(self.redis.database()) as store:
            return {key for key in store.scan_iter("*") if ":call" in key and ":call_replica:" not in key}

    def begun(self, word: str) -> None:
        """Wait until a tool has started to run."""

        def check() -> None:
            assert self.folder.runs(word) == 1

        eventually_now(check)


@pytest.fixture(scope="module")
def pair(world: World) -> Iterator[Pair]:
    """One pair of replicas for all tests. Each test opens its own episode in the server."""
    with contextlib.closing(Pair({"probe": world.named("ors-server").url})) as pair:
        yield pair
        assert "\nTraceback" not in pair.a.log + pair.b.log


@pytest.fixture
def replicas(pair: Pair, tmp_path: Path) -> Iterator[Replicas]:
    """An episode for one test, opened at A. The test may stop either gateway and Redis."""
    pair.revive()
    replicas = Replicas(pair.a, pair.b, pair.redis, Folder(str(tmp_path), Roots(tmp_path)), token())
    eventually_now(replicas.create)  # a Redis that has just lost its data must be filled again first
    yield replicas
    with contextlib.suppress(httpx.HTTPError):
        replicas.post(replicas.b, "/delete")


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that take long."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def counted(response: httpx.Response) -> str:
    """Return the tool's output: the number of times that it has recorded the token."""
    assert response.status_code == 200, response.text
    said = response.json()
    assert said["ok"] is True, said
    text: str = said["output"]["blocks"][0]["text"]
    return text


def left(waits: Future[httpx.Response]) -> None:
    """Assert that a call whose gateway died gets no answer."""
    with pytest.raises(httpx.HTTPError):
        waits.result(HANG_S)


def stream(replicas: Replicas, gateway: Gateway, body: dict[str, Any]) -> Outcome:
    """Make a call, request an event stream, and read the stream to its end."""
    with replicas.client(gateway, {"Accept": STREAM}) as http:
        response = http.post("/probe/call", json=body)
    assert response.status_code == 200, response.text
    return parse(response.text)


# -- calls with a key -----------------------------------------------------------------------------------------------


def test_concurrent_calls_with_the_same_key_at_two_replicas_run_once(
    replicas: Replicas, beside: ThreadPoolExecutor
) -> None:
    word = token()
    calls = [
        beside.submit(replicas.call, gateway, "hold", word, key=word)
        for gateway in (replicas.a, replicas.b, replicas.a, replicas.b)
    ]
    replicas.begun(word)

    replicas.folder.open_gate(word)

    assert [counted(call.result(HANG_S)) for call in calls] == ["1"] * 4
    assert replicas.folder.runs(word) == 1


def test_any_replica_answers_a_repeated_key_and_refuses_it_with_another_body(replicas: Replicas) -> None:
    word = token()
    first = replicas.call(replicas.a, "count", word, key=word)

    again = [replicas.call(gateway, "count", word, key=word) for gateway in (replicas.b, replicas.a, replicas.b)]
    other = replicas.call(replicas.b, "count", token(), key=word)

    assert counted(first) == "1"
    assert [answer.content for answer in again] == [first.content] * 3
    assert replicas.folder.runs(word) == 1
    assert other.status_code == 409
    assert "another body" in other.text


def test_the_key_of_a_running_call_is_refused_with_another_body_at_the_other_replica(
    replicas: Replicas, beside: ThreadPoolExecutor
) -> None:
    word = token()
    runs = beside.submit(replicas.call, replicas.a, "hold", word, key=word)
    replicas.begun(word)

    refused = replicas.call(replicas.b, "hold", token(), key=word)

    replicas.folder.open_gate(word)
    assert refused.status_code == 409
    assert counted(runs.result(HANG_S)) == "1"


def test_a_call_whose_replica_is_killed_has_an_unknown_outcome_and_never_runs_again(
    replicas: Replicas, beside: ThreadPoolExecutor
) -> None:
    word = token()
    cut = beside.submit(replicas.call, replicas.a, "hold", word, key=word)
    replicas.begun(word)

    replicas.a.kill()
    left(cut)
    after = replicas.call(replicas.b, "hold", word, key=word)
    replicas.folder.open_gate(word)
    later = replicas.call(replicas.b, "hold", word, key=word)

    for answer in (after, later):
        assert answer.status_code == 410, answer.text
        assert "the gateway that ran it was lost" in answer.text
        assert "retry-after" not in answer.headers
    assert replicas.folder.runs(word) == 1
    fresh = token()
    assert counted(replicas.call(replicas.b, "count", fresh, key=fresh)) == "1"  # the session goes on


def test_the_outcome_of_a_finished_call_survives_the_death_of_its_replica(replicas: Replicas) -> None:
    """With a key the outcome is there at once; without a key, by ``task_id`` as soon as the store has it."""
    keyed, plain = token(), token()
    body = {"name": "count", "input": {"token": plain}}
    first = replicas.call(replicas.a, "count", keyed, key=keyed)
    streamed = stream(replicas, replicas.a, body)

    def known() -> Outcome:
        again = stream(replicas, replicas.b, body | {"task_id": streamed.task_id})
        assert again.lines[-1] == streamed.lines[-1], again
        return again

    eventually_now(known)
    replicas.a.kill()
    assert known().task_id == streamed.task_id
    again = replicas.call(replicas.b, "count", keyed, key=keyed)
    replicas.a.start()
    restarted = replicas.call(replicas.a, "count", keyed, key=keyed)
    unknown = replicas.call(replicas.b, "count", plain, task_id="f" * 32)

    assert first.content == again.content == restarted.content
    assert (replicas.folder.runs(keyed), replicas.folder.runs(plain)) == (1, 1)
    assert unknown.json() == {"ok": False, "error": "unknown task_id", "reason": "unknown_task_id"}


def test_a_replica_that_stops_gracefully_lets_its_call_finish_and_keeps_the_outcome(
    replicas: Replicas, beside: ThreadPoolExecutor
) -> None:
    word = token()
    runs = beside.submit(replicas.call, replicas.a, "hold", word, key=word)
    replicas.begun(word)
    stops = beside.submit(replicas.a.stop)
    attached = beside.submit(replicas.call, replicas.b, "hold", word, key=word)

    replicas.folder.open_gate(word)

    assert counted(runs.result(HANG_S)) == counted(attached.result(HANG_S)) == "1"
    assert stops.result(HANG_S) == 0
    assert counted(replicas.call(replicas.b, "hold", word, key=word)) == "1"
    assert replicas.folder.runs(word) == 1


def test_without_the_store_a_call_with_a_key_is_refused_and_a_call_without_a_key_runs(replicas: Replicas) -> None:
    word, free = token(), token()
    replicas.redis.stop()

    refused = replicas.call(replicas.a, "count", word, key=word)
    went_on = replicas.call(replicas.a, "count", free)
    replicas.redis.start()

    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert replicas.folder.runs(word) == 0
    assert counted(went_on) == "1"

    def taken() -> None:
        assert counted(replicas.call(replicas.a, "count", word, key=word)) == "1"

    eventually_now(taken)
    assert replicas.folder.runs(word) == 1


def test_no_call_runs_again_after_the_store_lost_its_data(replicas: Replicas, beside: ThreadPoolExecutor) -> None:
    ran, runs = token(), token()
    assert counted(replicas.call(replicas.a, "count", ran, key=ran)) == "1"
    assert counted(replicas.call(replicas.b, "count", free := token(), key=free)) == "1"  # B now knows the session
    waits = beside.submit(replicas.call, replicas.a, "hold", runs, key=runs)
    replicas.begun(runs)
    replicas.redis.stop()
    replicas.redis.start()

    def answered() -> httpx.Response:
        answer = replicas.call(replicas.b, "count", ran, key=ran)
        assert answer.status_code != 503, answer.text
        return answer

    again = eventually_now(answered)
    attached = beside.submit(replicas.call, replicas.b, "hold", runs, key=runs)
    replicas.folder.open_gate(runs)

    assert counted(again) == "1"
    assert counted(attached.result(HANG_S)) == counted(waits.result(HANG_S)) == "1"
    assert (replicas.folder.runs(ran), replicas.folder.runs(runs)) == (1, 1)


# -- calls without a key --------------------------------------------------------------------------------------------


def test_the_other_replica_waits_for_the_outcome_of_a_running_call_by_its_task_id(
    replicas: Replicas, beside: ThreadPoolExecutor
) -> None:
    word = token()
    told: Future[str] = Future()
    cut = threading.Event()

    def cut_stream() -> None:
        body = {"name": "hold", "input": {"token": word}}
        with (
            replicas.client(replicas.a, {"Accept": STREAM}) as http,
            http.stream("POST", "/probe/call", json=body) as response,
        ):
            lines = response.iter_lines()
            while next(lines) != "event: task_id":
                pass
            told.set_result(next(lines).removeprefix("data: "))
            cut.wait(HANG_S)

    runs = beside.submit(cut_stream)
    task_id = told.result(HANG_S)

    def known() -> Future[httpx.Response]:
        """Ask until the other replica knows the id. From then on it waits for the outcome."""
        waits = beside.submit(replicas.call, replicas.b, "hold", word, task_id=task_id)
        with contextlib.suppress(TimeoutError):
            assert "unknown_task_id" not in waits.result(0.5).text
        return waits

    waits = eventually_now(known)
    cut.set()
    runs.result(HANG_S)
    replicas.folder.open_gate(word)

    assert counted(waits.result(HANG_S)) == "1"
    assert replicas.folder.runs(word) == 1


def test_the_store_drops_the_calls_of_a_session_that_ended(replicas: Replicas) -> None:
    word = token()
    before = replicas.stored_calls()
    assert counted(replicas.call(replicas.a, "count", word, key=word)) == "1"
    assert replicas.stored_calls() - before

    assert replicas.post(replicas.b, "/delete").status_code == 200

    def forgotten() -> None:
        assert replicas.stored_calls() <= before

    eventually_now(forgotten)


# -- the result of an episode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_b", "arguments", "expected"),
    [
        ("finish", {"reward": 1.0}, "outcome=finished reward=1.0 steps=2"),
        ("fail", {}, "outcome=stopped reward=0.0 steps=2"),
        ("score", {"reward": 0.25}, "outcome=stopped reward=0.25 steps=2"),
        ("score", {"reward": None}, "outcome=stopped reward=0.0 steps=2"),
    ],
)
@pytest.mark.parametrize("ends", ["a", "b"])
def test_the_summary_of_an_episode_includes_the_steps_that_both_replicas_saw(
    replicas: Replicas, at_b: str, arguments: Mapping[str, Any], expected: str, ends: str
) -> None:
    replicas.play(replicas.a, "echo", {"text": "hi"})
    replicas.play(replicas.b, at_b, arguments)

    assert expected in replicas.ended(replicas.a if ends == "a" else replicas.b)


@pytest.mark.parametrize("ends", ["a", "b"])
def test_rewards_from_calls_at_two_replicas_are_added_up(replicas: Replicas, ends: str) -> None:
    for gateway in (replicas.a, replicas.b, replicas.a):
        replicas.play(gateway, "score", {"reward": 0.25})

    assert "outcome=stopped reward=0.75 steps=" in replicas.ended(replicas.a if ends == "a" else replicas.b)


def test_steps_that_a_killed_replica_saw_still_count(replicas: Replicas) -> None:
    replicas.play(replicas.b, "echo", {"text": "hi"})
    replicas.play(replicas.a, "finish", {"reward": 1.0})

    replicas.a.kill()

    assert "outcome=finished reward=1.0 steps=2" in replicas.ended(replicas.b)


def test_the_reward_is_unknown_after_the_store_lost_its_data(replicas: Replicas) -> None:
    replicas.play(replicas.a, "score", {"reward": 0.25})
    replicas.play(replicas.b, "score", {"reward": 0.25})
    replicas.redis.stop()
    replicas.redis.start()

    def goes_on() -> None:
        replicas.play(replicas.b, "finish", {"reward": 1.0})

    eventually_now(goes_on)

    assert "outcome=finished reward=None" in replicas.ended(replicas.b)
    assert "episode_incomplete environment=probe" in replicas.b.log
