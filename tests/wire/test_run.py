"""A user runs `gateway run` and `examples/agent.py` with a real gateway, and a model whose replies the test scripts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from pydantic import TypeAdapter, ValidationError

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.fakes.ports import reserved_port
from tests.fakes.raw_http import Connection, RawServer, Request
from tests.wire.catalog import EMBEDDED, PROJECT, serving
from tests.wire.gateways import Gateway
from tests.wire.targets import ONE_GATEWAY, Target, on

pytestmark = pytest.mark.wire

KEY = "sk-of-the-test"
MODELS = (("m", 0.25), ("m", 1.0))
"""Name and temperature of the model: those of the options, and the default temperature, which the example has."""
REQUEST = TypeAdapter(CompletionCreateParamsNonStreaming)
TASKS = [json.loads(line) for line in (PROJECT / "tasks/math/train.jsonl").read_text("utf-8").splitlines()[:4]]
WRONG = "certainly not this"
GUESSING = ("game", "--start", "2", "--stop", "4")
"""Two games of guess-the-number."""
FAULTY = PROJECT / "tests/wire/faulty/catalog/faulty"
RUN = ("-m", "gateway.cli", "run")
EXAMPLE = ("examples/agent.py", "--environment")
EXAMPLE_WITHOUT_RICH = (
    "-c",
    "import runpy, sys; sys.modules['rich'] = None; sys.argv[0] = 'examples/agent.py'; "
    "runpy.run_path('examples/agent.py', run_name='__main__')",
    "--environment",
)


# -- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An answer of the endpoint that is no chat completion."""

    status: int = 500
    body: bytes = b"out of memory"
    headers: str = ""


Json = dict[str, Any]
Reply = Json | Answer | Literal["drop", "hold"]
"""A message, another answer, a dropped connection, or no answer until the client closes the connection."""
Script = Callable[[Json], Reply]
"""Returns the reply to a request."""


def says(text: str) -> Json:
    return {"role": "assistant", "content": text, "refusal": None, "tool_calls": []}


def calls(*named: tuple[str, Any]) -> Json:
    """Return a message with calls of tools, each with its arguments as an object or as text."""
    made = [
        {
            "id": f"call-{number}",
            "type": "function",
            "function": {"name": name, "arguments": given if isinstance(given, str) else json.dumps(given)},
        }
        for number, (name, given) in enumerate(named)
    ]
    return {"role": "assistant", "content": None, "tool_calls": made}


@dataclass
class Model:
    """An OpenAI-compatible endpoint. It refuses what OpenAI's API or vLLM refuse, and notes why in ``faults``."""

    script: Script = field(default=lambda _: says("I give up."))
    requests: list[Request] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    url: str = ""

    @property
    def bodies(self) -> list[Json]:
        return [json.loads(request.body) for request in self.requests]

    async def __call__(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            self.requests.append(request)
            if fault := fault_of(request):
                self.faults.append(fault)
                await connection.answer(json.dumps({"error": {"message": fault}}).encode(), status=400)
                continue
            reply = self.script(json.loads(request.body))
            if isinstance(reply, Answer):
                await connection.answer(reply.body, status=reply.status, more=reply.headers)
            elif isinstance(reply, dict):
                await connection.answer(json.dumps(completion(reply)).encode())
            elif reply == "hold":
                await connection.left()
                return
            else:
                connection.abort()
                return


def completion(message: Json) -> Json:
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else "length"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None}
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}


def fault_of(request: Request) -> str:
    """Return why an endpoint would refuse a request. Empty: it would not."""
    if (request.method, request.target) != ("POST", "/v1/chat/completions"):
        return f"{request.method} {request.target}"
    if request.headers["content-type"] != "application/json" or request.headers["authorization"] != f"Bearer {KEY}":
        return f"headers {request.headers}"
    body = json.loads(request.body)
    try:
        whole(REQUEST.validate_python(body))
    except ValidationError as error:
        return str(error)
    if (
        sorted(body) != ["messages", "model", "temperature", "tools"]
        or (body["model"], body["temperature"]) not in MODELS
    ):
        return f"parameters of {body}"
    if any(tool["function"]["parameters"]["type"] != "object" for tool in body["tools"]):
        return f"tools {body['tools']}"
    return fault_of_conversation(body["messages"])


