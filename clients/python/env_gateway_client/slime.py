"""slime and miles: a function for ``--custom-generate-function-path``, in a file of yours:

    from env_gateway_client.slime import generator

    generate = generator("http://127.0.0.1:8080", "math")

Checked against the sources of THUDM/slime at 26e93f04 (``examples/search-r1``, ``slime/utils/types.py``); miles has the
same interface. Neither is on PyPI. This module imports nothing of theirs before the first call.

* ``sample.label`` names the task: ``{"split": "train", "index": 0}`` as JSON text, or a task's id. Instead,
  ``sample.metadata`` may have these keys. The episode's own prompt replaces ``sample.prompt``.
* ``sample.reward`` is set, so slime needs no reward model.
* An episode that fails is played again from its beginning; at the third failure the error is raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from env_gateway_client.agent import ChatML, gateway_of, options_of, play_text, replayed
from env_gateway_client.client import AsyncEpisode

MAX_TURNS = 64
"""Largest number of the model's turns in an episode."""


def generator(
    url: str,
    environment: str,
    *,
    key: str = "",
    package: str = "slime",
    text_tool: str = "",
    text_argument: str = "",
    chat: Any = None,
) -> Callable[..., Awaitable[Any]]:
    """Return the function for slime.

    Args:
        package: ``slime`` or ``miles``.
        text_tool: Tool for a text without a tool call, with the text as *text_argument*. Empty: such a text ends the
            episode.
        chat: Writes the conversation, as `env_gateway_client.agent.ChatML` does.
    """
    writer = chat or ChatML()

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        row = sample.metadata if {"index", "task_id"} & set(sample.metadata or ()) else sample.label

        async def play() -> Any:
            gateway = gateway_of(url, key)
            async with await gateway.open(environment, keep_alive=True, **options_of(row)) as episode:
                return await play_sample(episode, args, sample, sampling_params)

        return await replayed(play)

    async def play_sample(episode: AsyncEpisode, args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
        tokenizer, post = _parts(package, args)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        sample.prompt = writer.opening(episode)
        prompt = _ids(tokenizer, sample.prompt)
        response: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        left, status = int(sampling_params["max_new_tokens"]), type(sample).Status.TRUNCATED
        for _ in range(MAX_TURNS):
            if left <= 0:
                break
            params = {**sampling_params, "max_new_tokens": left}
            body = {"input_ids": prompt + response, "sampling_params": params, "return_logprob": True}
            meta = (await post(url, body))["meta_info"]
            pairs = meta["output_token_logprobs"]
            text = tokenizer.decode([int(pair[1]) for pair in pairs])  # with the token that ends the turn
            response += [int(pair[1]) for pair in pairs]
            logprobs += [float(pair[0]) for pair in pairs]
            mask += [1] * len(pairs)
            left -= len(pairs)
            if meta["finish_reason"]["type"] == "abort":  # slime stops all requests when it has enough samples
                status = type(sample).Status.ABORTED
                break
            if meta["finish_reason"]["type"] == "length":
                break
            turn = await play_text(episode, text, text_tool=text_tool, text_argument=text_argument)
            if turn.is_over:
                status = type(sample).Status.COMPLETED
                break
            feedback = _ids(tokenizer, writer.feedback(turn, text))
            response += feedback
            logprobs += [0.0] * len(feedback)
            mask += [0] * len(feedback)
            left -= len(feedback)
        sample.tokens, sample.response_length = prompt + response, len(response)
        sample.response = tokenizer.decode(response)
        sample.loss_mask, sample.rollout_log_probs = mask, logprobs
        sample.status = status
        sample.reward = None if status is type(sample).Status.ABORTED else episode.final_reward()
        return sample

    return generate


def _parts(package: str, args: Any) -> tuple[Any, Any]:
    """Return slime's tokenizer, and its function that sends a request to the inference engine."""
    import importlib

    state = importlib.import_module(f"{package}.rollout.sglang_rollout").GenerateState(args)
    return state.tokenizer, importlib.import_module(f"{package}.utils.http_utils").post


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
