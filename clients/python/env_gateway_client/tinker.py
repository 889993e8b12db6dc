"""tinker-cookbook: builders of environment groups, whose members begin together in the gateway (``X-Group-ID``).

    GatewayGroupBuilder("http://127.0.0.1:8080", "math", {"split": "train", "index": 0}, renderer, num_envs=8)
    GatewayDataset.of("http://127.0.0.1:8080", "math", "train", renderer, batch_size=16, group_size=8)

Checked against the sources of tinker_cookbook 0.6.1: ``rl/types.py``, ``rl/message_env.py``, ``renderers/base.py``.

* The builder can be pickled before ``make_envs``. ``cleanup`` ends the episodes.
* An episode that failed raises `EpisodeFailed` in its step, which the cookbook's strategies for rollouts handle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_cookbook.rl.message_env import EnvFromMessageEnv, MessageEnv, MessageStepResult
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from env_gateway_client.agent import named_call, options_of, play_calls, play_text
from env_gateway_client.client import AsyncEpisode, AsyncEpisodeGroup, AsyncGateway, Gateway
from env_gateway_client.content import Block, Image, Text, text_of


class GatewayMessageEnv(MessageEnv):
    """One episode as a conversation.

    Args:
        text_tool: Tool for a message without a tool call, with its text as *text_argument*. Empty: such a message ends
            the episode.
    """

    def __init__(self, episode: AsyncEpisode, renderer: Any, text_tool: str = "", text_argument: str = "") -> None:
        self.episode = episode
        self.example_id = episode.id
        self._renderer = renderer
        self._text = {"text_tool": text_tool, "text_argument": text_argument}
        self._messages: list[Any] = []

    async def initial_observation(self) -> list[Any]:
        """Return the tools and the task."""
        tools = [tool["function"] for tool in self.episode.openai_tools]
        self._messages = list(self._renderer.create_conversation_prefix_with_tools(tools))
        self._messages.append({"role": "user", "content": _content(self.episode.prompt)})
        return list(self._messages)

    async def step(self, message: Any) -> Any:
        """Run the message's tool calls. Raises ``EpisodeFailed``: the episode has no reward."""
        made = message.get("tool_calls") or []
        calls = [named_call(call.function.name, call.function.arguments) for call in made]
        mistakes = [f"this tool call can't be read: {call.error}" for call in message.get("unparsed_tool_calls") or []]
        if calls or mistakes:
            turn = await play_calls(self.episode, [*calls, *mistakes])
        else:
            turn = await play_text(self.episode, _text(message["content"]), **self._text)
        self._messages.append(message)
        for number, result in enumerate(turn.results):
            reply: dict[str, Any] = {
                "role": "tool" if number < len(made) else "user",
                "content": _content(result.blocks),
            }
            if number < len(made):
                reply |= {"name": made[number].function.name, "tool_call_id": made[number].id or ""}
            self._messages.append(reply)
        if turn.is_over:
            self.episode.final_reward()  # raises if there is no reward
        return MessageStepResult(
            reward=turn.reward or 0.0,
            episode_done=turn.is_over,
            next_messages=list(self._messages),
            metrics={"finished": float(self.episode.finished)} if turn.is_over else {},
        )


@dataclass
class GatewayGroupBuilder(EnvGroupBuilder):
    """Opens the episodes of one group on one task."""

    url: str
    environment: str
    task: Mapping[str, Any]
    """``split`` and ``index``, or ``task_id``; and ``seed`` if the gateway should not choose it."""
    renderer: Any
    num_envs: int
    key: str = field(default="", repr=False)
    text_tool: str = ""
    text_argument: str = ""
    adapter: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``EnvFromMessageEnv``, such as ``max_trajectory_tokens``."""
    _opened: list[tuple[AsyncGateway, AsyncEpisodeGroup]] = field(default_factory=list, init=False, repr=False)
    """The cookbook may open a group again before it cleans up, when an episode failed."""

    async def make_envs(self) -> Sequence[Any]:
        """Open all episodes together."""
        gateway = AsyncGateway(self.url, self.key)
        try:
            group = await gateway.open_group(self.environment, self.num_envs, keep_alive=True, **options_of(self.task))
        except BaseException:
            await gateway.close()
            raise
        self._opened.append((gateway, group))
        text = self.text_tool, self.text_argument
        envs = [GatewayMessageEnv(episode, self.renderer, *text) for episode in group]
        return [EnvFromMessageEnv(self.renderer, env, **self.adapter) for env in envs]

    async def cleanup(self) -> None:
        """End all episodes."""
        while self._opened:
            gateway, group = self._opened.pop()
            try:
                await group.close()
            finally:
                await gateway.close()

    def logging_tags(self) -> list[str]:
        """Return the environment's name."""
        return [self.environment]


@dataclass
class GatewayDataset(RLDataset):
    """Batches of groups."""

    builders: Sequence[GatewayGroupBuilder]
    batch_size: int

    @classmethod
    def of(
        cls, url: str, environment: str, split: str, renderer: Any, *, batch_size: int, group_size: int, key: str = ""
    ) -> GatewayDataset:
        """Return a dataset of all tasks of a split."""
        with Gateway(url, key) as gateway:
            count = gateway.task_count(environment, split)
        tasks = ({"split": split, "index": index} for index in range(count))
        builders = [GatewayGroupBuilder(url, environment, task, renderer, group_size, key=key) for task in tasks]
        return cls(builders, batch_size)

    def get_batch(self, index: int) -> Sequence[Any]:
        """Return the builders of batch *index*."""
        return self.builders[index * self.batch_size : (index + 1) * self.batch_size]

    def __len__(self) -> int:
        return len(self.builders) // self.batch_size


def _content(blocks: tuple[Block, ...]) -> Any:
    if not any(isinstance(block, Image) for block in blocks):
        return text_of(blocks)
    return [
        {"type": "text", "text": block.text} if isinstance(block, Text) else {"type": "image", "image": block.url}
        for block in blocks
    ]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")