def fault_of_conversation(messages: list[Json]) -> str:
    """Return what is wrong with the order of messages, or with the arguments of earlier calls."""
    waiting: list[str] = []
    for message in messages:
        if (message["role"] == "tool") != bool(waiting) or message.get("tool_call_id", "") not in [*waiting[:1], ""]:
            return f"{message} is out of order, {waiting} have no result"
        waiting = waiting[1:]
        for call in message.get("tool_calls", []):
            waiting.append(call["id"])
            try:
                is_object = isinstance(json.loads(call["function"]["arguments"], parse_constant=refused), dict)
            except ValueError:
                is_object = False
            if not is_object:
                return f"the arguments of {call} are no object"
    return f"{waiting} have no result" if waiting else ""


def refused(constant: str) -> Any:
    raise ValueError(constant)


def whole(value: Any) -> Any:
    """Read lists, which pydantic checks only when they are read."""
    if isinstance(value, dict):
        return {name: whole(entry) for name, entry in value.items()}
    return value if isinstance(value, str | int | float | None) else [whole(entry) for entry in value]


def turn_of(request: Json) -> int:
    """Return how many replies the model gave in this episode."""
    return sum(message["role"] == "assistant" for message in request["messages"])


def last(request: Json) -> Any:
    """Return what the model reads last."""
    return request["messages"][-1]["content"]


def in_turn(*replies: Reply) -> Script:
    """Return a script of one episode, whose last reply is repeated."""
    return lambda request: replies[min(turn_of(request), len(replies) - 1)]


def after(*first: Reply, then: Script) -> Script:
    """Return a script whose first replies do not depend on the request."""
    waiting = list(first)
    return lambda request: waiting.pop(0) if waiting else then(request)


def number_of(request: Json) -> int:
    """Return the number of the task in `TASKS` that a request asks."""
    (number,) = [
        number for number, task in enumerate(TASKS) if task["instruction"] in request["messages"][0]["content"]
    ]
    return number


def right(number: int) -> Json:
    return {"answer": str(TASKS[number]["evaluation"]["entry"]["answer"])}


def answers(request: Json) -> Json:
    """Answer the tasks with even numbers, and guess wrong at the others."""
    number = number_of(request)
    return calls(("submit", {"answer": WRONG} if number % 2 else right(number)))


def guesses(request: Json) -> Json:
    """Search in halves, by what the game said so far."""
    low, high, guess = 1, 20, 0
    for message in request["messages"][1:]:
        for call in message.get("tool_calls", []):
            guess = int(json.loads(call["function"]["arguments"])["message"].strip("[]"))
        if message["role"] == "tool":
            low, high = (guess + 1, high) if "higher" in message["content"] else (low, guess - 1)
    return calls(("act", {"message": f"[{(low + high) // 2}]"}))


# -- the script -------------------------------------------------------------------------------------------------------


@dataclass
class Done:
    """The result of the script."""

    status: int
    stdout: str
    stderr: str

    @cached_property
    def table(self) -> dict[str, str]:
        """The printed table, by the name of the row."""
        rows = (re.fullmatch(r"(.+?) {2,}(\S+)", line.strip()) for line in self.stdout.splitlines())
        return {row[1]: row[2] for row in rows if row}


@dataclass(frozen=True)
class Agent:
    """Runs the script with one gateway and one model."""

    gateway: Gateway
    model: Model
    key: str
    file: Path

    async def start(
        self, *arguments: str, command: tuple[str, ...] = RUN, stderr: int = subprocess.PIPE, **variables: str
    ) -> asyncio.subprocess.Process:
        """Start *command* with *arguments*: first the environment (`math` if the first one is an option)."""
        if not arguments or arguments[0].startswith("-"):
            arguments = ("math", *arguments)
        given = {"--url": self.gateway.url, "--split": "train", "--endpoint": self.model.url, "--model": "m"}
        given |= {"--out": str(self.file), "--temperature": "0.25"} if command == RUN else {"--json": str(self.file)}
        if self.key:
            given["--key"] = self.key
        if "--script" in arguments:
            del given["--endpoint"], given["--model"]
        used = [text for name, value in given.items() if name not in arguments for text in (name, value)]
        return await asyncio.create_subprocess_exec(
            *(sys.executable, *command, *arguments, *used),
            cwd=PROJECT,
            env=clean_environment() | {"OPENAI_API_KEY": KEY, "COLUMNS": "200"} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )

    async def run(self, *arguments: str, **more: Any) -> Done:
        return await ended(await self.start(*arguments, **more))

    def lines(self) -> list[Json]:
        """Return the episodes in the file, in the order of their tasks."""
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        return sorted(lines, key=lambda line: (line["index"], line["member"]))

    def rewards(self) -> list[float | None]:
        return [line["reward"] for line in self.lines()]


