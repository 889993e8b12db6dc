"""The client's protocol without I/O: each operation is a generator, which the sync and the async client both run.

A plan yields `Send` and `Pause`, receives an `Answer`, and gets `Lost` thrown in if no answer arrived. So retries, time
limits and the mapping of errors exist once.

What is sent again, and why no step runs twice:
* A create has a random session id that the client chose. The gateway joins an identical create of one id.
* A call has an ``Idempotency-Key``. The gateway runs a key once, and answers each repetition with that run's outcome.
* A standard ORS server knows no keys. There a call is repeated only with the ``task_id`` that its stream began with.
* After 410 and 409 nothing is sent again.
"""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypedDict, TypeVar
from urllib.parse import quote

from env_gateway_client import sse
from env_gateway_client.content import (
    Block,
    Split,
    StepResult,
    Tool,
    read_blocks,
    read_json,
    read_list,
    read_result,
    read_tools,
)
from env_gateway_client.errors import (
    AuthorFault,
    CallConflict,
    ConnectionLost,
    DeadlinePassed,
    EpisodeFailed,
    GatewayError,
    InvalidRequest,
    NoCapacity,
    ProtocolError,
    RateLimited,
    ServerFailed,
    SessionFailed,
    SessionLost,
    StoreUnavailable,
    TooManyBytes,
    Unreachable,
    error_of,
)

T = TypeVar("T")

PAUSE_S = (0.1, 5.0)
"""First and longest pause, in seconds, between attempts without ``Retry-After``. Each pause doubles."""
PAGE = 500
"""Number of tasks in one request of a listing."""
PING_LIMIT_S = 10.0
"""Seconds for a ping. Episodes are pinged one after the other, and none may keep the others waiting for long."""
HEADER_MAX = 200
"""Longest group name and policy tag that the gateway accepts, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits in seconds. Each wait of the client ends by one of them."""

    connect_s: float = 10.0
    """For a TCP connection."""
    request_s: float = 60.0
    """For a listing, a prompt or a ping, with all its repetitions."""
    open_s: float = 900.0
    """For the opening of an episode, with the waits for a free slot."""
    call_s: float = 3600.0
    """For a step. The environments' own default limit (``call_s``) is the same."""
    close_s: float = 35.0
    """For the end of an episode. The environments' own default limit (``close_s``) is 30 s."""
    reconnect_s: float = 60.0
    """For which a server that answered before is tried again while no connection to it succeeds."""


class Group(NamedTuple):
    """A GRPO group, whose episodes begin together, or wait together."""

    name: str
    """Name, unique for its key and environment: at most 200 printable ASCII characters."""
    size: int
    """Number of episodes in the group."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task in a listing. The gateway leaves out answers and hidden tests; an episode plays the complete task."""

    environment: str
    split: str
    index: int
    spec: Mapping[str, Any]

    @property
    def id(self) -> str:
        """The task's id. Empty: it has no id."""
        return str(self.spec.get("id") or "")


class Options(TypedDict, total=False):
    """How an episode is opened: on one task, by *split* and *index*, or by *task*."""

    split: str
    """Split of the task. ``train:NAME`` draws from the curriculum NAME."""
    index: int
    """Index of the task in its split."""
    task: str | Mapping[str, Any] | Task
    """The task: its id, the task as an object, or an entry of a listing."""
    group: Group | tuple[str, int]
    """Group that this opening belongs to. ``open_group`` opens all members."""
    seed: int
    """Seed of the environment. Absent: the gateway chooses it, the same for all members of a group."""
    config: Mapping[str, Any]
    """Settings of the environment for this episode."""
    secrets: Mapping[str, str]
    """Values for the environment's code, by name. The gateway and this package never log them."""
    policy: str
    """Tag of the policy that plays, for the gateway's records of tasks."""
    wait_s: float
    """Seconds to wait for a free slot. Absent: ``Timeouts.open_s``."""


