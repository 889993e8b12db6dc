"""The counting environment on the official OpenEnv server, as the reference for the gateway's frontend.

Run with the Python of a venv that scripts/openenv-clients made. The package is not installed where types are checked,
hence the comments. The server listens on a free port of the loopback, which it prints.
"""

import socket
import uuid
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app  # type: ignore[import-not-found]
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]
from pydantic import Field

SPLITS = {"train": (20, 3, 5), "test": (5, 2, 3)}
"""For each split: its number of tasks, the first task's target, and the number of targets after which they repeat."""


class CountingAction(Action):  # type: ignore[misc]
    op: Literal["inc", "dec", "raise", "noop"]
    by: int = Field(default=1, ge=0)


class CountingObservation(Observation):  # type: ignore[misc]
    value: int
    target: int
    text: str


class CountingState(State):  # type: ignore[misc]
    value: int = 0
    target: int = 0
    task_id: str = ""


class Counting(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = CountingState()

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        **kwargs: Any,
    ) -> CountingObservation:
        chosen = (seed or 0) % SPLITS[split][0] if index is None else index
        task = self.get_task(split, chosen)
        self._state = CountingState(
            episode_id=episode_id or str(uuid.uuid4()), step_count=0, target=task["target"], task_id=task["id"]
        )
        return self._observation("ready", metadata={"task_id": task["id"]})

    def step(self, action: CountingAction, timeout_s: float | None = None, **kwargs: Any) -> CountingObservation:
        state = self._state
        state.step_count += 1
        if action.op == "raise":
            raise RuntimeError("boom from env")
        state.value += {"inc": action.by, "dec": -action.by, "noop": 0}[action.op]
        won = state.value == state.target
        return self._observation(f"value={state.value}", reward=1.0 if won else 0.0, done=won)

    @property
    def state(self) -> CountingState:
        return self._state

    def list_splits(self) -> list[Any]:
        return list(SPLITS)

    def list_tasks(self, split: str) -> list[Any]:
        return self.get_task_range(split, 0, None)

    def num_tasks(self, split: str) -> int:
        return SPLITS[split][0]

    def get_task(self, split: str, index: int) -> Any:
        count, first, turns = SPLITS[split]
        if not 0 <= index < count:
            raise IndexError(index)
        return {"id": f"{split}-{index}", "index": index, "split": split, "target": first + index % turns}

    def get_task_range(self, split: str, start: int | None, stop: int | None) -> list[Any]:
        return [self.get_task(split, index) for index in range(SPLITS[split][0])[start:stop]]

    def _observation(self, text: str, **fields: Any) -> CountingObservation:
        return CountingObservation(value=self._state.value, target=self._state.target, text=text, **fields)


def main() -> None:
    app = create_fastapi_app(
        Counting,
        CountingAction,
        CountingObservation,
        max_concurrent_envs=16,
        env_name="counting",
        state_cls=CountingState,
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="info", access_log=False))
    print(f"official_ready url=http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