async def ended(process: asyncio.subprocess.Process) -> Done:
    """Wait for the end of the script."""
    try:
        async with asyncio.timeout(HANG_S):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    done = Done(process.returncode, stdout.decode(), (stderr or b"").decode())
    assert not re.search(r"(agent|runs|run)\.py\", line", done.stderr), done.stderr  # of a traceback
    return done


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Start processes that SIGINT interrupts, even if this process ignores it, as a shell's background jobs do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("GATEWAY_", "OPENAI_"))}


@contextlib.asynccontextmanager
async def playing(gateway: Gateway, file: Path, key: str = "") -> AsyncIterator[Agent]:
    """Yield the script's runner with a model. In the end no request was refused, and no session is open."""
    model = Model()
    async with RawServer(model) as server:
        model.url = f"http://{server.address.removeprefix('tcp:')}/v1"
        yield Agent(gateway, model, key, file)
    assert model.faults == []

    async def nothing_is_left() -> None:
        assert await gateway.sessions() == []

    await eventually(nothing_is_left)


@pytest.fixture(scope="module")
def bundled() -> Iterator[Gateway]:
    with serving(EMBEDDED, "math", "game") as gateway:
        yield gateway


@pytest.fixture
async def agent(bundled: Gateway, tmp_path: Path) -> AsyncIterator[Agent]:
    """The script on ``math`` and ``game``."""
    async with playing(bundled, tmp_path / "episodes.jsonl") as agent:
        yield agent


@pytest.fixture
async def prober(target: Target, tmp_path: Path) -> AsyncIterator[Agent]:
    """The script on ``probe``, whose tools do all that tools may do."""
    assert target.gateway is not None
    async with playing(target.gateway, tmp_path / "episodes.jsonl", target.key or "") as agent:
        yield agent


@pytest.fixture
async def flawed(tmp_path: Path) -> AsyncIterator[Agent]:
    """The script on ``faulty``, whose tasks say what fails. Its worker starts once, and writes its PID to a file."""
    tasks = [{"id": fault, "config": {"fails": fault}} for fault in ("reset", "no rewards", "late reward")]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks), "utf-8")
    folder = tmp_path / "catalog/faulty"
    folder.mkdir(parents=True)
    (folder / "environment.toml").symlink_to(FAULTY / "environment.toml")
    (folder / "faulty_own.py").write_text(
        "import os, runpy\n"
        f"with open({str(tmp_path / 'pid')!r}, 'x') as file:\n    file.write(str(os.getpid()))\n"
        f"runpy.run_path({str(FAULTY / 'faulty_own.py')!r}, run_name='__main__')\n"
    )
    with serving(EMBEDDED, "faulty", GATEWAY_CATALOG_DIR=str(tmp_path / "catalog")) as gateway:
        async with playing(gateway, tmp_path / "episodes.jsonl") as agent:
            yield agent


# -- episodes ---------------------------------------------------------------------------------------------------------


async def test_the_rewards_are_those_of_the_models_answers(agent: Agent) -> None:
    agent.model.script = answers

    done = await agent.run("--stop", "4", "--at-once", "3")

    assert (done.status, agent.rewards()) == (0, [1.0, 0.0, 1.0, 0.0])
    assert float(done.table.pop("seconds")) > 0
    assert list(done.table.items()) == [
        ("episodes", "4"),
        ("mean reward", "0.500"),
        ("finished", "4"),
        ("failed", "0"),
        ("model calls", "4"),
        ("prompt_tokens", "28"),
        ("completion_tokens", "12"),
    ]
    first = agent.lines()[0]
    assert (first["index"], first["ended"], first["failed"], first["model_calls"]) == (0, "finished", "", 1)
    assert [message["role"] for message in first["messages"]] == ["user", "assistant", "tool"]
    assert first["messages"][2] == {"role": "tool", "tool_call_id": "call-0", "content": "Correct."}


async def test_twenty_tasks_are_played_unless_more_are_asked_for(agent: Agent) -> None:
    done = await agent.run("--start", "100", "--at-once", "20")

    assert (done.status, [line["index"] for line in agent.lines()]) == (0, list(range(100, 120)))