@dataclass(frozen=True, slots=True)
class Send:
    """A request to send. Its answer, or the loss of it, is due within ``timeout_s``."""

    method: str
    path: str
    headers: Mapping[str, str] = field(repr=False)
    body: bytes
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Pause:
    """A wait before the next request."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. The names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Lost(Exception):
    """No complete answer arrived."""

    def __init__(self, text: str, *, sent: bool, timed_out: bool = False, partial: bytes = b"") -> None:
        super().__init__(text)
        self.sent = sent
        """True if a byte of the request may have been sent."""
        self.timed_out = timed_out
        """True if the request's time limit passed."""
        self.partial = partial
        """The part of the body that arrived."""


Plan: TypeAlias = Generator[Send | Pause, Answer | None, T]


class Plans:
    """The operations of one client.

    Args:
        key: The gateway's key for this trainer. Empty: the gateway needs none.
        clock: Returns the present time in seconds.
    """

    def __init__(self, key: str, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self.timeouts = timeouts
        self._headers = {"authorization": _header("key", f"Bearer {key}", 4096)} if key else {}
        self._clock = clock
        self._is_gateway: bool | None = None
        self._was_reached = False

    # -- discovery ------------------------------------------------------------------------------------------------

    def environments(self) -> Plan[list[str]]:
        """List the names of the environments that the key may use."""
        answer = yield from self._ask("GET", "/list_environments")
        return [str(name) for name in read_list(read_json(answer.body, "/list_environments"))]

    def splits(self, environment: str) -> Plan[list[Split]]:
        """List the splits of *environment*."""
        answer = yield from self._ask("GET", _path(environment, "splits"))
        entries = [entry for entry in read_list(read_json(answer.body, "splits")) if isinstance(entry, Mapping)]
        return [Split(str(entry.get("name")), str(entry.get("type") or "")) for entry in entries]

    def tools(self, environment: str) -> Plan[tuple[Tool, ...]]:
        """List the tools that all tasks of *environment* have. An episode may have more."""
        answer = yield from self._ask("GET", _path(environment, "tools"))
        return read_tools(read_json(answer.body, "tools"))

    def task_count(self, environment: str, split: str) -> Plan[int]:
        """Count the tasks of a split."""
        answer = yield from self._ask("POST", _path(environment, "num_tasks"), {"split": split})
        match read_json(answer.body, "num_tasks"):
            case {"num_tasks": int(count)}:
                return count
        raise ProtocolError(f"the answer to num_tasks is {answer.body[:200]!r}")

    def tasks(self, environment: str, split: str, start: int, stop: int | None) -> Plan[list[Task]]:
        """List the tasks of a split from index *start* up to *stop*, exclusive, page by page."""
        found: list[Task] = []
        while stop is None or start < stop:
            end = start + PAGE if stop is None else min(start + PAGE, stop)
            body = {"split": split, "start": start, "stop": end}
            answer = yield from self._ask("POST", _path(environment, "task_range"), body)
            page = read_list(read_json(answer.body, "task_range"), "tasks")
            found += [Task(environment, split, index, spec) for index, spec in enumerate(page, start)]
            if len(page) < end - start:
                break
            start = end
        return found

    # -- an episode -----------------------------------------------------------------------------------------------

    def open(self, sid: str, environment: str, options: Options) -> Plan[tuple[tuple[Block, ...], tuple[Tool, ...]]]:
        """Open the session *sid*, and return its prompt and its tools. If this fails, the caller closes *sid*."""
        body, headers = _create(environment, options), _create_headers(sid, options)
        wait_s = options.get("wait_s", self.timeouts.open_s)
        is_gateway = yield from self._probe()
        deadline = self._clock() + wait_s
        waits = (NoCapacity, TooManyBytes, RateLimited, StoreUnavailable)
        try:
            yield from self._repeat(
                "POST", "/create", headers, lambda: body, deadline, waits=waits, resends=lambda _: is_gateway
            )
        except DeadlinePassed as error:
            raise NoCapacity(
                f"no episode of {environment!r} opened within {wait_s:g} s, mostly for lack of a slot"
            ) from error
        deadline = max(deadline, self._clock() + self.timeouts.request_s)
        answer = yield from self._ask("GET", _path(environment, "prompt"), sid=sid, deadline=deadline)
        prompt = read_blocks(read_json(answer.body, "prompt"))
        answer = yield from self._ask("GET", _path(environment, "task_tools"), sid=sid, deadline=deadline)
        return prompt, read_tools(read_json(answer.body, "task_tools"))

    def call(self, sid: str, environment: str, tool: str, arguments: Mapping[str, Any]) -> Plan[StepResult]:
        """Call *tool* once, and return its result.

        Raises:
            EpisodeFailed: The episode is over.
            Unavailable: Nothing ran, and the server did not become available in time.
            InvalidRequest: Nothing ran.
        """
        body: dict[str, Any] = {"name": tool, "input": dict(arguments)}
        headers = {
            "x-session-id": sid,
            "idempotency-key": uuid.uuid4().hex,
            "accept": "application/json",
            "content-type": "application/json",
        }
        deadline = self._clock() + self.timeouts.call_s

        def resends(lost: Lost) -> bool:
            if task_id := sse.task_id(lost.partial):
                body["task_id"] = task_id
            return self._is_gateway is True or "task_id" in body

        while True:
            answer = yield from self._repeat(
                "POST",
                _path(environment, "call"),
                headers,
                lambda: body,
                deadline,
                waits=(NoCapacity, TooManyBytes, StoreUnavailable, SessionLost),
                resends=resends,
            )
            try:
                return _outcome(answer)
            except sse.Incomplete as cut:
                if not resends(Lost("the stream ended early", sent=True, partial=answer.body)):
                    raise ConnectionLost("the stream of the call ended before its outcome", may_have_run=True) from cut
                yield Pause(PAUSE_S[0])

    def ping(self, sid: str) -> Plan[None]:
        """Report that the trainer still uses *sid*: its idle time begins anew."""
        limit_s = min(PING_LIMIT_S, self.timeouts.request_s)
        yield from self._ask("POST", "/ping", sid=sid, deadline=self._clock() + limit_s)

    def close(self, sid: str) -> Plan[None]:
        """End *sid*. This succeeds too if the session is unknown or ended before."""
        deadline = self._clock() + self.timeouts.close_s
        yield from self._ask("POST", "/delete", sid=sid, deadline=deadline)

    # -- requests -------------------------------------------------------------------------------------------------

    def _probe(self) -> Plan[bool]:
        """Return whether the server is a gateway, which runs a repeated create or call once. The answer is kept."""
        if self._is_gateway is None:
            deadline = self._clock() + self.timeouts.request_s
            try:
                answer = yield from self._repeat("GET", "/healthz", {}, None, deadline, waits=(StoreUnavailable,))
                self._is_gateway = answer.status == 200
            except (InvalidRequest, ProtocolError):  # 404, or 308 to the default environment
                self._is_gateway = False
        return self._is_gateway

    def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, sid: str = "", deadline: float = 0.0
    ) -> Plan[Answer]:
        """Send a request that may be repeated at any time."""
        headers = {"x-session-id": sid} if sid else {}
        if body is not None:
            headers["content-type"] = "application/json"
        return (
            yield from self._repeat(
                method,
                path,
                headers,
                None if body is None else lambda: body,
                deadline or self._clock() + self.timeouts.request_s,
                waits=(NoCapacity, TooManyBytes, StoreUnavailable),
            )
        )

    def _repeat(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Callable[[], Mapping[str, Any]] | None,
        deadline: float,
        *,
        waits: tuple[type[GatewayError], ...],
        resends: Callable[[Lost], bool] = lambda _: True,
    ) -> Plan[Answer]:
        """Send a request until it is answered.

        Args:
            body: Returns the body, anew for each attempt.
            waits: Errors after which the same request is sent again, if nothing ran.
            resends: Whether to send the request again after a loss that may have had an effect.

        Raises:
            GatewayError: The server refused or failed, or was not reached.
        """
        lost_since, pause_s = None, PAUSE_S[0]
        all_headers = self._headers | dict(headers)
        while True:
            left_s = max(deadline - self._clock(), 0.001)
            content = b"" if body is None else _json(body())
            error: GatewayError
            try:
                answer = yield from _sent(Send(method, path, all_headers, content, left_s))
            except Lost as lost:
                error = _lost(lost, path)
                if lost.timed_out or (lost.sent and not resends(lost)) or not self._was_reached:
                    raise error from lost
                lost_since = self._clock() if lost_since is None else lost_since
                until, wanted_s = min(deadline, lost_since + self.timeouts.reconnect_s), pause_s
            else:
                self._was_reached, lost_since = True, None
                if answer.status < 300:
                    return answer
                error = error_of(answer.status, answer.headers, answer.body)
                if not self._is_repeatable(error, answer, waits, resends):
                    raise error
                until, wanted_s = deadline, error.retry_after_s or pause_s
            if self._clock() + wanted_s > until:
                raise error
            yield Pause(wanted_s)
            pause_s = min(pause_s * 2, PAUSE_S[1])

    def _is_repeatable(
        self,
        error: GatewayError,
        answer: Answer,
        waits: tuple[type[GatewayError], ...],
        resends: Callable[[Lost], bool],
    ) -> bool:
        if answer.headers.get("x-backend-state") == "starting":  # only the setup runs
            return True
        if isinstance(error, ServerFailed) and answer.status in (502, 504) and not error.code:  # of a proxy between
            return resends(Lost("a proxy lost the answer", sent=True))
        return isinstance(error, waits) and answer.status in (429, 503)


