"""The counting environment on the official OpenEnv server, for the Python of a venv of scripts/openenv-clients.

``sync`` is the usual style of environments. ``async`` runs a step on the server's own loop. There is one process and no
access log. uvloop and httptools are used if installed. The type checker lacks the package, hence the comments.
"""

import sys
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app  # type: ignore[import-not-found]
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]

CAPACITY = 1024


class CountingAction(Action):  # type: ignore[misc]
    op: Literal["inc", "dec"]


class CountingObservation(Observation):  # type: ignore[misc]
    value: int
    text: str


class Counting(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._value = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CountingObservation:
        self._value = 0
        self._state = State(episode_id=episode_id, step_count=0)
        return CountingObservation(value=0, text="ready")

    def step(self, action: CountingAction, timeout_s: float | None = None, **kwargs: Any) -> CountingObservation:
        self._state.step_count += 1
        self._value += 1 if action.op == "inc" else -1
        return CountingObservation(value=self._value, text="moved", reward=0.0)

    @property
    def state(self) -> State:
        return self._state


class CountingAsync(Counting):
    async def reset_async(self, *args: Any, **kwargs: Any) -> CountingObservation:
        return self.reset(*args, **kwargs)

    async def step_async(self, *args: Any, **kwargs: Any) -> CountingObservation:
        return self.step(*args, **kwargs)


if __name__ == "__main__":
    kind = CountingAsync if sys.argv[1:] == ["async"] else Counting
    app = create_fastapi_app(
        kind, CountingAction, CountingObservation, max_concurrent_envs=CAPACITY, env_name="counting"
    )
    uvicorn.run(app, host="127.0.0.1", port=0, access_log=False)