async def test_the_members_of_a_group_have_rewards_of_their_own(agent: Agent) -> None:
    asked: set[int] = set()

    def script(request: Json) -> Json:
        number = number_of(request)
        is_first = number not in asked
        asked.add(number)
        return calls(("submit", right(number) if is_first else {"answer": WRONG}))

    agent.model.script = script

    done = await agent.run("--stop", "3", "--group-size", "2", "--at-once", "5")

    places = [(line["index"], line["member"]) for line in agent.lines()]
    assert (done.status, places) == (0, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)])
    assert [sorted(agent.rewards()[at : at + 2]) for at in (0, 2, 4)] == [[0.0, 1.0]] * 3  # type: ignore[type-var]
    assert done.table["mean reward"] == "0.500"


async def test_a_game_of_several_turns(agent: Agent) -> None:
    agent.model.script = guesses

    done = await agent.run(*GUESSING)

    assert (done.status, agent.rewards()) == (0, [1.0, 1.0])
    assert all(line["model_calls"] > 1 for line in agent.lines())
    assert int(done.table["model calls"]) == len(agent.model.requests)


async def test_parallel_calls_run_in_order_until_one_ends_the_episode(agent: Agent) -> None:
    downwards = [("act", {"message": f"[{number}]"}) for number in range(20, 0, -1)]
    agent.model.script = in_turn(calls(*downwards[:2]), calls(*downwards[2:]))

    done = await agent.run(*GUESSING)

    for line in agent.lines():
        results = [message for message in line["messages"] if message["role"] == "tool"]
        assert (line["ended"], line["model_calls"]) == ("finished", 2)
        assert [result["tool_call_id"] for result in results] == [
            *("call-0", "call-1"),
            *(f"call-{number}" for number in range(len(results) - 2)),
        ]
        assert ["Turns left" in result["content"] for result in results] == [True] * (len(results) - 1) + [False]
        assert 4 <= len(results) <= 7, "the game has seven turns"
    assert done.status == 0


async def test_a_text_without_a_tool_call_ends_the_episode(agent: Agent) -> None:
    done = await agent.run("--stop", "2")

    assert (done.status, agent.rewards()) == (0, [0.0, 0.0])
    assert {line["ended"] for line in agent.lines()} == {"length"}
    assert (done.table["finished"], done.table["length"]) == ("0", "2")


async def test_a_text_can_be_the_argument_of_a_tool(agent: Agent) -> None:
    agent.model.script = lambda request: says(right(number_of(request))["answer"])

    done = await agent.run("--stop", "2", "--text-tool", "submit", "--text-argument", "answer")

    assert (done.status, agent.rewards()) == (0, [1.0, 1.0])
    assert agent.lines()[0]["messages"][-1] == {"role": "user", "content": "Correct."}


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ('{"answer": 4', "must be an object as JSON: Expecting"),
        ('["4"]', "must be a JSON object"),
        ('{"answer": NaN}', "not JSON compliant"),
        ('{"answer": ' + "[" * 100_000, "recursion"),
        ('{"reply": "4"}', "answer"),
    ],
    ids=["cut", "a list", "NaN", "deep", "another name"],
)
async def test_the_model_reads_that_its_arguments_are_wrong_and_corrects_them(
    agent: Agent, arguments: str, mistake: str
) -> None:
    agent.model.script = in_turn(calls(("submit", arguments)), calls(("submit", right(0))))

    done = await agent.run("--stop", "1")

    assert (done.status, agent.rewards()) == (0, [1.0])
    assert mistake in last(agent.model.bodies[1])
    assert arguments[:100] in json.dumps(agent.model.bodies[1]["messages"]).replace('\\"', '"')


async def test_a_model_that_never_stops_has_the_turns_of_max_turns(agent: Agent) -> None:
    agent.model.script = in_turn(calls(("think", {})))

    done = await agent.run("--stop", "1", "--max-turns", "3")

    (line,) = agent.lines()
    assert (done.status, line["reward"], line["ended"], line["model_calls"]) == (0, 0.0, "max_turns", 3)
    assert "think" in last(agent.model.bodies[-1])
    assert (done.table["finished"], done.table["max_turns"]) == ("0", "1")


