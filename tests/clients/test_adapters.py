"""The adapters for OpenRLHF, verl, AReaL, slime, tinker-cookbook and verifiers, on a real gateway.

Not run: these trainers, which need GPUs, or are not on PyPI. Each test has a stand-in with the names and signatures of
its trainer's interface, in the version that the adapter's docstring states, and drives the adapter as the trainer does.
Where the package is installed, the adapter's classes are those of the real package.
"""

import asyncio
import json
import os
import pickle
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
from env_gateway_client import AsyncGateway, EpisodeFailed, InvalidRequest, SessionLost
from env_gateway_client.agent import ChatML, options_of, play_text, replayed, tool_calls

from tests.clients.conftest import PROJECT, QUICK
from tests.clients.fakes import installed
from tests.wire.targets import Target

pytestmark = pytest.mark.wire

ROW = {"split": "train", "index": 0}
RIGHT = '<tool_call>\n{"name": "submit", "arguments": {"answer": "40"}}\n</tool_call><|im_end|>'
MISTAKE = "<tool_call>{not json}</tool_call><|im_end|>"
AS_TEXT = {"text_tool": "submit", "text_argument": "answer"}


@pytest.mark.parametrize("file", sorted((PROJECT / "examples/trainers").glob("*.py")), ids=lambda file: file.name)
def test_an_example_says_how_it_gets_a_trainers_key(file: Path) -> None:
    text = file.read_text()

    assert re.search(r"GATEWAY_KEY|OPENREWARD_API_KEY|--key|/k/KEY", text)
    for made in re.findall(r"\b(?:Gateway|AsyncGateway|GatewayWorkflow|GatewayGroupBuilder)\(.*\)", text):
        assert re.search(r"key|KEY", made), made


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
async def gateway(bundled: Target) -> Any:
    async with AsyncGateway(bundled.url, bundled.key or "", timeouts=QUICK) as gateway:
        yield gateway


# -- what the adapters share ------------------------------------------------------------------------------------------


async def test_a_text_is_played_by_its_tool_calls(gateway: AsyncGateway) -> None:
    async with await gateway.open("math", split="train", index=0) as episode:
        mistaken = await play_text(episode, MISTAKE)
        turn = await play_text(episode, f"I think: {RIGHT} {RIGHT}")

    assert "as JSON" in mistaken.results[0].text
    assert not mistaken.is_over
    assert (turn.is_over, turn.reward, len(turn.results)) == (True, 1.0, 1)


async def test_a_text_without_a_call_ends_the_agents_part_or_is_an_argument(gateway: AsyncGateway) -> None:
    async with await gateway.open("math", split="train", index=0) as episode:
        stopped = await play_text(episode, "I give up")
        unrewarded = episode.final_reward()
        turn = await play_text(episode, " 40<|im_end|>", **AS_TEXT)

    assert (stopped.results, stopped.is_over, unrewarded) == ((), True, 0.0)
    assert (turn.is_over, episode.final_reward()) == (True, 1.0)


def test_arguments_may_be_json_in_a_string() -> None:
    text = '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call><tool_call>{"name": "b"}</tool_call>'

    assert tool_calls(text) == [("a", {"x": 1}), ("b", {})]


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"split": "train", "index": "3", "seed": 7}, {"split": "train", "index": 3, "seed": 7}),
        ('{"split": "train", "index": 3}', {"split": "train", "index": 3}),
        ({"task_id": "t-1", "split": None}, {"task": "t-1"}),
        ("t-1", {"task": "t-1"}),
    ],
)
def test_a_row_names_its_task(row: Any, options: dict[str, Any]) -> None:
    assert options_of(row) == options


@pytest.mark.parametrize("row", [{}, {"split": "train"}, None])
def test_a_row_without_a_task_is_refused(row: Any) -> None:
    with pytest.raises(InvalidRequest, match="task_id"):
        options_of(row)


async def test_a_failed_episode_is_played_again_up_to_a_limit() -> None:
    played: list[int] = []

    async def play() -> int:
        played.append(1)
        if len(played) < 3:
            raise SessionLost("gone", reason="worker_lost")
        return len(played)

    assert await replayed(play) == 3
    played.clear()

    async def fail() -> None:
        played.append(1)
        raise SessionLost("gone", reason="worker_lost")

    with pytest.raises(SessionLost):
        await replayed(fail)
    assert len(played) == 3


