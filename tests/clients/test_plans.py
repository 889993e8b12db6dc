"""What the client sends, repeats and raises, with scripted answers instead of a server."""

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import env_gateway_client as client
import pytest
from env_gateway_client import sse
from env_gateway_client.content import read_result
from env_gateway_client.errors import error_of
from env_gateway_client.http import base_url
from env_gateway_client.plans import Answer, EpisodeState, Lost, Pause, Plan, Plans, Send, Timeouts, arguments_of

T = TypeVar("T")
Script = Answer | Lost | Callable[[Send], Answer]
DONE = {"ok": True, "output": {"blocks": [], "metadata": None, "reward": 1.0, "finished": True}}


class Player:
    """Runs plans against a script of answers, and a clock that only pauses move."""

    def __init__(self, *script: Script, is_gateway: bool = True, timeouts: Timeouts | None = None) -> None:
        self.now = 0.0
        self.sent: list[Send] = []
        self.pauses: list[float] = []
        self.plans = Plans("secret-key", timeouts or Timeouts(), lambda: self.now)
        self.plans._is_gateway = is_gateway
        self.plans._was_reached = True
        self._script = list(script)

    def run(self, plan: Plan[T]) -> T:
        try:
            effect = next(plan)
            while True:
                if isinstance(effect, Pause):
                    self.pauses.append(effect.seconds)
                    self.now += effect.seconds
                    effect = plan.send(None)
                    continue
                self.sent.append(effect)
                step = self._script.pop(0) if len(self._script) > 1 else self._script[0]
                effect = plan.throw(step) if isinstance(step, Lost) else plan.send(_answer(step, effect))
        except StopIteration as stop:
            result: T = stop.value
            return result

    def call(self) -> client.StepResult:
        return self.run(self.plans.call("sid", "math", "submit", {"answer": "40"}))

    def open(self, **options: Any) -> None:
        self.run(self.plans.open("sid", "math", {"split": "train", "index": 0, **options}))  # type: ignore[typeddict-item]


def _answer(step: Answer | Callable[[Send], Answer], effect: Send) -> Answer:
    return step if isinstance(step, Answer) else step(effect)


def answer(status: int, body: object, **headers: str) -> Answer:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, {"content-type": "application/json"} | names, json.dumps(body).encode())


def stream(*events: tuple[str, str], cut: int = 0) -> Answer:
    text = "".join(f"event: {name}\r\ndata: {data}\r\n\r\n" for name, data in events)
    return Answer(200, {"content-type": "text/event-stream; charset=utf-8"}, text.encode()[: len(text) - cut])


OPENED: Sequence[Script] = (answer(200, {"sid": "sid"}), answer(200, []), answer(200, {"tools": []}))
FULL = answer(429, {"detail": "no slot became free", "code": "pool_exhausted"}, retry_after="7")


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"detail": "Invalid split: there is no 'x'"}, client.UnknownTask),
        (400, {"detail": "Invalid index"}, client.UnknownTask),
        (400, {"detail": "Session already exists"}, client.SessionExists),
        (400, {"detail": "X-Group-Size: must be a number"}, client.InvalidRequest),
        (401, {"detail": "this key is not known here"}, client.NotAllowed),
        (403, {"detail": "no", "code": "not_permitted"}, client.NotPermitted),
        (404, {"detail": "unknown environment 'x'; there are math"}, client.UnknownEnvironment),
        (404, {"detail": "Not Found: unknown environment 'x'; there are math"}, client.UnknownEnvironment),
        (404, {"detail": "Active environment not found"}, client.SessionNotFound),
        (404, {"detail": "Not Found"}, client.InvalidRequest),
        (409, {"detail": "Idempotency-Key was used with another body"}, client.CallConflict),
        (409, {"detail": "the outcome of this Idempotency-Key is no longer kept"}, client.CallConflict),
        (409, {"detail": "the session belongs to environment 'a', not to 'b'"}, client.InvalidRequest),
        (410, {"detail": "gone", "code": "session_closed", "reason": "expired"}, client.SessionLost),
        (410, {"detail": "gone", "code": "author_fault", "reason": "author_fault"}, client.AuthorFault),
        (410, {"detail": "gone", "code": "session_failed", "reason": "session_failed"}, client.SessionFailed),
        (410, {"detail": "Session deleted"}, client.SessionNotFound),
        (413, {"detail": "the body exceeds 8 bytes"}, client.InvalidRequest),
        (422, {"detail": [{"loc": ["body", "seed"], "msg": "not an integer"}]}, client.InvalidRequest),
        (429, {"detail": "full", "code": "pool_exhausted"}, client.NoCapacity),
        (429, {"detail": "too many", "code": "too_many_bytes"}, client.TooManyBytes),
        (429, {"detail": "too often", "code": "rate_limited"}, client.RateLimited),
        (500, {"detail": "RuntimeError: x"}, client.ServerFailed),
        (500, {"detail": "x", "code": "author_fault", "reason": "author_fault"}, client.AuthorFault),
        (502, {"detail": "x", "code": "upstream_gone", "reason": "worker_lost"}, client.SessionLost),
        (503, {"detail": "x", "code": "start_failed", "reason": "start_failed"}, client.StartFailed),
        (503, {"detail": "x", "code": "store_unavailable"}, client.StoreUnavailable),
        (504, {"detail": "x", "code": "timeout", "reason": "timeout"}, client.SessionLost),
        (308, {}, client.ProtocolError),
    ],
)
def test_each_answer_has_one_class_of_error(status: int, body: object, kind: type[client.GatewayError]) -> None:
    error = error_of(status, {"retry-after": "3"}, json.dumps(body).encode())

    assert type(error) is kind
    assert error.status == status
    assert error.retry_after_s == 3.0
    assert "fix: " in str(error)