@on(*ONE_GATEWAY)
async def test_rewards_of_steps_add_up_and_images_are_texts(prober: Agent) -> None:
    score = ("score", {"reward": 0.25})
    prober.model.script = in_turn(calls(score, ("image", {}), ("fail", {})), calls(("finish", {"reward": 1.0}), score))

    done = await prober.run("probe", "--start", "1", "--stop", "2")

    (line,) = prober.lines()
    assert (done.status, line["reward"], line["ended"]) == (0, 1.25, "finished")
    assert line["unexpected_error"] == "RuntimeError: the first line\nthe second line"
    assert (done.table["unexpected errors"], done.table["failed"]) == ("1", "0")
    assert [message["content"] for message in line["messages"] if message["role"] != "assistant"] == [
        "Naïve café — 你好 🙂?\n[image]",
        "scored",
        "[image]",
        "RuntimeError: the first line\nthe second line",
        "finished",
    ]


@on(*ONE_GATEWAY)
async def test_images_reach_a_model_that_sees(prober: Agent) -> None:
    prober.model.script = in_turn(calls(("image", {}), ("echo", {"text": "on"})), says("A pixel."))

    await prober.run("probe", "--start", "1", "--stop", "2", "--images")

    prompt, _, first, second, shown = prober.model.bodies[-1]["messages"]
    assert [part["type"] for part in prompt["content"]] == ["text", "image_url"]
    assert (first["content"], second["content"], shown["role"]) == ("[image]", "on", "user")
    assert shown["content"] == [prompt["content"][1]]
    assert shown["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


# -- failures ---------------------------------------------------------------------------------------------------------


@on(*ONE_GATEWAY)
async def test_a_failed_episode_has_no_reward_but_its_reason(prober: Agent) -> None:
    def script(request: Json) -> Json:
        if "1 + 1" not in request["messages"][0]["content"]:
            return calls(("finish", {"reward": 1.0}))
        if turn_of(request) == 1:
            os.kill(int(last(request)), signal.SIGKILL)
        return calls(("score", {"reward": 1.0}), ("pid", {}))

    prober.model.script = script

    done = await prober.run("probe", "--stop", "3", "--at-once", "1")

    lost, *others = prober.lines()
    assert (done.status, lost["reward"], lost["failed"], lost["ended"]) == (0, None, "worker_lost", "")
    assert [line["reward"] for line in others] == [1.0, 1.0]
    assert (done.table["mean reward"], done.table["failed"], done.table["worker_lost"]) == ("1.000", "1", "1")
    assert lost["error"] in done.stderr


async def test_an_authors_fault_is_no_reward(flawed: Agent) -> None:
    flawed.model.script = in_turn(calls(("answer", {"text": "4"})))

    done = await flawed.run("faulty", "--group-size", "2")

    assert (done.status, flawed.rewards()) == (0, [None, None, None, None, 1.0, 1.0])
    assert [line["failed"] for line in flawed.lines()] == ["author_fault"] * 4 + ["", ""]
    assert [line["model_calls"] for line in flawed.lines()] == [0, 0, 2, 2, 2, 2]
    assert (done.table["mean reward"], done.table["failed"], done.table["author_fault"]) == ("1.000", "4", "4")


async def test_workers_that_do_not_start_again_end_the_run(flawed: Agent, tmp_path: Path) -> None:
    def script(_: Json) -> Json:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        return calls(("answer", {"text": "4"}))

    flawed.model.script = script

    done = await flawed.run("faulty", "--start", "1", "--at-once", "1")

    assert (done.status, [line["failed"] for line in flawed.lines()]) == (1, ["worker_lost"])
    assert (done.table["episodes"], done.table["mean reward"], done.table["worker_lost"]) == ("1", "none", "1")
    assert f"gateway {flawed.gateway.url}: " in done.stderr
    assert "(fix: repair what the last lines of the log name" in done.stderr


@pytest.mark.parametrize(
    "trouble",
    [
        [Answer(503, b"loading the model", "retry-after: 0\r\n")],
        [Answer(429, b"{}"), "drop"],
    ],
    ids=["503", "429 and a lost connection"],
)
async def test_a_request_that_the_endpoint_did_not_take_is_repeated(agent: Agent, trouble: list[Reply]) -> None:
    agent.model.script = after(*trouble, then=answers)

    done = await agent.run("--stop", "1")

    assert (done.status, agent.rewards(), done.table["model calls"]) == (0, [1.0], "1")
    assert len({request.body for request in agent.model.requests}) == 1
    assert len(agent.model.requests) == len(trouble) + 1


@pytest.mark.parametrize(
    ("answer", "attempts", "text"),
    [
        (Answer(500, b"CUDA error:\n out of memory"), 1, "HTTP 500: CUDA error: out of memory (fix: read the log"),
        (Answer(401, b"no key"), 1, "HTTP 401: no key (fix: pass --endpoint-key, or set OPENAI_API_KEY)"),
        (Answer(404, b"no such model"), 1, "HTTP 404: no such model (fix: check --model"),
        (Answer(503, b"", "retry-after: 0\r\n"), 4, "HTTP 503: (no text) (fix: lower --at-once"),
        (Answer(200, b"<html>hello</html>"), 1, "no valid chat completion in HTTP 200: <html>hello</html> (fix:"),
        (Answer(200, b'{"choices": []}'), 1, 'no valid chat completion in HTTP 200: {"choices": []} (fix:'),
        (Answer(200, b"[" * 100_000), 1, "no valid chat completion in HTTP 200: [[["),
        (Answer(200, json.dumps(completion({"tool_calls": [{}]})).encode()), 1, "no valid chat completion"),
        (Answer(302, b"", "location: /elsewhere\r\n"), 1, "HTTP 302"),
    ],
    ids=["500", "401", "404", "503", "html", "no choice", "deep", "an empty call", "302"],
)
async def test_an_endpoint_that_never_replies_ends_the_run(
    agent: Agent, answer: Answer, attempts: int, text: str
) -> None:
    agent.model.script = lambda _: answer

    done = await agent.run("--stop", "4", "--at-once", "1")

    assert (done.status, done.stdout, agent.rewards()) == (1, "", [])
    assert f"endpoint {agent.model.url}/chat/completions: {text}" in done.stderr
    assert len(agent.model.requests) == attempts


async def test_an_endpoint_that_is_not_there_ends_the_run(agent: Agent) -> None:
    url = f"http://127.0.0.1:{reserved_port()}/v1/"

    done = await agent.run("--stop", "1", "--endpoint", url)

    assert (done.status, done.stdout, agent.rewards()) == (1, "", [])
    assert f"endpoint {url}chat/completions: no connection:" in done.stderr
    assert "(fix: check --endpoint, and that its server runs)" in done.stderr


async def test_a_reply_has_a_time_limit(agent: Agent) -> None:
    agent.model.script = lambda _: "hold"

    done = await agent.run("--stop", "1", "--reply-s", "0.5")

    assert (done.status, done.stdout, len(agent.model.requests)) == (1, "", 1)
    assert "no reply within 0.5 s (fix: raise --reply-s, or lower --at-once)" in done.stderr


async def test_an_endpoint_that_refuses_one_conversation_fails_one_episode(agent: Agent) -> None:
    too_long = Answer(400, b'{"error": "the context is too long"}')
    agent.model.script = lambda request: too_long if number_of(request) == 2 else answers(request)

    done = await agent.run("--stop", "4", "--at-once", "1")

    assert (done.status, agent.rewards()) == (0, [1.0, 0.0, None, 0.0])
    assert (done.table["mean reward"], done.table["failed"], done.table["endpoint_400"]) == ("0.333", "1", "1")
    assert "endpoint_400, such as task 2: endpoint http" in done.stderr
    assert "the context is too long" in agent.lines()[2]["error"]


async def test_a_run_without_any_reward_is_a_failure(agent: Agent) -> None:
    agent.model.script = in_turn(calls(("think", {})), Answer(500))

    done = await agent.run("--stop", "2")

    assert (done.status, agent.rewards()) == (1, [None, None])
    assert (done.table["mean reward"], done.table["endpoint_500"]) == ("none", "2")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nope"], "environment 'nope'"),
        (["--split", "nope"], "Invalid split"),
        (["--start", "5000"], "split 'train' has 1320 tasks, and none from index 5000 to 5020 (fix: choose another"),
        (["--stop", "0"], "and none from index 0 to 0"),
        (["--url", "gateway"], "url: must look like http://HOST:8080"),
        (["--text-tool", "answer", "--text-argument", "answer"], 'from {"submit": ["answer"]}'),
        (["--text-tool", "submit", "--text-argument", "text"], 'from {"submit": ["answer"]}'),
        (["--out", "/nowhere/episodes.jsonl"], "No such file or directory: '/nowhere/episodes.jsonl'"),
    ],
    ids=["environment", "split", "start", "stop", "url", "text tool", "text argument", "file"],
)
async def test_what_cannot_be_played_is_said_in_one_line(agent: Agent, arguments: list[str], text: str) -> None:
    done = await agent.run(*arguments)

    assert (done.status, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert text in done.stderr
    assert agent.model.requests == []


async def test_an_unreachable_gateway_is_said_in_one_line(agent: Agent) -> None:
    url = f"http://127.0.0.1:{reserved_port()}"

    done = await agent.run("--url", url)

    assert (done.status, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"gateway {url}: no connection")
    assert "(fix: check the URL, and that the gateway runs)" in done.stderr


@on(*ONE_GATEWAY)
async def test_a_wrong_key_is_said_in_one_line(prober: Agent) -> None:
    done = await prober.run("probe", "--key", "wrong-key-00")

    assert (done.status, done.stderr.count("\n")) == (1, 1)
    assert f"gateway {prober.gateway.url}: " in done.stderr
    assert "wrong-key-00" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--group-size", "16"], "--at-once must be at least --group-size, 16"),
        (["--max-turns", "0"], "--max-turns must be at least 1"),
        (["--start", "-1"], "--start must be at least 0"),
        (["--endpoint", "127.0.0.1:8000"], "--endpoint must look like http://127.0.0.1:8000/v1"),
        (["--endpoint-key", "sk-1\n"], "--endpoint-key must be printable ASCII"),
        (["--temperature", "hot"], "Invalid value for '--temperature'"),
    ],
)
async def test_a_wrong_command_line_is_a_usage_error(agent: Agent, arguments: list[str], text: str) -> None:
    done = await agent.run(*arguments)

    assert done.status == 2
    assert text in done.stderr