async def test_an_episode_that_ended_without_any_reward_has_none_for_training(gateway: AsyncGateway) -> None:
    async with await gateway.open("math", split="train", index=0) as episode:
        result = await episode.step("submit", {"answer": "40"})
        episode.steps[:] = [type(result)(blocks=(), reward=None, finished=True)]

        with pytest.raises(EpisodeFailed, match="without a reward"):
            episode.final_reward()


# -- OpenRLHF ---------------------------------------------------------------------------------------------------------


class Number:
    def __init__(self, value: float) -> None:
        self._value = value

    def item(self) -> float:
        return self._value


class AgentInstanceBase:
    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return states

    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        raise NotImplementedError


class MultiTurnAgentExecutor:
    def __init__(self, agent_instance_cls: Any) -> None:
        assert issubclass(agent_instance_cls, AgentInstanceBase)
        self.agent_instance_cls = agent_instance_cls

    async def execute(
        self,
        prompt: str,
        label: str,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        agent = self.agent_instance_cls()
        text = (await agent.reset({"observation": prompt, "label": label}))["observation"]
        reward, done = 0.0, False
        sampling_params.max_tokens = 0
        while not done:
            action = llm_engine.pop(0)
            states = {"observation_text": text, "action_text": action, "label": label, "sampling_params": None}
            result = await agent.step(states)
            reward += result["rewards"].item()
            text += action + result["environment_feedback"]
            done = result["done"]
        return {"reward": reward, "scores": result["scores"].item(), "text": text, "label": label}


OPENRLHF: dict[str, dict[str, Any]] = {
    "openrlhf": {},
    "openrlhf.utils": {},
    "openrlhf.utils.agent": {
        "AgentInstanceBase": AgentInstanceBase,
        "MultiTurnAgentExecutor": MultiTurnAgentExecutor,
    },
    "torch": {"tensor": Number},
}


async def test_openrlhf_plays_an_episode(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "openrlhf", OPENRLHF)
    executor = adapter.executor(bundled.url, "math", key=bundled.key)()

    params = SimpleNamespace(max_tokens=5)
    played = await executor.execute("unused", json.dumps(ROW), params, 1000, None, [MISTAKE, RIGHT])

    assert (played["reward"], played["scores"]) == (1.0, 1.0)
    assert played["text"].startswith("<|im_start|>system\nYou may call these tools:")
    assert "State the final answer" in played["text"]
    assert "<|im_end|>\n<|im_start|>user\n<tool_response>\na tool call must be" in played["text"]
    assert "<|im_end|><|im_end|>" not in played["text"]
    assert params.max_tokens == 5


async def test_openrlhf_ends_the_episode_that_its_executor_abandons(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "openrlhf", OPENRLHF)
    executor = adapter.executor(bundled.url, "math", key=bundled.key)()

    with pytest.raises(IndexError):  # as if the length were used up
        await executor.execute("", json.dumps(ROW), SimpleNamespace(), 1000, None, [MISTAKE])
    # The fixture asserts that the gateway holds no session.


# -- verl -------------------------------------------------------------------------------------------------------------


class Tokenizer:
    """Each character is a token."""

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class AgentLoopBase:
    def __init__(self, trainer_config: Any, server_manager: Any, tokenizer: Any, **kwargs: Any) -> None:
        self.rollout_config = trainer_config
        self.server_manager = server_manager
        self.tokenizer = tokenizer

    async def ct_build_initial_tokens(
        self,
        messages: list[Any],
        tools: Any = None,
        images: Any = None,
        videos: Any = None,
        audios: Any = None,
        mm_inputs_out: Any = None,
    ) -> list[int]:
        assert tools[0]["function"]["name"] == "submit"
        return [ord(letter) for message in messages for letter in message["content"]]

    async def ct_merge_context_msg(
        self,
        previous_messages: list[Any],
        updated_messages: list[Any],
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: Any = None,
        tools: Any = None,
    ) -> Any:
        added = updated_messages[len(previous_messages) :]
        assert [message["role"] for message in added] == ["tool"] * len(added)
        new = [ord(letter) for message in added for letter in message["content"]]
        logprobs = None if response_logprobs is None else [*response_logprobs, *[0.0] * len(new)]
        return SimpleNamespace(token_ids=runtime_token_ids + new), response_mask + [0] * len(new), logprobs

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: Any = None,
        assistant_logprobs: Any = None,
    ) -> Any:
        merged = SimpleNamespace(token_ids=runtime_token_ids + assistant_token_ids)
        logprobs = None if response_logprobs is None else response_logprobs + assistant_logprobs
        return merged, response_mask + [1] * len(assistant_token_ids), logprobs