def test_the_message_of_a_422_names_each_wrong_field() -> None:
    body = {"detail": [{"loc": ["body", "seed"], "msg": "not an integer"}, {"loc": ["body", "x"], "msg": "unknown"}]}

    assert error_of(422, {}, json.dumps(body).encode()).detail == "body.seed: not an integer; body.x: unknown"


def test_an_error_survives_pickling_with_all_its_fields() -> None:
    error = error_of(410, {}, b'{"detail": "gone", "code": "session_closed", "reason": "expired"}')

    again = pickle.loads(pickle.dumps(error))

    assert (type(again), str(again), again.__dict__) == (client.SessionLost, str(error), error.__dict__)
    assert "keep_alive=True" in str(again)


# -- calls ------------------------------------------------------------------------------------------------------------


def test_a_call_has_a_key_of_its_own() -> None:
    player = Player(answer(200, DONE))

    results = [player.call(), player.call()]

    keys = [send.headers["idempotency-key"] for send in player.sent]
    assert len(set(keys)) == 2
    assert [result.reward for result in results] == [1.0, 1.0]
    assert player.sent[0].headers["authorization"] == "Bearer secret-key"
    assert "secret-key" not in repr(player.sent[0])


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param(Lost("reset", sent=True), id="the connection broke"),
        pytest.param(Lost("refused", sent=False), id="no connection"),
        pytest.param(
            answer(503, {"detail": "x", "code": "upstream_gone", "reason": "worker_lost"}, retry_after="1"), id="unsent"
        ),
        pytest.param(answer(503, {"detail": "x", "code": "store_unavailable"}, retry_after="2"), id="store"),
        pytest.param(answer(429, {"detail": "too many calls wait in this session"}, retry_after="1"), id="many calls"),
        pytest.param(Answer(502, {"content-type": "text/html"}, b"<html>bad gateway</html>"), id="a proxy"),
        pytest.param(Answer(503, {"x-backend-state": "starting", "retry-after": "2"}, b"{}"), id="setup"),
    ],
)
def test_a_call_that_was_not_answered_is_repeated_with_its_key(trouble: Script) -> None:
    player = Player(trouble, trouble, answer(200, DONE))

    result = player.call()

    assert result.reward == 1.0
    assert len({(send.headers["idempotency-key"], send.body) for send in player.sent}) == 1
    assert len(player.sent) == 3


