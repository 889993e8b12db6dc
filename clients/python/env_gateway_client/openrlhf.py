"""OpenRLHF: an agent executor. ``--train.agent_func_path`` loads a file of yours with the name ``AgentExecutor``:

    from env_gateway_client.openrlhf import executor

    AgentExecutor = executor("http://127.0.0.1:8080", "math")

Checked against the sources of openrlhf 0.11.2: ``openrlhf/utils/agent.py``, whose executor was run with a stand-in for
the model.

* The label of a row names the task: ``{"split": "train", "index": 0}`` as JSON text, or a task's id. The row's prompt
  is not used: the episode's own prompt is.
* OpenRLHF concatenates texts, so this module writes the conversation itself, in ChatML by default.
* An episode that fails is played again from its beginning; at the third failure the error is raised.
"""

from __future__ import annotations

from contextvars import ContextVar
from copy import deepcopy
from typing import Any

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

from env_gateway_client.agent import ChatML, gateway_of, options_of, play_text, replayed
from env_gateway_client.client import AsyncEpisode

_opened: ContextVar[list[AsyncEpisode]] = ContextVar("opened")
"""Episodes of the present execution. OpenRLHF makes the agent itself, and ends it without notice."""


def executor(
    url: str, environment: str, *, key: str = "", text_tool: str = "", text_argument: str = "", chat: Any = None
) -> type:
    """Return a class for ``AgentExecutor``.

    Args:
        text_tool: Tool for a text without a tool call, with the text as *text_argument*. Empty: such a text ends the
            episode.
        chat: Writes the conversation, as `env_gateway_client.agent.ChatML` does.
    """
    writer = chat or ChatML()

    class GatewayAgent(AgentInstanceBase):
        """Plays one episode."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._episode: AsyncEpisode | None = None

        async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            """Open the episode that the label names, and return its task as the first observation."""
            gateway = gateway_of(url, key)
            self._episode = await gateway.open(environment, keep_alive=True, **options_of(states["label"]))
            _opened.get().append(self._episode)
            return {**states, "observation": writer.opening(self._episode)}

        async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
            """Run the tool calls of the model's text. Raises ``EpisodeFailed``."""
            assert self._episode is not None, "OpenRLHF calls reset first"
            text = state_dict["action_text"]
            turn = await play_text(self._episode, text, text_tool=text_tool, text_argument=text_argument)
            score = self._episode.final_reward() if turn.is_over else self._episode.reward or 0.0
            return {
                "rewards": torch.tensor(turn.reward or 0.0),
                "scores": torch.tensor(score),
                "environment_feedback": "" if turn.is_over else writer.feedback(turn, text),
                "done": turn.is_over,
                "sampling_params": state_dict.get("sampling_params"),
                "extra_logs": {"finished": torch.tensor(float(self._episode.finished))},
            }

    class GatewayExecutor(MultiTurnAgentExecutor):
        """Plays episodes, ends each, and plays those again that failed."""

        def __init__(self) -> None:
            super().__init__(GatewayAgent)

        async def execute(
            self,
            prompt: Any,
            label: Any,
            sampling_params: Any,
            max_length: int,
            hf_tokenizer: Any,
            llm_engine: Any,
            images: Any = None,
        ) -> Any:
            """Play one episode of a row of the dataset."""

            async def play() -> Any:
                opened: list[AsyncEpisode] = []
                _opened.set(opened)
                params = deepcopy(sampling_params)  # OpenRLHF changes it
                try:
                    return await super(GatewayExecutor, self).execute(
                        prompt, label, params, max_length, hf_tokenizer, llm_engine, images
                    )
                finally:
                    for episode in opened:
                        await episode.close()

            return await replayed(play)

    return GatewayExecutor
