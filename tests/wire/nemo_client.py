"""An agent that calls a resources server exactly as NeMo Gym's Simple Agent does (``docs/design/nemo-gym.md``).

Its HTTP client has no cookie jar. The cookies of the seed pass through the agent's own server before they reach the
tools and ``verify``, so aiohttp filters them for another address first. The model sees the bodies of the tools.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from yarl import URL

from tests.deadlines import HANG_S

AGENT = URL("http://127.0.0.1:11001/v1/responses")
"""The address of the agent's own server."""


class Failed(Exception):
    """A seed or a verify with a status other than 200. The rollout then has no reward."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.detail = json.loads(body)["detail"]


@dataclass(frozen=True)
class Call:
    """A tool call of the model."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Rollout:
    """The result of an episode: its reward, and the texts of the tools, in order."""

    reward: float
    seen: list[str]


class NemoEpisode:
    """One episode of an agent on the resources server at *url*."""

    def __init__(self, url: str, row: Mapping[str, Any]) -> None:
        self._url = url.rstrip("/")
        self._row = dict(row)
        self._cookies: dict[str, str] = {}
        self._output: list[dict[str, Any]] = []

    async def seed(self) -> str:
        """Open the episode, and return the prompt: the input of the row, or what the gateway adds. Raises `Failed`."""
        async with self._client() as client, client.post(f"{self._url}/seed_session", json=self._row) as response:
            text = await response.text()
            if response.status != 200:
                raise Failed(response.status, text)
            jar = aiohttp.CookieJar()
            jar.update_cookies(response.cookies)
            self._cookies = {name: morsel.value for name, morsel in jar.filter_cookies(AGENT).items()}
        said = self._row["responses_create_params"]["input"]
        return str(json.loads(text).get("prompt") or "\n".join(texts_of(said)))

    async def call(self, call: Call) -> str:
        """Call a tool, and return the text that the model sees, also that of an error."""
        async with (
            self._client() as client,
            client.post(f"{self._url}/{call.name}", json=dict(call.arguments), cookies=self._cookies) as response,
        ):
            text = await response.text()
            self._cookies |= {name: morsel.value for name, morsel in response.cookies.items()}
        made = {"type": "function_call", "name": call.name, "arguments": json.dumps(call.arguments), "call_id": "c"}
        self._output += [made, {"type": "function_call_output", "call_id": "c", "output": text}]
        return text

    async def verify(self, text: str = "") -> float:
        """End the episode with the agent's final text, and return the reward. Raises `Failed`."""
        sent, verified = await self.verified(text)
        assert {name: verified[name] for name in sent} == sent, "the response repeats the request"
        return float(verified["reward"])

    async def verified(self, text: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Verify the episode with the agent's final text. Return the request and the response. Raises `Failed`."""
        content = [{"type": "output_text", "text": text, "annotations": []}]
        said = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
        answer = {
            "id": "r",
            "object": "response",
            "model": "m",
            "created_at": 0.0,
            "output": [*self._output, *([said] if text else [])],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        }
        body = self._row | {"response": answer}
        async with (
            self._client() as client,
            client.post(f"{self._url}/verify", json=body, cookies=self._cookies) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise Failed(response.status, text)
        return body, json.loads(text)

    @staticmethod
    def _client() -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=HANG_S)
        return aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout)


class StockEpisode(NemoEpisode):
    """One episode on a server of NeMo Gym's package. Some of its servers do not repeat their request."""

    async def verify(self, text: str = "") -> float:
        """End the episode with the agent's final text, and return the reward. Raises `Failed`."""
        _, verified = await self.verified(text)
        return float(verified["reward"])


class GymEpisode(NemoEpisode):
    """One episode on a server with ``/reset`` and ``/step``, as NeMo Gym's Gymnasium agent plays it."""

    async def seed(self) -> str:
        """Open the episode, and return the prompt. Raises `Failed`."""
        reset = await self._post("reset", {})
        said = [*texts_of(self._row["responses_create_params"]["input"]), reset["observation"] or ""]
        return "\n".join(said)

    async def step(self, action: Call | str) -> dict[str, Any]:
        """Send the output of one response of a model, and return the answer. Raises `Failed`."""
        if isinstance(action, str):
            content = [{"type": "output_text", "text": action, "annotations": []}]
            item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
        else:
            arguments = json.dumps(action.arguments)
            item = {"type": "function_call", "name": action.name, "arguments": arguments, "call_id": "c"}
        response = {
            "id": "r",
            "object": "response",
            "model": "m",
            "created_at": 0.0,
            "output": [item],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        }
        return await self._post("step", {"response": response})

    async def _post(self, route: str, more: Mapping[str, Any]) -> dict[str, Any]:
        async with (
            self._client() as client,
            client.post(f"{self._url}/{route}", json=self._row | dict(more), cookies=self._cookies) as response,
        ):
            text = await response.text()
            if response.status != 200:
                raise Failed(response.status, text)
            self._cookies |= {name: morsel.value for name, morsel in response.cookies.items()}
        answer: dict[str, Any] = json.loads(text)
        return answer


def texts_of(value: Any) -> Iterator[str]:
    """Yield the texts of messages."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from texts_of(one)
    elif isinstance(value, dict):
        yield from texts_of(value.get("content", value.get("text")))


async def rollout(url: str, row: Mapping[str, Any], calls: Sequence[Call] = (), text: str = "") -> Rollout:
    """Play one episode: *calls*, then the final *text*."""
    episode = NemoEpisode(url, row)
    await episode.seed()
    seen = [await episode.call(call) for call in calls]
    return Rollout(await episode.verify(text), seen)


def row_of(environment: str, *, split: str = "train", index: int = 0, **params: Any) -> dict[str, Any]:
    """Return a row for a task at its place."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": "…"}], **params},
        "verifier_metadata": {"environment": environment, "split": split, "index": index},
    }