@pytest.mark.parametrize(
    ("final", "kind"),
    [
        (answer(410, {"detail": "x", "code": "upstream_gone", "reason": "worker_lost"}), client.SessionLost),
        (answer(409, {"detail": "the outcome of this Idempotency-Key is no longer kept"}), client.CallConflict),
        (answer(404, {"detail": "Active environment not found"}), client.SessionNotFound),
        (answer(200, {"ok": False, "error": "x", "reason": "author_fault"}), client.AuthorFault),
        (answer(200, {"ok": False, "error": "x", "reason": "session_failed"}), client.SessionFailed),
        (answer(200, {"ok": True}), client.ProtocolError),
        (answer(500, {"detail": "x"}), client.ServerFailed),
        (stream(("task_id", "1"), ("error", "worker_lost: the worker died")), client.SessionLost),
        (Lost("late", sent=True, timed_out=True), client.DeadlinePassed),
    ],
)
def test_a_failed_call_is_not_repeated_and_ends_its_episode_without_a_reward(final: Script, kind: Any) -> None:
    player = Player(final)
    episode = EpisodeState("math")
    episode.steps.append(client.StepResult(blocks=(), reward=1.0, finished=False))

    with pytest.raises(kind) as caught:
        player.call()
    episode.failed(caught.value)

    assert len(player.sent) == 1
    with pytest.raises(kind):
        _ = episode.reward
    with pytest.raises(kind):
        episode.check_open()


def test_a_standard_server_gets_no_call_twice() -> None:
    player = Player(Lost("reset", sent=True), is_gateway=False)

    with pytest.raises(client.ConnectionLost) as caught:
        player.call()

    assert len(player.sent) == 1
    assert caught.value.may_have_run


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param(Lost("reset", sent=True, partial=b"event: task_id\r\ndata: t1\r\n\r\n: ping\r\n"), id="broken"),
        pytest.param(stream(("task_id", "t1"), ("end", "{}"), cut=10), id="ended early"),
    ],
)
def test_a_standard_server_is_asked_again_with_the_task_id_of_its_stream(cut: Script) -> None:
    player = Player(cut, stream(("task_id", "t1"), ("end", json.dumps(DONE))), is_gateway=False)

    result = player.call()

    assert result.finished
    assert [json.loads(send.body).get("task_id") for send in player.sent] == [None, "t1"]


def test_a_gateway_that_was_never_reached_is_not_tried_again() -> None:
    player = Player(Lost("refused", sent=False))
    player.plans._was_reached = False

    with pytest.raises(client.Unreachable):
        player.run(player.plans.environments())

    assert player.pauses == []


def test_a_lost_gateway_is_tried_for_a_limited_time() -> None:
    player = Player(Lost("refused", sent=False), timeouts=Timeouts(reconnect_s=20))

    with pytest.raises(client.Unreachable):
        player.call()

    assert 10 < sum(player.pauses) <= 20


# -- openings ---------------------------------------------------------------------------------------------------------


def test_an_opening_waits_as_long_as_the_gateway_asks_for() -> None:
    player = Player(FULL, FULL, *OPENED)

    player.open()

    assert player.pauses == [7.0, 7.0]
    assert [send.path for send in player.sent] == ["/create"] * 3 + ["/math/prompt", "/math/task_tools"]
    assert {send.headers["x-session-id"] for send in player.sent} == {"sid"}


def test_an_opening_gives_up_before_a_wait_that_exceeds_its_limit() -> None:
    player = Player(FULL)

    with pytest.raises(client.NoCapacity) as caught:
        player.open(wait_s=20)

    assert player.pauses == [7.0, 7.0]
    assert caught.value.retry_after_s == 7.0


def test_an_opening_that_is_still_queued_at_its_limit_found_no_capacity() -> None:
    player = Player(Lost("late", sent=True, timed_out=True))

    with pytest.raises(client.NoCapacity, match="within 5 s"):
        player.open(wait_s=5)


def test_a_start_that_fails_is_reported_at_once() -> None:
    player = Player(answer(503, {"detail": "log", "code": "start_failed", "reason": "start_failed"}, retry_after="9"))

    with pytest.raises(client.StartFailed) as caught:
        player.open()

    assert caught.value.retry_after_s == 9.0
    assert len(player.sent) == 1


def test_an_opening_sends_its_options() -> None:
    player = Player(*OPENED)

    player.open(seed=7, config={"size": 4}, policy="step-1", group=("g", 8), secrets={"TOKEN": "hidden"})

    create = player.sent[0]
    assert json.loads(create.body) == {
        "env_name": "math",
        "split": "train",
        "index": 0,
        "seed": 7,
        "config": {"size": 4},
    }
    names = ("x-policy-tag", "x-group-id", "x-group-size")
    assert [create.headers[name] for name in names] == ["step-1", "g", "8"]
    assert "hidden" not in repr(create)