async def test_an_interrupt_closes_the_open_episodes(agent: Agent) -> None:
    agent.model.script = lambda request: "hold" if number_of(request) else answers(request)
    with interruptible():
        process = await agent.start("--stop", "4", "--at-once", "3")
    await until(lambda: len(agent.model.requests) == 4)
    assert len(await agent.gateway.sessions()) == 3

    process.send_signal(signal.SIGINT)
    done = await ended(process)

    assert (done.status, agent.rewards(), done.table["episodes"]) == (130, [1.0], "1")
    assert "interrupted, and closed the open episodes\n" in done.stderr


# -- reports ----------------------------------------------------------------------------------------------------------


async def test_there_is_one_line_of_progress_without_a_terminal(agent: Agent) -> None:
    agent.model.script = answers

    done = await agent.run("--stop", "4")

    assert done.stderr.count("\n") == 1
    assert re.search(r"^episodes .+ 4/4 \d:\d\d:\d\d *$", done.stderr, re.M)


async def test_there_is_a_progress_bar_on_a_terminal(agent: Agent) -> None:
    terminal, side = os.openpty()
    shown = bytearray()
    agent.model.script = answers
    with os.fdopen(terminal, "rb", buffering=0) as reader:
        asyncio.get_running_loop().add_reader(reader, lambda: shown.extend(reader.read(4096)))
        process = await agent.start("--stop", "4", "--at-once", "1", stderr=side)
        done = await ended(process)
        await until(lambda: b"4/4" in shown)
        asyncio.get_running_loop().remove_reader(reader)
        os.close(side)

    assert done.status == 0
    assert b"0/4" in shown


