"""A policy for `runs.Run`: a model behind an OpenAI-compatible endpoint, such as vLLM, SGLang or llama.cpp.

`Endpoint.play` is an episode: the prompt goes to the model, the model's tool calls go to the environment, and their
results go back to the model, until one of the two ends the episode.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import httpx

from env_gateway_client.agent import named_call
from env_gateway_client.client import AsyncEpisode
from env_gateway_client.content import Image, StepResult, failed_call, openai_content, text_of
from env_gateway_client.errors import EpisodeFailed, InvalidRequest
from env_gateway_client.runs import Message, Played, PolicyFailed

PAUSES_S: Final = (0.5, 1.0, 4.0)
"""Pauses in seconds before a request is sent again. A longer ``Retry-After`` of the endpoint has priority."""
LONGEST_PAUSE_S: Final = 60.0
FIXES: Final = {
    "400": "correct what the text names, such as the length of the context or the parser of tool calls",
    "401": "pass --endpoint-key, or set OPENAI_API_KEY",
    "404": "check --model, and --endpoint, which mostly ends in /v1",
    "429": "lower --at-once, or come again later",
    "503": "lower --at-once, or wait until the endpoint has loaded the model",
    "garbage": "check --endpoint, which mostly ends in /v1",
    "timeout": "raise --reply-s, or lower --at-once",
    "unreachable": "check --endpoint, and that its server runs",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """The endpoint, and how its model plays."""

    url: str
    """Address of the API, which mostly ends in ``/v1``."""
    model: str
    """Name of the model at the endpoint."""
    key: str = ""
    """The endpoint's API key. Empty: it needs none."""
    temperature: float = 1.0
    reply_s: float = 600.0
    """Seconds for one reply of the model."""
    max_turns: int = 32
    """Number of replies of the model in an episode."""
    text_tool: str = ""
    """Tool that gets a reply without a tool call. Empty: such a reply ends the episode."""
    text_argument: str = ""
    """Argument of `text_tool` that gets the reply."""
    images: bool = False
    """True: the model gets images. False: it gets the text ``[image]``."""

    def __post_init__(self) -> None:
        """Check the options. Raises ``ValueError`` with the option of the command line that is wrong."""
        if self.max_turns < 1:
            raise ValueError(f"--max-turns must be at least 1, and is {self.max_turns}")
        if not (self.key.isascii() and self.key.isprintable()):
            raise ValueError("--endpoint-key must be printable ASCII characters, without a line end")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--endpoint must look like http://127.0.0.1:8000/v1, and is {self.url!r}")


class EndpointFailed(PolicyFailed):
    """The endpoint refused, failed, or sent no chat completion."""

    def __init__(self, url: str, reason: str, text: str, pause_s: float | None = None) -> None:
        fix = FIXES.get(reason, "read the log of the endpoint")
        super().__init__(f"endpoint_{reason}", f"endpoint {url}: {text} (fix: {fix})")
        self.pause_s = pause_s
        """Seconds before the same request may succeed. None: a repetition does not help."""