def _sent(send: Send) -> Plan[Answer]:
    answer = yield send
    assert answer is not None
    return answer


def _lost(lost: Lost, path: str) -> GatewayError:
    if not lost.sent:
        return Unreachable(f"no connection to the server for {path}: {lost}")
    if lost.timed_out:
        return DeadlinePassed(f"no answer to {path} within the time limit", may_have_run=True)
    return ConnectionLost(f"the connection broke before the answer to {path}: {lost}", may_have_run=True)


def _outcome(answer: Answer) -> StepResult:
    """Read the outcome of a call. Raises ``EpisodeFailed``, or ``sse.Incomplete``."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return sse.outcome(answer.body)
    found = read_json(answer.body, "a call")
    match found:
        case {"ok": False, "reason": ("author_fault" | "session_failed") as reason}:
            kind = AuthorFault if reason == "author_fault" else SessionFailed
            raise kind(str(found.get("error", "")), status=answer.status, reason=reason, may_have_run=True)
    return read_result(found)


# -- requests as bytes ------------------------------------------------------------------------------------------------


def _path(environment: str, operation: str) -> str:
    return f"/{quote(environment, safe='')}/{operation}"


def _json(body: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(body, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the arguments, config or task can't be written as JSON: {error}") from error


def _create(environment: str, options: Options) -> dict[str, Any]:
    task, split, index = options.get("task"), options.get("split"), options.get("index")
    if isinstance(task, Task):
        split, index = task.split, task.index
        task = None
    if (task is None) == (split is None or index is None) or (split is None) != (index is None):
        shown = f"split={split!r}, index={index!r}, task={str(task)[:100]}"
        raise InvalidRequest(f"give split and index, or task alone, and not {shown}")
    body: dict[str, Any] = {"env_name": environment}
    if task is None:
        body |= {"split": split, "index": index}
    else:
        body["task_spec"] = {"id": task} if isinstance(task, str) else _object("task", task)
    if (seed := options.get("seed")) is not None:
        body["seed"] = seed
    if (config := options.get("config")) is not None:
        body["config"] = _object("config", config)
    return body


def _object(what: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{what}: must be an object (a mapping), and not {type(value).__name__}")
    return dict(value)


def _create_headers(sid: str, options: Options) -> dict[str, str]:
    headers = {"x-session-id": sid, "content-type": "application/json"}
    if secrets := options.get("secrets"):
        values = {name: {"value": value} for name, value in secrets.items()}
        headers["x-secrets"] = base64.b64encode(json.dumps(values).encode()).decode()
    if policy := options.get("policy"):
        headers["x-policy-tag"] = _header("policy", policy)
    if (group := options.get("group")) is not None:
        name, size = group
        headers |= {"x-group-id": _header("group", name), "x-group-size": str(size)}
    return headers


def _header(what: str, value: str, longest: int = HEADER_MAX) -> str:
    """Return *value* if it fits into a header. The message of the error shows the value's length only."""
    if not (value and len(value) <= longest and value.isascii() and value.isprintable()):
        raise InvalidRequest(f"{what}: {len(value)} characters, but must be 1 to {longest} printable ASCII characters")
    return value