class ToolParser:
    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> Any:
        assert name == "hermes"
        return cls()

    async def extract_tool_calls(self, responses_ids: list[int], tools: Any = None) -> tuple[str, list[Any]]:
        calls = tool_calls("".join(map(chr, responses_ids)))
        named = [call for call in calls if not isinstance(call, str)]
        return "", [SimpleNamespace(name=name, arguments=json.dumps(arguments)) for name, arguments in named]


@dataclass
class AgentLoopOutput:
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    metrics: Any
    response_logprobs: Any = None
    multi_modal_data: Any = None
    reward_score: float | None = None
    num_turns: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)


VERL: dict[str, dict[str, Any]] = {
    "verl": {},
    "verl.experimental": {},
    "verl.experimental.agent_loop": {},
    "verl.experimental.agent_loop.agent_loop": {
        "AgentLoopBase": AgentLoopBase,
        "AgentLoopMetrics": dict,
        "AgentLoopOutput": AgentLoopOutput,
    },
    "verl.experimental.agent_loop.tool_parser": {"ToolParser": ToolParser},
}


class Engine:
    """Writes texts in order, with a log probability for each token."""

    def __init__(self, *texts: str) -> None:
        self._texts = list(texts)
        self.prompts: list[list[int]] = []

    async def generate(self, request_id: str, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        self.prompts.append(prompt_ids)
        tokens = [ord(letter) for letter in self._texts.pop(0)]
        return SimpleNamespace(token_ids=tokens, log_probs=[-1.0] * len(tokens))


async def test_verl_plays_an_episode(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "verl", VERL)
    config = SimpleNamespace(multi_turn=SimpleNamespace(format="hermes", max_assistant_turns=None), response_length=900)
    wrong = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'
    engine = Engine(wrong, RIGHT)
    loop = adapter.GatewayAgentLoop(config, engine, Tokenizer(), url=bundled.url, environment="math", key=bundled.key)

    output = await loop.run({}, raw_prompt=[], extra_info={**ROW, "tools_kwargs": {}}, agent_name="gateway")

    text = Tokenizer().decode(output.response_ids)
    assert text == wrong + "'nope' is not a valid tool" + RIGHT
    assert output.reward_score == 1.0
    assert len(output.response_mask) == len(output.response_ids) == len(output.response_logprobs)
    assert Tokenizer().decode([t for t, m in zip(output.response_ids, output.response_mask, strict=True) if m]) == (
        wrong + RIGHT
    )
    assert Tokenizer().decode(output.prompt_ids).startswith("State the final answer")
    assert engine.prompts[1] == output.prompt_ids + output.response_ids[: -len(RIGHT)]
    assert output.num_turns == 4


async def test_verl_runs_no_call_of_a_text_that_was_cut(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "verl", VERL)
    config = SimpleNamespace(multi_turn=SimpleNamespace(format="hermes", max_assistant_turns=3), response_length=20)
    loop = adapter.GatewayAgentLoop(
        config, Engine(RIGHT), Tokenizer(), url=bundled.url, environment="math", key=bundled.key
    )

    output = await loop.run({}, raw_prompt=[], extra_info=ROW)

    assert (len(output.response_ids), output.reward_score) == (20, 0.0)


# -- AReaL ------------------------------------------------------------------------------------------------------------


class RolloutWorkflow:
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        raise NotImplementedError


class Message(SimpleNamespace):
    def model_dump(self, exclude_none: bool = False) -> dict[str, Any]:
        return {"role": "assistant", "content": self.content}


class ArealOpenAI:
    def __init__(self, engine: list[Any], tokenizer: Any) -> None:
        self._engine = engine
        self.rewards: dict[str, float] = {}
        self.seen: list[Any] = []
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    async def _create(self, *, messages: list[Any], tools: Any, **sampling: Any) -> Any:
        self.seen = list(messages)
        assert tools[0]["type"] == "function"
        message = self._engine.pop(0)
        return SimpleNamespace(id=f"c{len(self._engine)}", choices=[SimpleNamespace(message=message)])

    def set_reward(self, id: str, reward: float) -> None:
        self.rewards[id] = reward

    def apply_reward_discount(self, turn_discount: float = 1.0) -> None:
        self.rewards["discount"] = turn_discount

    def export_interactions(self, style: str) -> Any:
        assert style == "individual"
        return self.rewards | {"seen": len(self.seen)}


AREAL: dict[str, dict[str, Any]] = {
    "areal": {},
    "areal.api": {"RolloutWorkflow": RolloutWorkflow},
    "areal.experimental": {},
    "areal.experimental.openai": {"ArealOpenAI": ArealOpenAI},
    "areal.utils": {},
    "areal.utils.hf_utils": {"load_hf_tokenizer": lambda name: f"the tokenizer {name}"},
}
SAMPLING = SimpleNamespace(temperature=1.0, top_p=1.0, max_new_tokens=100)


def called(name: str, arguments: str) -> Any:
    function = SimpleNamespace(name=name, arguments=arguments)
    return Message(content=None, tool_calls=[SimpleNamespace(id="c", function=function)])


async def test_areal_plays_an_episode(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "areal", AREAL)
    workflow = adapter.GatewayWorkflow(
        bundled.url, "math", key=bundled.key, tokenizer=None, gconfig=SAMPLING, turn_discount=0.9
    )

    found = await workflow.arun_episode([called("submit", "{"), called("submit", '{"answer": "40"}')], dict(ROW))

    assert found == {"c1": 0.0, "c0": 1.0, "discount": 0.9, "seen": 3}


async def test_areal_loads_a_tokenizer_by_its_name(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "areal", AREAL)
    seen: list[Any] = []

    def client(engine: list[Any], tokenizer: Any) -> ArealOpenAI:
        seen.append(tokenizer)
        return ArealOpenAI(engine, tokenizer)

    patch.setattr(adapter, "ArealOpenAI", client)
    workflow = adapter.GatewayWorkflow(bundled.url, "math", key=bundled.key, tokenizer="tiny", gconfig=SAMPLING)

    await workflow.arun_episode([called("submit", '{"answer": "40"}')], dict(ROW))

    assert seen == ["the tokenizer tiny"]


async def test_areal_takes_a_text_as_an_answer(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "areal", AREAL)
    workflow = adapter.GatewayWorkflow(
        bundled.url, "math", key=bundled.key, tokenizer=None, gconfig=SAMPLING, **AS_TEXT
    )

    found = await workflow.arun_episode([Message(content="40", tool_calls=None)], dict(ROW))

    assert found["c0"] == 1.0


async def test_areal_rejects_an_episode_that_failed(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "areal", AREAL)
    workflow = adapter.GatewayWorkflow(bundled.url, "math", key=bundled.key, tokenizer=None, gconfig=SAMPLING)

    async def lost(*args: Any) -> None:
        raise SessionLost("gone", reason="worker_lost")

    patch.setattr(workflow, "_play", lost)

    assert await workflow.arun_episode([], dict(ROW)) is None


# -- slime ------------------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    prompt: Any = ""
    label: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"

    status: "Sample.Status" = Status.PENDING


def slime_with(*texts: str, ends: str = "stop") -> dict[str, dict[str, Any]]:
    left = list(texts)

    async def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
        assert url == "http://router:30000/generate"
        assert body["return_logprob"] is True
        pairs = [[-1.0, ord(letter), None] for letter in left.pop(0)]
        return {"text": "", "meta_info": {"output_token_logprobs": pairs, "finish_reason": {"type": ends}}}

    state = lambda args: SimpleNamespace(tokenizer=Tokenizer())  # noqa: E731  # slime's is a class
    return {
        "slime": {},
        "slime.rollout": {},
        "slime.rollout.sglang_rollout": {"GenerateState": state},
        "slime.utils": {},
        "slime.utils.http_utils": {"post": post},
    }


ARGS = SimpleNamespace(sglang_router_ip="router", sglang_router_port=30000)


async def test_slime_plays_an_episode(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "slime", slime_with(MISTAKE, RIGHT))
    generate = adapter.generator(bundled.url, "math", key=bundled.key)

    sample = await generate(ARGS, Sample(label=json.dumps(ROW)), {"max_new_tokens": 2000})

    assert (sample.reward, sample.status) == (1.0, Sample.Status.COMPLETED), sample.response
    assert sample.response.startswith(MISTAKE + "\n<|im_start|>user\n<tool_response>")
    assert sample.response.endswith(RIGHT)
    assert sample.response_length == len(sample.loss_mask) == len(sample.rollout_log_probs)
    assert sum(sample.loss_mask) == len(MISTAKE + RIGHT)
    assert Tokenizer().decode(sample.tokens) == sample.prompt + sample.response


@pytest.mark.parametrize(("ends", "reward"), [("abort", None), ("length", 0.0)])
async def test_slime_states_why_a_sample_is_incomplete(
    bundled: Target, patch: pytest.MonkeyPatch, ends: str, reward: float | None
) -> None:
    adapter, _ = installed(patch, "slime", slime_with(RIGHT, ends=ends))
    generate = adapter.generator(bundled.url, "math", key=bundled.key)

    sample = await generate(ARGS, Sample(metadata=dict(ROW)), {"max_new_tokens": 2000})

    assert sample.reward == reward
    assert sample.status is (Sample.Status.ABORTED if ends == "abort" else Sample.Status.TRUNCATED)


# -- tinker-cookbook --------------------------------------------------------------------------------------------------


class MessageEnv: ...


@dataclass
class MessageStepResult:
    reward: float
    episode_done: bool
    next_messages: list[Any]
    metrics: dict[str, float] = field(default_factory=dict)
    logs: dict[str, Any] = field(default_factory=dict)
    next_stop_condition: Any = None


class EnvFromMessageEnv:
    def __init__(self, renderer: Any, message_env: Any, max_trajectory_tokens: int | None = None) -> None:
        self.message_env = message_env


class EnvGroupBuilder: ...


class RLDataset: ...


class Renderer:
    def create_conversation_prefix_with_tools(self, tools: list[Any], system_prompt: str = "") -> list[Any]:
        return [{"role": "system", "content": f"tools: {[tool['name'] for tool in tools]}"}]


TINKER: dict[str, dict[str, Any]] = {
    "tinker_cookbook": {},
    "tinker_cookbook.rl": {},
    "tinker_cookbook.rl.message_env": {
        "EnvFromMessageEnv": EnvFromMessageEnv,
        "MessageEnv": MessageEnv,
        "MessageStepResult": MessageStepResult,
    },
    "tinker_cookbook.rl.types": {"EnvGroupBuilder": EnvGroupBuilder, "RLDataset": RLDataset},
}


async def test_tinker_plays_a_group(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "tinker", TINKER)
    builder = adapter.GatewayGroupBuilder(
        bundled.url, "math", ROW, Renderer(), 3, key=bundled.key, **AS_TEXT, adapter={"max_trajectory_tokens": 100}
    )
    builder = pickle.loads(pickle.dumps(builder))

    envs = [env.message_env for env in await builder.make_envs()]
    opened = [await env.initial_observation() for env in envs]
    call = SimpleNamespace(id=None, function=SimpleNamespace(name="submit", arguments='{"answer": "40"}'))
    unread = SimpleNamespace(raw_text="x", error="not JSON")
    mistaken = await envs[0].step({"role": "assistant", "content": "", "unparsed_tool_calls": [unread]})
    results = [
        await envs[0].step({"role": "assistant", "content": "", "tool_calls": [call]}),
        await envs[1].step({"role": "assistant", "content": [{"type": "text", "text": "40"}]}),
        await envs[2].step({"role": "assistant", "content": "41"}),
    ]
    await builder.cleanup()
    await builder.cleanup()

    assert opened[0][0]["content"] == "tools: ['submit']"
    assert opened[0] == opened[1] == opened[2]
    assert (mistaken.episode_done, mistaken.next_messages[-1]["role"]) == (False, "user")
    assert [(result.reward, result.episode_done) for result in results] == [(1.0, True), (1.0, True), (0.0, True)]
    assert results[0].next_messages[-1]["role"] == "tool"
    assert results[0].next_messages[-1]["name"] == "submit"
    assert builder.logging_tags() == ["math"]


async def test_tinker_may_open_a_group_again_before_it_cleans_up(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "tinker", TINKER)
    builder = adapter.GatewayGroupBuilder(bundled.url, "math", ROW, Renderer(), 2, key=bundled.key)
    await builder.make_envs()
    await builder.make_envs()
    assert bundled.gateway is not None
    assert len(await bundled.gateway.sessions()) == 4

    await builder.cleanup()

    assert await bundled.gateway.sessions() == []


async def test_tinker_gets_batches_of_all_tasks(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "tinker", TINKER)

    dataset = await asyncio.to_thread(
        adapter.GatewayDataset.of,
        bundled.url,
        "math",
        "test",
        Renderer(),
        batch_size=4,
        group_size=2,
        key=bundled.key,
    )

    batch = dataset.get_batch(1)
    assert [builder.task["index"] for builder in batch] == [4, 5, 6, 7]
    assert len(dataset) == len(dataset.builders) // 4


# -- verifiers --------------------------------------------------------------------------------------------------------

A = TypeVar("A")
B = TypeVar("B")


class Record:
    """Keyword arguments as attributes, with the class's defaults, in place of pydantic's models."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


class TaskData(Record): ...


class TasksetConfig(Record):
    task: Any = None


class VerifiersTask(Generic[A]):
    def __init__(self, data: A, config: Any = None) -> None:
        self.data = data


class VerifiersTaskset(Generic[A, B]):
    def __init__(self, config: B) -> None:
        self.config = config


class VerifiersEnv(Generic[A]): ...


VERIFIERS: dict[str, dict[str, Any]] = {
    "verifiers": {},
    "verifiers.v1": {
        "AgentConfig": Record,
        "Env": VerifiersEnv,
        "EnvConfig": Record,
        "Task": VerifiersTask,
        "TaskData": TaskData,
        "Taskset": VerifiersTaskset,
        "TasksetConfig": TasksetConfig,
    },
}


class Interaction:
    """Plays the model: replies in order, and keeps what it was sent."""

    def __init__(self, *replies: str) -> None:
        self._replies = list(replies)
        self.sent: list[str] = []
        self.rewards: dict[str, float] = {}
        self.trace = SimpleNamespace(record_reward=self.rewards.__setitem__)

    async def __aenter__(self) -> "Interaction":
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def turn(self, message: str) -> Any:
        self.sent.append(message)
        return SimpleNamespace(terminated=not self._replies, last_reply=self._replies.pop(0) if self._replies else "")


async def test_verifiers_lists_tasks_and_plays_one(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, is_real = installed(patch, "verifiers", VERIFIERS)
    patch.setitem(os.environ, "GATEWAY_KEY", bundled.key or "")
    assert not is_real, "verifiers is installed now: make the rest of this test use its classes"
    config = adapter.GatewayConfig(url=bundled.url, environment="math", stop=3)

    tasks = await asyncio.to_thread(lambda: list(adapter.GatewayTaskset(config).load()))
    model = Interaction(MISTAKE, RIGHT)
    agents = SimpleNamespace(player=SimpleNamespace(interaction=lambda task: model))
    await adapter.GatewayPlayEnv().run(tasks[0], agents)

    assert [task.data.name for task in tasks] == ["math/train/0", "math/train/1", "math/train/2"]
    assert tasks[0].data.id == "train-chain_sum-1-01"
    assert bundled.key not in vars(tasks[0].data).values()
    assert "State the final answer" in model.sent[0]
    assert "as JSON" in model.sent[1]
    assert model.rewards == {"gateway": 1.0}


async def test_verifiers_gives_a_silent_model_no_reward_but_zero(bundled: Target, patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "verifiers", VERIFIERS)
    patch.setitem(os.environ, "GATEWAY_KEY", bundled.key or "")
    data = adapter.GatewayData(
        url=bundled.url,
        environment="math",
        split="train",
        index=0,
        key_variable="GATEWAY_KEY",
        text_tool="",
        text_argument="",
    )
    model = Interaction()
    agents = SimpleNamespace(player=SimpleNamespace(interaction=lambda task: model))

    await adapter.GatewayPlayEnv().run(adapter.GatewayTask(data), agents)

    assert model.rewards == {"gateway": 0.0}


def test_the_taskset_has_a_module_without_dots_in_its_name(patch: pytest.MonkeyPatch) -> None:
    adapter, _ = installed(patch, "verifiers", VERIFIERS)
    patch.delitem(sys.modules, "env_gateway_taskset", raising=False)

    import env_gateway_taskset

    assert env_gateway_taskset.GatewayTaskset is adapter.GatewayTaskset
    patch.delitem(sys.modules, "env_gateway_taskset", raising=False)


def test_a_conversation_in_chatml_closes_each_turn_once() -> None:
    writer = ChatML()
    turn: Any = SimpleNamespace(results=[SimpleNamespace(text="seen")])

    assert writer.feedback(turn, "text").startswith("<|im_end|>\n<|im_start|>user\n")
    assert writer.feedback(turn, "text<|im_end|>").startswith("\n<|im_start|>user\n")
