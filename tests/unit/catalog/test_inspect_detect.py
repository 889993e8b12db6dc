"""Detection of a server's protocol from its answers, and trial runs of an unknown image."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.catalog.inspect import openenv as openenv_module
from gateway.catalog.inspect.detect import NotRecognised, detect
from gateway.catalog.inspect.findings import Capacity, Finding, FoundSplit, fields, one_line, text_field
from gateway.catalog.inspect.image import Image, Use, listening_port, use_of
from gateway.catalog.inspect.probe import Probe, ProbeAnswer, ProbeSocket, Unanswered, until_up
from gateway.catalog.inspect.toml_writer import environment_of, file_text
from gateway.catalog.inspect.trial import ladder, last_line
from gateway.core.addresses import parse_address
from gateway.core.environment import ActionType, ObservationType, Relaxations, ServerProtocol, SplitType
from gateway.core.errors import ConfigError

ORS_PATHS = ("/list_environments", "/create", "/delete", "/ping", "/{env_name}/tools")
OPENENV_PATHS = ("/health", "/metadata", "/schema", "/reset", "/step", "/state")
TEXT = {"type": "string"}
NOWHERE = ProbeAnswer(404, b'{"detail":"Not Found"}')


@dataclass
class Scripted(Probe):
    """A server with scripted answers. It answers every other path with 404."""

    gets: Mapping[str, Any] = field(default_factory=dict)
    posts: Mapping[str, Any] = field(default_factory=dict)
    capacity: int = 0
    """Number of sockets that the server holds; 0 if it has no WebSocket."""
    answers: int = 1000
    """Number of sockets up to which the server answers."""
    first_frame: Mapping[str, Any] = field(default_factory=lambda: {"type": "state", "data": {}})
    reset_reply: Mapping[str, Any] = field(default_factory=lambda: {"type": "observation", "data": {"observation": {}}})
    by_seed: Callable[[int, int], Mapping[str, Any]] | None = None
    """Returns the observation of a reset with a seed, and the number of resets."""
    resets: int = 0
    open: int = 0
    most_open: int = 0
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._address = parse_address("http://server")

    async def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> ProbeAnswer:
        self.asked.append(f"GET {path}")
        return _answer(self.gets.get(path))

    async def post(
        self, path: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, within_s: float = 0.0
    ) -> ProbeAnswer:
        self.asked.append(f"POST {path}")
        return _answer(self.posts.get(path))

    async def socket(self, path: str) -> ProbeSocket:
        if not self.capacity:
            raise Unanswered("no WebSocket")
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        return _Place(self, is_refused=self.open > self.capacity)


@dataclass
class _Place(ProbeSocket):
    server: Scripted
    is_refused: bool

    async def ask(self, message: Mapping[str, Any], *, within_s: float = 0.0) -> Mapping[str, Any]:
        if self.server.open > self.server.answers:
            raise Unanswered("no reply to 'state'")
        if self.is_refused:
            most = self.server.capacity
            return {"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full", "max_sessions": most}}
        if message["type"] == "step":
            observation = {"tools": [{"name": "say", "input_schema": {"properties": {"word": TEXT}}}]}
            return {"type": "observation", "data": {"observation": observation}}
        if message["type"] == "state":
            return self.server.first_frame
        self.server.resets += 1
        if self.server.by_seed is None:
            return self.server.reset_reply
        begun = self.server.by_seed(message["data"].get("seed", 0), self.server.resets)
        return {"type": "observation", "data": {"observation": begun}}

    async def close(self) -> None:
        self.server.open -= 1


def _answer(said: Any) -> ProbeAnswer:
    return (
        NOWHERE
        if said is None
        else said
        if isinstance(said, ProbeAnswer)
        else ProbeAnswer(200, json.dumps(said).encode())
    )


def openapi(*paths: str, create: tuple[str, ...] = ()) -> Mapping[str, Any]:
    schemas = {"CreateSession": {"properties": dict.fromkeys(create, True)}}
    return {"paths": dict.fromkeys(paths, True), "components": {"schemas": schemas}}


def ors(**more: Any) -> Scripted:
    tools = {"tools": [{"name": "answer", "input_schema": {"properties": {"text": TEXT}, "required": ["text"]}}]}
    gets = {
        "/openapi.json": openapi(*ORS_PATHS, create=("secrets",)),
        "/health": {"status": "ok"},
        "/list_environments": ["riddles"],
        "/riddles/splits": [{"name": "hard", "type": "train"}, {"name": "odd", "type": "strange"}],
        "/riddles/tools": tools,
        "/riddles/prompt": [],
    }
    posts = {"/riddles/num_tasks": {"num_tasks": 7}, "/create": {"sid": "s"}, "/delete": {"sid": "s"}}
    return Scripted(gets={**gets, **more.pop("gets", {})}, posts={**posts, **more.pop("posts", {})}, **more)


def openenv(*, action: Mapping[str, Any], paths: tuple[str, ...] = OPENENV_PATHS, **more: Any) -> Scripted:
    gets = {
        "/openapi.json": openapi(*paths),
        "/health": {"status": "healthy"},
        "/schema": {"action": action},
        "/metadata": {"name": "X", "description": "X environment"},
    }
    return Scripted(gets={**gets, **more.pop("gets", {})}, **{"capacity": 2, **more})


def properties(**given: Any) -> Mapping[str, Any]:
    return {"properties": {"metadata": {"type": "object"}, **given}, "required": list(given)}


async def test_an_ors_server_is_queried_fully_and_the_session_on_its_first_task_is_ended() -> None:
    server = ors()

    findings = await detect(server)

    assert (findings.protocol, findings.version, findings.chosen) == (ServerProtocol.ORS, "ors-sdk", "riddles")
    assert (findings.default_tool, findings.text_field) == ("answer", "text")
    assert findings.splits == (FoundSplit("hard", SplitType.TRAIN, 7), FoundSplit("odd", SplitType.VALIDATION, 7))
    assert findings.trouble == ""
    assert server.asked.index("POST /create") < server.asked.index("POST /delete")


async def test_a_failed_session_is_reported_with_the_servers_message_and_ended() -> None:
    server = ors(gets={"/riddles/prompt": ProbeAnswer(500, b'{"detail":"KeyError: \'OPENAI_API_KEY\'"}')})

    findings = await detect(server)

    assert findings.trouble == (
        "the prompt of the first task: 500 KeyError: 'OPENAI_API_KEY' "
        "(a trainer's ORS client can send a secret, or the operator names it in [secrets] of environment.toml)"
    )
    assert server.asked[-1] != "POST /create"
    assert "POST /delete" in server.asked


async def test_a_server_with_a_terminal_tool_needs_no_default_tool() -> None:
    server = ors(gets={"/riddles/tools": {"tools": [], "terminal_tool": {"name": "submit", "arg": "final"}}})

    findings = await detect(server)

    assert (findings.terminal, findings.default_tool, findings.text_field) == ("submit.final", "", "")


async def test_a_server_without_tasks_gets_no_trial_session() -> None:
    findings = await detect(ors(gets={"/riddles/splits": []}))

    assert findings.trouble == "it has no task to open a session with"


async def test_an_environment_that_is_not_served_is_refused() -> None:
    with pytest.raises(ConfigError, match="no environment 'chess'; there are riddles"):
        await detect(ors(), environment="chess")


@pytest.mark.parametrize(
    ("gets", "posts", "version"),
    [
        ({"/schema": {"action": {}, "reset_observation": {}}}, {}, "openenv 0.8 or later"),
        ({"/list_environments": ["x"]}, {}, "openenv 0.4.1 to 0.7"),
        ({}, {"/mcp": {"error": {"code": -32602}}}, "openenv-core 0.2.2 to openenv 0.4.0"),
        ({}, {"/mcp": {"error": {"code": -32601}}}, "openenv-core 0.2.1"),
        ({}, {}, "openenv-core 0.2.0"),
    ],
)
async def test_the_version_of_an_openenv_server_is_recognized_by_its_features(
    gets: Mapping[str, Any], posts: Mapping[str, Any], version: str
) -> None:
    findings = await detect(openenv(action=properties(text=TEXT), gets=gets, posts=posts))

    assert (findings.protocol, findings.version) == (ServerProtocol.OPENENV, version)


async def test_an_openenv_server_with_a_task_api_is_not_taken_for_an_ors_server() -> None:
    paths = (*OPENENV_PATHS, "/list_environments", "/{env_name}/splits")
    gets = {"/list_environments": ["x"], "/x/splits": [{"name": "train", "type": "train"}]}
    posts = {"/x/num_tasks": {"num_tasks": 3}}

    findings = await detect(openenv(action=properties(text=TEXT), paths=paths, gets=gets, posts=posts))

    assert findings.protocol is ServerProtocol.OPENENV
    assert findings.splits == (FoundSplit("train", SplitType.TRAIN, 3),)
    assert findings.places


async def test_an_openenv_server_without_an_http_reset_is_recognized() -> None:
    findings = await detect(openenv(action=properties(text=TEXT), paths=("/health", "/metadata", "/schema", "/mcp")))

    assert findings.protocol is ServerProtocol.OPENENV


async def test_a_server_of_openenv_0_1_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"version 0\.1.*Build it on openenv-core 0\.2"):
        await detect(Scripted(gets={"/openapi.json": openapi("/reset", "/step", "/state", "/health")}))


@pytest.mark.parametrize(
    ("capacity", "told"),
    [(1, Finding.BY_SERVER), (5, Finding.BY_SERVER), (64, Finding.AT_LEAST), (1000, Finding.AT_LEAST)],
)
async def test_sockets_are_opened_until_one_is_refused_and_all_are_closed(capacity: int, told: Finding) -> None:
    server = openenv(action=properties(text=TEXT), capacity=capacity)

    findings = await detect(server)

    assert findings.capacity == Capacity(min(capacity, 64), told)
    assert findings.trouble == ""
    assert (server.open, server.most_open) == (0, min(capacity + 1, 64))


async def test_a_full_server_reports_its_capacity() -> None:
    server = openenv(action=properties(text=TEXT), capacity=3)
    server.open = 3
    others = server.open

    findings = await detect(server)

    assert findings.capacity == Capacity(3, Finding.BY_SERVER)
    assert any("taken by others" in remark for remark in findings.remarks)
    assert server.open == others


@pytest.mark.parametrize(
    ("script", "trouble"),
    [
        ({"first_frame": {"type": "error", "data": {"code": "FACTORY_ERROR", "message": "no DISPLAY"}}}, "no DISPLAY"),
        ({"reset_reply": {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "[Errno 30]"}}}, "Errno 30"),
        ({"capacity": 0}, "no WebSocket"),
    ],
)
async def test_a_failed_reset_is_reported_and_no_socket_stays_open(script: dict[str, Any], trouble: str) -> None:
    server = openenv(action=properties(text=TEXT), **script)

    findings = await detect(server)

    assert trouble in findings.trouble
    assert server.open == 0


async def test_a_session_that_fails_leaves_the_capacity_to_be_learned() -> None:
    server = openenv(action=properties(text=TEXT), capacity=8, answers=2)

    findings = await detect(server)

    assert findings.capacity == Capacity(2, Finding.IN_DOUBT)
    assert any("Session 3 failed for another reason than a full server" in one for one in findings.remarks)
    assert environment_of("thing", "http://server", findings).pool.learns_slots


async def test_the_slowest_reset_and_step_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate(itertools.chain((0, 44, 44, 62), itertools.repeat(62)), lambda _, now: now)
    monkeypatch.setattr(openenv_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    findings = await detect(openenv(action=properties(text=TEXT)))

    assert (findings.reset_s, findings.step_s) == (44, 18)


async def test_what_an_agent_reads_is_reported_with_the_fields_of_the_observations() -> None:
    first = {"prompt": "Guess.\n\x1b[31m", "lives": 3, "metadata": {"round": 1}}
    reply = {"type": "observation", "data": {"observation": first, "reward": None, "done": False}}

    findings = await detect(openenv(action=properties(column={"type": "integer"}), reset_reply=reply))

    assert findings.observed == ("lives", "metadata.round", "prompt", "tools")
    assert findings.reads == (
        ("reset", "Guess. [31m lives: 3 metadata.round: 1"),
        ('{"column": 0}', '{"tools":[{"name":"say","input_schema":{"properties":{"word":{"type":"string"}}}}]}'),
    )


@pytest.mark.parametrize(
    "reply",
    [{"type": "observation"}, {"type": "observation", "data": {"observation": 7}}, {"type": "state", "data": {}}],
)
async def test_a_reply_that_is_no_observation_is_trouble(reply: Mapping[str, Any]) -> None:
    findings = await detect(openenv(action=properties(text=TEXT), reset_reply=reply))

    assert "not an" in findings.trouble


@pytest.mark.parametrize(
    ("by_seed", "seeds", "differs"),
    [
        pytest.param(lambda seed, _: {"board": seed}, 1000, False, id="another board"),
        pytest.param(lambda _, count: {"board": 0, "metadata": {"episode_id": count}}, 1, False, id="another id"),
        pytest.param(lambda _, count: {"board": count}, 1000, True, id="random"),
    ],
)
async def test_seeds_that_do_nothing_are_one_task(by_seed: Any, seeds: int, differs: bool) -> None:
    findings = await detect(openenv(action=properties(text=TEXT), by_seed=by_seed))

    written = environment_of("board", "http://127.0.0.1:1", findings)
    assert written.resets.seeds == seeds
    assert any("cannot be reproduced" in remark for remark in findings.remarks) is differs


async def test_a_state_error_before_the_first_reset_is_not_reported() -> None:
    frame = {"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "call reset first"}}

    findings = await detect(openenv(action=properties(text=TEXT), first_frame=frame))

    assert (findings.trouble, findings.capacity) == ("", Capacity(2, Finding.BY_SERVER))


async def test_an_old_mcp_environment_lists_its_tools_on_a_socket() -> None:
    findings = await detect(openenv(action=properties(tool_name=TEXT, arguments={"type": "object"})))

    assert (findings.tools, findings.default_tool, findings.text_field) == (("say",), "say", "word")


@pytest.mark.parametrize("prefix", ["/api", ""])
async def test_an_areal_server_is_recognized_by_its_task_info(prefix: str) -> None:
    info = {"name": "os", "num_samples": 12, "max_episode_length": 8, "observation_type": "text", "action_type": "x"}
    server = Scripted(
        gets={f"{prefix}/task/info": info, f"{prefix}/health": {}},
        posts={f"{prefix}/episode/start": {"episode_id": "e", "observation": {}}, f"{prefix}/episode/cancel": {}},
    )

    findings = await detect(server)

    assert (findings.protocol, findings.max_turns, findings.trouble) == (ServerProtocol.AREAL, 8, "")
    assert findings.splits == (FoundSplit("train", SplitType.TRAIN, 12),)
    assert (findings.observation_type, findings.action_type) == (ObservationType.TEXT, None)
    assert findings.ready == f"{prefix}/health"
    assert server.asked[-1] == f"POST {prefix}/episode/cancel"


async def test_samples_with_unknown_names_add_a_remark_and_are_not_an_error() -> None:
    findings = await detect(Scripted(gets={"/api/task/info": {"name": "os", "action_type": ActionType.TEXT.value}}))

    assert findings.trouble == ""
    assert any("not counted from 0" in remark for remark in findings.remarks)
    assert (findings.splits, findings.has_named_samples) == ((), True)
    written = environment_of("os", "http://127.0.0.1:1", findings)
    assert (written.areal.sample_ids, written.areal.max_turns) == ((), None)


@pytest.mark.parametrize(
    ("routes", "terminal", "tools"),
    [
        (("/seed_session", "/verify", "/add", "/{any}", "/aggregate_metrics"), "reply.text", ("add",)),
        (("/reset", "/step", "/aggregate_metrics"), "", ()),
    ],
)
async def test_a_nemo_gym_server_is_recognized_by_its_routes(
    routes: tuple[str, ...], terminal: str, tools: tuple[str, ...]
) -> None:
    document: dict[str, Any] = {"paths": {route: {"post": {}} for route in routes}}

    findings = await detect(Scripted(gets={"/openapi.json": document}))

    assert (findings.protocol, findings.terminal, findings.tools) == (ServerProtocol.NEMO, terminal, tools)
    assert environment_of("office", "http://127.0.0.1:1", findings).tasks is None
    assert 'directory = "tasks/office"' in file_text("office", findings, url="http://127.0.0.1:1")


async def test_an_unrecognized_server_is_refused_with_the_answers_it_gave() -> None:
    server = Scripted(gets={"/openapi.json": openapi("/predict"), "/health": ProbeAnswer(418, b"teapot")})

    with pytest.raises(NotRecognised, match=r"as no ORS, .* GET /health is 418 'teapot'.*/predict"):
        await detect(server)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (properties(text=TEXT), "text"),
        ({"properties": {"text": TEXT, "n": {"type": "integer"}}, "required": ["text"]}, "text"),
        ({"properties": {"text": {"anyOf": [TEXT, {"type": "null"}]}, "n": {"type": "integer"}}}, "text"),
        (properties(text=TEXT, n={"type": "integer"}), ""),
        (properties(first=TEXT, second=TEXT), ""),
        ({"properties": {"first": TEXT, "second": TEXT}}, ""),
        (properties(op={"type": "string", "enum": ["a"]}), ""),
        (properties(n={"type": "integer"}), ""),
        ({}, ""),
        (None, ""),
        ({"properties": [1], "required": 3}, ""),
    ],
)
def test_the_text_field_is_the_only_field_that_a_text_can_fill(schema: object, expected: str) -> None:
    assert text_field(schema) == expected


def test_the_metadata_of_an_action_is_not_a_field() -> None:
    assert fields(properties(op=TEXT)) == ("op",)


@pytest.mark.parametrize(
    ("text", "line"),
    [("a\nb\tc", "a b c"), ("a\x1b[31mred\x00", "a [31mred"), ("x" * 300, "x" * 199 + "…"), ("", "")],
)
def test_third_party_text_is_shown_on_one_line(text: str, line: str) -> None:
    assert one_line(text) == line


async def test_a_proxy_that_answers_502_is_queried_again() -> None:
    class Slow(Scripted):
        async def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> ProbeAnswer:
            self.asked.append(path)
            return ProbeAnswer(502 if len(self.asked) < 3 else 404, b"")

    server = Slow()

    await until_up(server, timeout_s=30)

    assert len(server.asked) == 3


async def test_a_wait_ends_with_its_last_error_or_the_error_of_the_check() -> None:
    class Down(Scripted):
        async def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> ProbeAnswer:
            raise Unanswered("connection refused")

    async def died() -> None:
        raise RuntimeError("it died")

    with pytest.raises(Unanswered, match=r"no answer within 0\.1 s \(connection refused\)"):
        await until_up(Down(), timeout_s=0.1)
    with pytest.raises(RuntimeError, match="it died"):
        await until_up(Down(), timeout_s=30, check=died)


def test_each_trial_run_allows_a_little_more_but_never_a_network() -> None:
    steps = list(ladder(Image(ports=(), user="0:0")))

    assert steps == [
        Relaxations(),
        Relaxations(writable_root=True),
        Relaxations(user="0:0"),
        Relaxations(user="0:0", writable_root=True),
    ]
    assert len(list(ladder(Image(ports=(), user="10001:10001")))) == 2


def test_the_ports_that_listen_are_read_from_the_kernels_table() -> None:
    assert listening_port("   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000") == 8000
    assert listening_port("   1: 0100007F:1F40 0100007F:9C40 01 00000000:00000000 00:00000000 00000000") is None
    assert listening_port("  sl  local_address rem_address   st tx_queue") is None


@pytest.mark.parametrize(
    ("stats", "use"),
    [
        ({"memory_stats": {"usage": 100, "stats": {"total_inactive_file": 30}}, "pids_stats": {"current": 4}}, (70, 4)),
        ({"memory_stats": {"usage": 100, "stats": {"inactive_file": 20}}, "pids_stats": {}}, (80, None)),
        ({"memory_stats": {}, "pids_stats": {}}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_memory_use_excludes_the_inactive_file_cache(
    stats: Mapping[str, Any], use: tuple[int | None, int | None]
) -> None:
    assert use_of(stats) == Use(*use)


def test_the_reason_of_a_failure_is_the_last_line_of_its_log() -> None:
    assert last_line("x died at once\nTraceback\nOSError: read-only\n\n") == "OSError: read-only"