class EpisodeState:
    """What the sync and the async episode have in common: the record of one episode, without I/O."""

    def __init__(self, environment: str) -> None:
        self.id = str(uuid.uuid4())
        """The session's id, as the gateway's log shows it."""
        self.environment = environment
        self.prompt: tuple[Block, ...] = ()
        """The task, as text and images for the agent."""
        self.tools: tuple[Tool, ...] = ()
        self.steps: list[StepResult] = []
        """The results so far."""
        self.error: GatewayError | None = None
        """Why the episode has no reward. None: it did not fail."""
        self.is_closed = False

    @property
    def finished(self) -> bool:
        """True if the environment ended the episode."""
        return any(result.finished for result in self.steps)

    @property
    def reward(self) -> float | None:
        """Sum of the rewards so far. None: no step had a reward, which differs from 0.0.

        Raises:
            EpisodeFailed: The episode failed, so it has no reward.
        """
        if self.error is not None:
            raise self.error
        rewards = [result.reward for result in self.steps if result.reward is not None]
        return sum(rewards) if rewards else None

    def final_reward(self) -> float:
        """Return the episode's reward for training. It is 0.0 if the agent stopped before it earned any reward.

        Raises:
            EpisodeFailed: The episode failed, its last step raised an unexpected exception, or its
                environment ended it without any reward. Drop it.
        """
        reward = self.reward
        if self.steps and self.steps[-1].reason == "tool_failed":
            raise AuthorFault(f"the last step failed in the environment: {self.steps[-1].text}", reason="author_fault")
        if reward is None and self.finished:
            raise AuthorFault("the environment ended the episode without a reward", reason="author_fault")
        return reward or 0.0

    @property
    def openai_tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's format."""
        return [tool.openai() for tool in self.tools]

    def check_open(self) -> None:
        """Raise the episode's error, or an error if it is closed."""
        if self.error is not None:
            raise self.error
        if self.is_closed:
            raise InvalidRequest("the episode is closed: open another one")

    def failed(self, error: BaseException) -> None:
        """Record that a call ended with *error*. After an unknown effect the episode is over."""
        if not isinstance(error, GatewayError):  # a cancellation, or an interrupt
            error = ConnectionLost(
                f"a call was cancelled ({type(error).__name__}) before its answer", may_have_run=True
            )
        if error.may_have_run or isinstance(error, EpisodeFailed | CallConflict):
            self.error = error


def arguments_of(text: str | Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the arguments of a tool call: a mapping as it is, or the JSON text that models write.

    Raises:
        ValueError: The text is not a JSON object. The message is for the agent.
    """
    if text is None or text == "":
        return {}
    if isinstance(text, str):
        found = json.loads(text)
        if not isinstance(found, dict):
            raise ValueError("the arguments of a tool call must be a JSON object")
        return found
    return text