async def test_the_summary_is_one_json_object(agent: Agent) -> None:
    agent.model.script = answers

    done = await agent.run("--stop", "2", "--json")

    found = json.loads(done.stdout)
    assert (done.status, found["episodes"], found["mean_reward"], found["problem"]) == (0, 2, 0.5, "")
    assert (found["ended"], found["failed"]) == ({"finished": 2}, {})


async def test_the_gateway_records_the_policy_which_is_the_model_if_it_has_no_other_tag(agent: Agent) -> None:
    agent.model.script = answers

    await agent.run("--stop", "1", "--policy", "step-7")
    await agent.run("--start", "1", "--stop", "2", "--out", str(agent.file) + "2")

    recorded = (await agent.gateway.ask("episodes", environment="math", limit="2"))["episodes"]
    assert [episode["policy"] for episode in recorded] == ["m", "step-7"]


# -- scripts ----------------------------------------------------------------------------------------------------------

PLAYERS = """
import json

ANSWERS = json.loads({answers!r})

async def solve(episode):
    (answer,) = [answer for text, answer in ANSWERS.items() if text in episode.prompt[0].text]
    await episode.step("submit", {{"answer": answer}})

async def give_up(episode):
    return "bored"

async def broken(episode):
    raise ZeroDivisionError("by zero")

async def broken_later(episode):
    if "reference" not in globals():
        globals()["reference"] = True
        return "bored"
    raise ZeroDivisionError("by zero")

def not_async(episode):
    pass
"""


