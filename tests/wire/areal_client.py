"""A trainer that calls a task server exactly as AReaL's ``TaskServerWorkflow`` does.

It uses one connection for each request and closes it afterwards. One timeout covers the whole request. Only status 200
is a success, and the client never retries. The model's texts end with its special token.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from tests.deadlines import HANG_S

END = "<|im_end|>"


class Failed(Exception):
    """An answer with a status other than 200. The workflow then drops the trajectory."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Trajectory:
    """The result of a rollout: the sum of the rewards, and the last ``info``, which goes into the statistics."""

    reward: float
    turns: int
    info: dict[str, Any]
    seen: list[str]
    """The texts that the model read, in order."""


class ArealClient:
    """A workflow's view of one task server. *url* has no ``/api``, as AReaL's users configure it."""

    def __init__(self, url: str, *, total_s: float = HANG_S) -> None:
        self._base = url.rstrip("/") + "/api"
        self._timeout = aiohttp.ClientTimeout(total=total_s)

    async def request(
        self, method: str, path: str, *, json: Any = None, data: bytes | io.BytesIO | None = None
    ) -> tuple[int, Any]:
        """Send one request over its own connection, and return the status and the parsed body."""
        connector = aiohttp.TCPConnector(force_close=True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=self._timeout) as session,
            session.request(method, self._base + path, json=json, data=data, allow_redirects=False) as response,
        ):
            assert response.content_type == "application/json", (response.status, response.content_type)
            return response.status, await response.json()

    async def ask(self, method: str, path: str, *, json: Any = None) -> Any:
        """Send a request that must succeed.

        Raises:
            Failed: The status is not 200.
        """
        status, body = await self.request(method, path, json=json)
        if status != 200:
            raise Failed(status, body)
        return body

    async def info(self) -> Any:
        return await self.ask("GET", "/task/info")

    async def start(self, sample: str | int, **fields: Any) -> Any:
        """Start an episode. The workflow always sends an empty ``config``."""
        return await self.ask("POST", "/episode/start", json={"sample_id": sample, "config": {}, **fields})

    async def step(self, episode: str, text: str) -> Any:
        """Send a model's text, with its special token."""
        return await self.act(episode, {"type": "text", "content": text + END})

    async def act(self, episode: str, action: Any) -> Any:
        return await self.ask("POST", "/episode/step", json={"episode_id": episode, "action": action})

    async def tool(self, episode: str, name: str, **arguments: Any) -> Any:
        """Send a structured action."""
        return await self.act(episode, {"type": "structured", "content": {"name": name, "arguments": arguments}})

    async def cancel(self, episode: str) -> Any:
        return await self.ask("POST", "/episode/cancel", json={"episode_id": episode})

    async def rollout(self, sample: str | int, agent: Callable[[str], str], *, max_turns: int = 20) -> Trajectory:
        """Play an episode as the workflow does: add up rewards, and cancel the episode after a failure.

        Raises:
            Failed, TimeoutError, KeyError: The rollout failed. The workflow then drops the trajectory.
        """
        assert (await self.info())["name"]
        started = await self.start(str(sample))
        episode, seen, total = started["episode_id"], [_text(started["observation"])], 0.0
        try:
            for turn in range(1, max_turns + 1):
                reply = await self.step(episode, agent(seen[-1]))
                total += reply.get("reward", 0.0)
                if reply["done"]:
                    float(reply["info"].get("success", False))
                    return Trajectory(total, turn, reply["info"], seen)
                seen.append(_text(reply["observation"]))
        except (Failed, TimeoutError, asyncio.CancelledError):
            with contextlib.suppress(Failed):
                await self.cancel(episode)
            raise
        return Trajectory(total, max_turns, {}, seen)


def _text(observation: Any) -> str:
    assert observation["type"] == "text"
    assert isinstance(observation["content"], str)
    return observation["content"]
