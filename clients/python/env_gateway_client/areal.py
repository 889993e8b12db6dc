"""AReaL: a rollout workflow that plays an episode with AReaL's OpenAI-compatible client.

    options = {"url": "http://127.0.0.1:8080", "environment": "math", "gconfig": config.gconfig}
    trainer.train(
        workflow="env_gateway_client.areal.GatewayWorkflow",
        workflow_kwargs={**options, "tokenizer": config.tokenizer_path},
    )

Checked against the sources of areal 1.0.4: ``areal/api/workflow_api.py`` and ``areal/experimental/openai/client.py``.

* AReaL sends a workflow to its workers as the name of a class with arguments. An object would lose its arguments.
* A row of the dataset has ``split`` and ``index``, or ``task_id``.
* Each turn has the reward of its calls. With ``turn_discount``, a turn also gets the discounted rewards of later turns.
* An episode that failed is rejected (None), as AReaL's interface has it. AReaL then plays another row.

AReaL's own task server workflow needs no adapter: the gateway speaks its protocol.
"""

from __future__ import annotations

import logging
from typing import Any

from areal.api import RolloutWorkflow
from areal.experimental.openai import ArealOpenAI
from areal.utils.hf_utils import load_hf_tokenizer

from env_gateway_client.agent import Turn, gateway_of, named_call, options_of, play_calls, play_text
from env_gateway_client.client import AsyncEpisode
from env_gateway_client.content import openai_content
from env_gateway_client.errors import EpisodeFailed

logger = logging.getLogger("env_gateway_client")


class GatewayWorkflow(RolloutWorkflow):
    """Plays an episode for each row.

    Args:
        tokenizer: A tokenizer, or its name or folder.
        gconfig: AReaL's ``GenerationHyperparameters``.
        turn_discount: Factor for the rewards of each later turn.
        text_tool: Tool for a text without a tool call, with the text as *text_argument*. Empty: such a text ends the
            episode.
    """

    def __init__(
        self,
        url: str,
        environment: str,
        *,
        tokenizer: Any,
        gconfig: Any,
        key: str = "",
        max_turns: int = 32,
        turn_discount: float = 1.0,
        text_tool: str = "",
        text_argument: str = "",
    ) -> None:
        self._place = url, key, environment
        self._tokenizer = load_hf_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self._gconfig = gconfig
        self._max_turns = max_turns
        self._turn_discount = turn_discount
        self._text = {"text_tool": text_tool, "text_argument": text_argument}

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        """Play the episode that *data* names. Return its interactions with their rewards, or None if it failed."""
        url, key, environment = self._place
        client = ArealOpenAI(engine=engine, tokenizer=self._tokenizer)
        try:
            async with await gateway_of(url, key).open(environment, keep_alive=True, **options_of(data)) as episode:
                await self._play(episode, client)
                episode.final_reward()  # raises if there is no reward
        except EpisodeFailed as error:
            logger.warning("an episode of %s has no reward, and is rejected: %s", environment, error)
            return None
        client.apply_reward_discount(turn_discount=self._turn_discount)
        return client.export_interactions(style="individual")

    async def _play(self, episode: AsyncEpisode, client: Any) -> None:
        messages: list[Any] = [{"role": "user", "content": openai_content(episode.prompt)}]
        for _ in range(self._max_turns):
            completion = await client.chat.completions.create(
                messages=messages,
                tools=episode.openai_tools,
                temperature=self._gconfig.temperature,
                top_p=self._gconfig.top_p,
                max_completion_tokens=self._gconfig.max_new_tokens,
            )
            message = completion.choices[0].message
            turn = await self._act(episode, message)
            client.set_reward(completion.id, turn.reward or 0.0)
            if turn.is_over:
                return
            messages.append(message.model_dump(exclude_none=True))
            calls = message.tool_calls or []
            if not calls:
                messages.append({"role": "user", "content": openai_content(turn.blocks)})
            for call, result in zip(calls, turn.results, strict=False):
                messages.append({"role": "tool", "tool_call_id": call.id, "content": openai_content(result.blocks)})

    async def _act(self, episode: AsyncEpisode, message: Any) -> Turn:
        if message.tool_calls:
            calls = [named_call(call.function.name, call.function.arguments) for call in message.tool_calls]
            return await play_calls(episode, calls)
        return await play_text(episode, message.content or "", **self._text)
