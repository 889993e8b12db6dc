"""The environment ``faulty`` as users of ``openenv`` write it."""

import uuid
from typing import Any

from openenv.core.env_server import create_app  # type: ignore[import-not-found]  # not installed where types are checked
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]

REWARDS: dict[str, list[float | None]] = {
    "reward": [float("nan")],  # this class accepts it, and OpenEnv's server writes it as null
    "no rewards": [None, None],
    "late reward": [None, 1.0],
    "early reward": [1.0, None],
}
"""The rewards of an episode's steps. The last step ends the episode."""


class AnswerAction(Action):  # type: ignore[misc]
    text: str


class TextObservation(Observation):  # type: ignore[misc]
    text: str


class FaultyEnvironment(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True
    fails_next = False
    """Whether the next constructor fails. A constructor has no task, so the reset before it decides."""

    def __init__(self) -> None:
        super().__init__()
        if FaultyEnvironment.fails_next:
            FaultyEnvironment.fails_next = False
            raise KeyError("toop")
        self._state = State(episode_id=None, step_count=0)
        self._rewards: list[float | None] | None = None

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, fails: str = "", **kwargs: Any
    ) -> TextObservation:
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        self._rewards = list(REWARDS[fails]) if fails in REWARDS else None
        FaultyEnvironment.fails_next = fails == "next constructor"
        if fails == "reset":
            raise KeyError("toop")
        return TextObservation(text="Answer.")

    def step(self, action: AnswerAction, timeout_s: float | None = None, **kwargs: Any) -> TextObservation:
        if self._rewards is None:
            raise KeyError("toop")
        reward = self._rewards.pop(0) if self._rewards else None
        return TextObservation(text="Heard.", reward=reward, done=not self._rewards)

    @property
    def state(self) -> State:
        return self._state


app = create_app(FaultyEnvironment, AnswerAction, TextObservation, env_name="faulty", max_concurrent_envs=4)