class Endpoint:
    """The model. Use it in ``async with``, which closes its connections."""

    def __init__(self, options: EndpointOptions) -> None:
        key = {"authorization": f"Bearer {options.key}"} if options.key else {}
        headers = {"content-type": "application/json"} | key
        self.http = httpx.AsyncClient(headers=headers, timeout=None, limits=httpx.Limits(max_connections=None))
        self.url = f"{options.url.rstrip('/')}/chat/completions"
        self.options = options
        self._has_replied = False

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.http.aclose()

    async def play(self, episode: AsyncEpisode, played: Played) -> str:
        """Play *episode*, and return what ended it: ``finished``, ``max_turns``, or the endpoint's own reason.

        Raises:
            EndpointFailed: The model gave no reply. It ends the run if the endpoint has not replied to any request.
        """
        options, messages = self.options, played.messages
        content = openai_content if options.images else text_of
        messages.append({"role": "user", "content": content(episode.prompt)})
        for _ in range(options.max_turns):
            message, ended = await self.reply(played, episode.openai_tools)
            messages.append(message)
            images: list[Image] = []
            for call in message.get("tool_calls", []):
                result = await call_tool(episode, call["function"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
                images += [block for block in result.blocks if isinstance(block, Image)]
                if result.finished:
                    break
            if images and options.images:  # in a message of their own, because a tool's message takes text only
                messages.append({"role": "user", "content": openai_content(images)})
            if "tool_calls" not in message:
                if not options.text_tool:
                    return ended
                arguments = json.dumps({options.text_argument: message["content"]})
                result = await call_tool(episode, {"name": options.text_tool, "arguments": arguments})
                messages.append({"role": "user", "content": content(result.blocks)})
            if episode.finished:
                return "finished"
        return "max_turns"

    async def reply(self, played: Played, tools: list[Message]) -> tuple[Message, str]:
        """Return the model's next message, and why it ends. Repeat a request that the endpoint did not take."""
        body = {"model": self.options.model, "messages": played.messages, "temperature": self.options.temperature}
        content = json.dumps(body | ({"tools": tools} if tools else {}))
        for pause_s in (*PAUSES_S, None):
            try:
                return self._message(await self._post(content), played)
            except EndpointFailed as error:
                if pause_s is None or error.pause_s is None:
                    error.ends_run = not self._has_replied
                    raise
                await asyncio.sleep(max(pause_s, min(error.pause_s, LONGEST_PAUSE_S)))
        raise AssertionError("the last attempt returns or raises")

    async def _post(self, content: str) -> httpx.Response:
        try:
            async with asyncio.timeout(self.options.reply_s):
                response = await self.http.post(self.url, content=content)
        except TimeoutError as late:
            raise EndpointFailed(self.url, "timeout", f"no reply within {self.options.reply_s:g} s") from late
        except (httpx.RequestError, httpx.InvalidURL) as lost:
            text = f"no connection: {lost or type(lost).__name__}"
            raise EndpointFailed(self.url, "unreachable", text, 0.0) from lost
        if response.is_success:
            return response
        after = response.headers.get("retry-after", "")
        pause_s = (float(after) if after.isdecimal() else 0.0) if response.status_code in (429, 503) else None
        raise EndpointFailed(self.url, str(response.status_code), _line(response), pause_s)

    def _message(self, response: httpx.Response, played: Played) -> tuple[Message, str]:
        try:
            found = response.json()
            choice, usage = found["choices"][0], found.get("usage") or {}
            message = {"content": ""} | {name: value for name, value in choice["message"].items() if value}
            for call in message.get("tool_calls", []):
                name, arguments = call["function"]["name"], call["function"]["arguments"].strip() or "{}"
                call |= {"id": call["id"], "type": "function", "function": {"name": name, "arguments": arguments}}
            tokens = Counter({name: count for name, count in usage.items() if isinstance(count, int)})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise EndpointFailed(self.url, "garbage", f"no valid chat completion in {_line(response)}") from error
        self._has_replied = True
        played.model_calls += 1
        played.tokens = dict(tokens + Counter(played.tokens))
        return message | {"role": "assistant"}, str(choice.get("finish_reason") or "stop")


async def call_tool(episode: AsyncEpisode, function: dict[str, Any]) -> StepResult:
    """Call a tool once. A mistake of the model is a result, which it reads and can correct."""
    try:
        call = named_call(function["name"], function["arguments"])
        if not isinstance(call, str):
            return await episode.step(*call)
    except (InvalidRequest, RecursionError) as error:  # nothing ran, such as for NaN or a depth of thousands
        if episode.error is not None:
            raise EpisodeFailed(str(error)) from error
        call = str(error)
    wrong, function["arguments"] = function["arguments"], "{}"  # endpoints refuse bad JSON in earlier calls too
    return failed_call(f"{call}. The arguments were: {wrong[:1000]}", "input_validation")


def _line(response: httpx.Response) -> str:
    return f"HTTP {response.status_code}: {' '.join(response.text.split())[:300] or '(no text)'}"
