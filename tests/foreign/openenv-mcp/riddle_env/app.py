"""A riddle to be answered with tools: an OpenEnv environment on MCP, as users of the package write it.

Its tools are FastMCP's. The reward of an answer comes from ``step``, because a tool's result has no reward.
"""

import os
import time
import uuid
from typing import Any

from fastmcp import FastMCP  # type: ignore[import-not-found]  # not installed where types are checked
from openenv.core.env_server import create_app  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_environment import MCPEnvironment  # type: ignore[import-not-found]
from openenv.core.env_server.mcp_types import (  # type: ignore[import-not-found]
    CallToolAction,
    CallToolObservation,
)
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]

WORDS = ("river", "candle", "shadow", "mirror", "echo")


class Riddle(Observation):  # type: ignore[misc]
    text: str


class RiddleEnvironment(MCPEnvironment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("riddle")

        @mcp.tool  # type: ignore[untyped-decorator]
        def echo_message(message: str) -> str:
            """Echo back the provided message."""
            return message

        @mcp.tool  # type: ignore[untyped-decorator]
        def wait(seconds: float) -> str:
            """Take some time."""
            time.sleep(seconds)
            return "waited"

        @mcp.tool  # type: ignore[untyped-decorator]
        def finish(word: str) -> str:
            """Answer the riddle, which ends the episode."""
            return "right" if word == self._word else "wrong"

        super().__init__(mcp)
        self._word = ""
        self._state = State(episode_id=None, step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._word = WORDS[(seed or 0) % len(WORDS)]
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        return Riddle(text=f"Say the word {self._word!r} to finish.", done=False, reward=0.0)

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._judged(super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return self._judged(await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Riddle(text=f"Unknown action {type(action).__name__}: use the tools.")

    def _judged(self, observation: Observation) -> Observation:
        self._state.step_count += 1
        if isinstance(observation, CallToolObservation) and observation.tool_name == "finish" and not observation.error:
            observation.reward = float("right" in str(observation.result))
            observation.done = True
        return observation

    @property
    def state(self) -> State:
        return self._state


app = create_app(
    RiddleEnvironment,
    CallToolAction,
    CallToolObservation,
    env_name="riddle",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "1")),
)
