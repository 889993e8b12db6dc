"""verl: an agent loop, for a YAML file of ``actor_rollout_ref.rollout.agent.agent_loop_config_path``:

    - name: gateway
      _target_: env_gateway_client.verl.GatewayAgentLoop
      url: http://127.0.0.1:8080
      environment: math

Checked against the sources of verl 0.9.1: ``verl/experimental/agent_loop/agent_loop.py`` and ``tool_parser.py``.

* A row of the dataset has ``raw_prompt`` (may be empty), ``agent_name: gateway``, and ``extra_info`` with ``split`` and
  ``index`` (or ``task_id``). The episode's own prompt is appended to ``raw_prompt`` as a user's message.
* ``actor_rollout_ref.rollout.multi_turn.format`` names the parser of tool calls, ``multi_turn.max_assistant_turns`` the
  limit of turns.
* An episode that fails is played again from its beginning; at the third failure the error is raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_parser import ToolParser

from env_gateway_client.agent import Turn, gateway_of, named_call, options_of, pil_parts, play_calls, replayed
from env_gateway_client.client import AsyncEpisode
from env_gateway_client.content import Block, Image, text_of


class GatewayAgentLoop(AgentLoopBase):
    """Plays an episode for each prompt.

    Args:
        url: Root of the gateway.
        environment: Name of the environment.
        key: Trainer's key.
        max_turns: Limit of the model's turns. 0: that of the configuration, or no limit.
    """

    def __init__(
        self, *args: Any, url: str, environment: str, key: str = "", max_turns: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._place = url, key, environment
        self._parser = ToolParser.get_tool_parser(self.rollout_config.multi_turn.format, self.tokenizer)
        self._max_turns = max_turns or self.rollout_config.multi_turn.max_assistant_turns or 0

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Play the episode that the row names, and return its tokens and reward."""
        url, key, environment = self._place
        row: Mapping[str, Any] = kwargs.get("extra_info") or kwargs

        async def play() -> Any:
            async with await gateway_of(url, key).open(environment, keep_alive=True, **options_of(row)) as episode:
                return await self._play(episode, sampling_params, list(kwargs.get("raw_prompt", ())))

        return await replayed(play)

    async def _play(self, episode: AsyncEpisode, sampling_params: dict[str, Any], messages: list[Any]) -> Any:
        tools, images = episode.openai_tools, [block.pil() for block in episode.prompt if isinstance(block, Image)]
        messages.append({"role": "user", "content": _content(episode.prompt)})
        tokens = await self.ct_build_initial_tokens(messages, tools=tools, images=images or None)
        mask: list[int] = []
        logprobs: list[float] | None = None
        turns, length = 0, self.rollout_config.response_length
        while len(mask) < length and (not self._max_turns or turns < self._max_turns):
            output = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=tokens, sampling_params=sampling_params, image_data=images or None
            )
            turns += 1
            if output.log_probs and logprobs is None:
                logprobs = []
            merged, mask, logprobs = await self.ct_merge_assistant_token(
                tokens, output.token_ids, mask, logprobs, assistant_logprobs=output.log_probs or None
            )
            tokens = merged.token_ids
            if len(mask) >= length:  # the model's text was cut, and so may its calls be
                break
            turn = await self._act(episode, output.token_ids, messages)
            if turn.is_over:
                break
            before = list(messages[: -len(turn.results)])
            images += [block.pil() for block in turn.blocks if isinstance(block, Image)]
            merged, mask, logprobs = await self.ct_merge_context_msg(
                before, messages, tokens, mask, logprobs, tools=tools
            )
            tokens = merged.token_ids
        return AgentLoopOutput(
            prompt_ids=tokens[: len(tokens) - len(mask)],
            response_ids=tokens[len(tokens) - len(mask) :][:length],
            response_mask=mask[:length],
            response_logprobs=logprobs[:length] if logprobs else None,
            multi_modal_data={"images": images} if images else {},
            reward_score=episode.final_reward(),
            num_turns=2 * turns,
            metrics=AgentLoopMetrics(),
            extra_fields={"turn_scores": [], "tool_rewards": [], "finished": episode.finished},
        )

    async def _act(self, episode: AsyncEpisode, tokens: list[int], messages: list[Any]) -> Turn:
        """Run the calls that *tokens* hold, and append the model's message and the results to *messages*."""
        text, calls = await self._parser.extract_tool_calls(tokens, [])
        turn = await play_calls(episode, [named_call(call.name, call.arguments) for call in calls])
        made = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        messages.append({"role": "assistant", "content": text or "", **({"tool_calls": made} if made else {})})
        messages += [{"role": "tool", "content": _content(result.blocks)} for result in turn.results]
        return turn


def _content(blocks: tuple[Block, ...]) -> Any:
    return pil_parts(blocks) if any(isinstance(block, Image) for block in blocks) else text_of(blocks)
