"""The environment ``faulty`` as users of ``openenv`` write it with MCP tools."""

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


class TextObservation(Observation):  # type: ignore[misc]
    text: str


class FaultyEnvironment(MCPEnvironment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("faulty")

        @mcp.tool  # type: ignore[untyped-decorator]
        def answer(text: str) -> str:
            """Answer."""
            raise ValueError("invalid entry in the table of answers")  # their server reads "invalid arguments" in it

        super().__init__(mcp)
        self._state = State(episode_id=None, step_count=0)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, fails: str = "", **kwargs: Any
    ) -> TextObservation:
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        if fails == "reset":
            raise KeyError("toop")
        return TextObservation(text="Answer.")

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> TextObservation:
        return TextObservation(text="Use the tool.")

    @property
    def state(self) -> State:
        return self._state


app = create_app(FaultyEnvironment, CallToolAction, CallToolObservation, env_name="faulty", max_concurrent_envs=4)