@pytest.fixture
def players(tmp_path: Path) -> str:
    path = tmp_path / "players.py"
    known = {task["instruction"]: right(number)["answer"] for number, task in enumerate(TASKS)}
    path.write_text(PLAYERS.format(answers=json.dumps(known)))
    return str(path)


async def test_a_script_plays(agent: Agent, players: str) -> None:
    done = await agent.run("--script", f"{players}:solve", "--stop", "4", "--policy", "by-hand")

    assert (done.status, agent.rewards()) == (0, [1.0] * 4)
    assert (done.table["finished"], done.table["mean reward"]) == ("4", "1.000")
    assert agent.model.requests == []


async def test_a_script_says_why_it_ended_an_episode(agent: Agent, players: str) -> None:
    done = await agent.run("--script", f"{players}:give_up", "--stop", "2")

    assert (done.status, agent.rewards(), done.table["bored"]) == (0, [0.0, 0.0], "2")


async def test_a_script_that_fails_first_ends_the_run_and_later_only_an_episode(agent: Agent, players: str) -> None:
    first = await agent.run("--script", f"{players}:broken", "--stop", "4", "--at-once", "1")
    assert (first.status, first.stdout, agent.rewards()) == (1, "", [])
    assert re.search(rf"{re.escape(players)}:broken, line \d+: ZeroDivisionError: by zero \(fix: correct", first.stderr)

    later = await agent.run("--script", f"{players}:broken_later", "--stop", "3", "--at-once", "1")
    assert (later.status, agent.rewards()) == (0, [0.0, None, None])
    assert (later.table["bored"], later.table["script"]) == ("1", "2")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("players.py:solve", "No such file or directory"),
        ("{players}:nobody", "has no function `async def nobody(episode)`"),
        ("{players}:not_async", "has no function `async def not_async(episode)`"),
        ("{players}", "must be FILE.py:FUNCTION"),
    ],
)
async def test_a_wrong_script_is_a_usage_error(agent: Agent, players: str, place: str, text: str) -> None:
    done = await agent.run("--script", place.format(players=players))

    assert (done.status, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert text in done.stderr


# -- examples/agent.py ------------------------------------------------------------------------------------------------


async def test_the_example_plays_and_needs_only_the_client_package(agent: Agent) -> None:
    agent.model.script = answers

    done = await agent.run("--stop", "2", command=EXAMPLE_WITHOUT_RICH)

    assert (done.status, done.stderr, agent.rewards()) == (0, "", [1.0, 0.0])
    assert done.table["mean reward"] == "0.500"


async def test_the_example_plays_several_turns(agent: Agent) -> None:
    agent.model.script = guesses

    done = await agent.run(*GUESSING, command=EXAMPLE)

    assert (done.status, agent.rewards()) == (0, [1.0, 1.0])
    assert int(done.table["model calls"]) == len(agent.model.requests)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--split", "nope"], 1, "agent.py: gateway http"),
        (["--start", "5000"], 1, "agent.py: split 'train' has 1320 tasks"),
        (["--start", "-1"], 2, "--start must be at least 0"),
    ],
)
async def test_the_example_says_what_is_wrong(agent: Agent, arguments: list[str], status: int, text: str) -> None:
    done = await agent.run(*arguments, command=EXAMPLE)

    assert (done.status, done.stdout) == (status, "")
    assert text in done.stderr.splitlines()[-1]


async def test_the_example_draws_a_plot_of_the_rewards(agent: Agent, tmp_path: Path) -> None:
    agent.model.script = answers
    drawn = tmp_path / "rewards.svg"

    done = await agent.run("--stop", "2", "--plot", str(drawn), command=EXAMPLE)

    if find_spec("matplotlib"):
        assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
        assert done.status == 0
    else:
        assert (done.status, done.stderr) == (1, "agent.py: --plot needs matplotlib (fix: pip install matplotlib)\n")
        assert agent.model.requests == []