@pytest.mark.parametrize(
    "options",
    [
        {"task": "an-id"},
        {"index": None},
        {"split": None, "index": None},
        {"group": ("ä", 8)},
        {"policy": "x" * 201},
        {"config": {"x": float("nan")}},
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_sent(options: dict[str, Any]) -> None:
    player = Player(*OPENED)

    with pytest.raises(client.InvalidRequest):
        player.open(**options)

    assert player.sent == []


@pytest.mark.parametrize(
    ("probe", "expected"),
    [(answer(200, {"status": "ok"}), True), (Answer(308, {}, b""), False), (answer(404, {"detail": "x"}), False)],
)
def test_the_first_opening_finds_out_whether_the_server_is_a_gateway(probe: Answer, expected: bool) -> None:
    player = Player(probe, *OPENED)
    player.plans._is_gateway = None

    player.open()

    assert player.plans._is_gateway is expected


# -- values -----------------------------------------------------------------------------------------------------------


def test_a_listing_goes_on_until_a_page_is_not_full() -> None:
    def page(send: Send) -> Answer:
        body = json.loads(send.body)
        return answer(200, {"tasks": [{"id": str(i)} for i in range(1200)][body["start"] : body["stop"]]})

    player = Player(page)

    tasks = player.run(player.plans.tasks("math", "train", 0, None))

    assert [task.index for task in tasks] == list(range(1200))
    assert tasks[-1].id == "1199"
    assert len(player.sent) == 3


def test_the_reward_of_an_episode_is_the_sum_and_none_without_any() -> None:
    episode = EpisodeState("math")
    assert episode.reward is None

    for reward in (None, 0.25, 0.5, None):
        episode.steps.append(client.StepResult(blocks=(), reward=reward, finished=False))

    assert episode.reward == 0.75


def test_an_interrupted_call_ends_its_episode() -> None:
    episode = EpisodeState("math")

    episode.failed(KeyboardInterrupt())

    with pytest.raises(client.ConnectionLost):
        _ = episode.reward


def test_a_call_that_did_not_run_leaves_its_episode_usable() -> None:
    episode = EpisodeState("math")

    episode.failed(client.Unreachable("refused"))
    episode.failed(client.InvalidRequest("too large", status=413))

    assert episode.reward is None


@pytest.mark.parametrize("reward", ["1.0", True, float("inf"), float("nan"), pytest.param(10**400, id="huge")])
def test_a_reward_that_is_not_a_finite_number_is_an_error(reward: object) -> None:
    found = {"ok": True, "output": {"blocks": [], "reward": reward, "finished": False}}

    with pytest.raises(client.ProtocolError):
        read_result(found)


def test_a_stream_is_read_with_its_white_space_and_line_separators() -> None:
    text = json.dumps({"ok": True, "output": {"blocks": [{"type": "text", "text": "a\u2028  b"}]}}, ensure_ascii=False)
    middle = text.index("  b")

    result = sse.outcome(
        f"event: task_id\r\ndata: t\r\n\r\n: ping\r\n\r\nevent: chunk\r\ndata: {text[:middle]}\r\n\r\n"
        f"event: end\r\ndata: {text[middle:]}\r\n\r\n".encode()
    )

    assert result.text == "a\u2028  b"


def test_a_tool_that_raises_is_a_result_without_a_reward() -> None:
    result = sse.outcome(stream(("task_id", "t"), ("error", "ValueError: no")).body)

    assert (result.ok, result.reason, result.reward, result.text) == (False, "tool_error", None, "ValueError: no")


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://x", "http://user@x", "http://x/k/secret", "http://x?y=1"])
def test_a_url_that_cannot_work_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(client.InvalidRequest) as caught:
        base_url(url)

    assert "secret" not in str(caught.value)


def test_arguments_are_a_mapping_or_the_text_of_an_object() -> None:
    assert arguments_of('{"a": 1}') == {"a": 1}
    assert arguments_of("") == {}
    with pytest.raises(ValueError, match="object"):
        arguments_of("[1]")


@pytest.mark.parametrize(
    "body", [b"[]", b"{}", b"null", b'{"tools": 1}', b'{"tools": [{}]}', b"<html>", b'{"tasks": {}}']
)
def test_an_answer_of_another_form_is_a_protocol_error(body: bytes) -> None:
    player = Player(Answer(200, {}, body))

    for plan in (player.plans.tools("math"), player.plans.task_count("math", "train")):
        with pytest.raises(client.ProtocolError):
            player.run(plan)
    with pytest.raises(client.ProtocolError):
        player.run(player.plans.tasks("math", "train", 0, None))
