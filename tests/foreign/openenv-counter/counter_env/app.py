"""A counter that must reach its target: an OpenEnv environment as users of the package write it, from 0.2.0 on.

``MAX_CONCURRENT_ENVS`` sets the number of sessions (default 1). Some operations exist for tests: ``wait`` waits,
``raise`` raises, ``kill`` ends the process, ``long`` returns a long text.
"""

import os
import signal
import time
import uuid
from typing import Any, Literal

from openenv.core.env_server import create_app  # type: ignore[import-not-found]  # not installed where types are checked
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]
from pydantic import Field

SPLITS = {"train": (20, 3, 5), "test": (5, 2, 3)}
"""For each split: the number of tasks, the first target, and the number of tasks after which targets repeat."""


class CounterAction(Action):  # type: ignore[misc]
    op: Literal["inc", "dec", "noop", "stop", "raise", "wait", "kill", "long"]
    by: int = Field(default=1, ge=0)
    seconds: float = Field(default=0.0, ge=0, description="How long wait takes.")
    file: str = Field(default="", description="What wait waits for, at most *seconds*; FILE.began is made first.")


class CounterObservation(Observation):  # type: ignore[misc]
    value: int
    target: int
    text: str


class CounterEnvironment(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        time.sleep(float(os.environ.get("COUNTER_CONSTRUCTOR_S", "0")))
        self._state = State(episode_id=None, step_count=0)
        self._value = 0
        self._target = 0

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        **kwargs: Any,
    ) -> CounterObservation:
        chosen = (seed or 0) % SPLITS[split][0] if index is None else index
        self._target = self.get_task(split, chosen)["target"]
        self._value = 0
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        return self._observation(f"Count to {self._target}.")

    def step(self, action: CounterAction, timeout_s: float | None = None, **kwargs: Any) -> CounterObservation:
        self._state.step_count += 1
        if action.op == "raise":
            raise RuntimeError("boom from env")
        if action.op == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            os._exit(137)  # a container's first process is immune to its own signals
        if action.op == "wait":
            _wait(action.seconds, action.file)
        if action.op == "long":
            return self._observation("x" * action.by)
        self._value += {"inc": action.by, "dec": -action.by}.get(action.op, 0)
        won = self._value == self._target
        return self._observation(f"value={self._value}", reward=float(won), done=won or action.op == "stop")

    @property
    def state(self) -> State:
        return self._state

    def list_splits(self) -> list[Any]:
        return list(SPLITS)

    def list_tasks(self, split: str) -> list[Any]:
        return self.get_task_range(split, None, None)

    def num_tasks(self, split: str) -> int:
        return SPLITS[split][0]

    def get_task(self, split: str, index: int) -> Any:
        count, first, turns = SPLITS[split]
        if not 0 <= index < count:
            raise IndexError(index)
        return {"id": f"{split}-{index}", "index": index, "split": split, "target": first + index % turns}

    def get_task_range(self, split: str, start: int | None, stop: int | None) -> list[Any]:
        return [self.get_task(split, index) for index in range(SPLITS[split][0])[start:stop]]

    def _observation(self, text: str, **fields: Any) -> CounterObservation:
        return CounterObservation(value=self._value, target=self._target, text=text, **fields)


def _wait(seconds: float, file: str) -> None:
    deadline = time.monotonic() + seconds
    if file:
        open(f"{file}.began", "w").close()
    while time.monotonic() < deadline and not (file and os.path.exists(file)):
        time.sleep(0.02)


app = create_app(
    CounterEnvironment,
    CounterAction,
    CounterObservation,
    env_name="counter",
    max_concurrent_envs=int(os.environ.get("MAX_CONCURRENT_ENVS", "1")),
)
