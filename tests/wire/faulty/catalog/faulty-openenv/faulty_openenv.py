"""As ``faulty``, as users of ``openenv`` write it."""

import uuid
from typing import Any

from openenv.core.env_server import create_app  # type: ignore[import-not-found]  # not installed where types are checked
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]


class AnswerAction(Action):  # type: ignore[misc]
    text: str


class TextObservation(Observation):  # type: ignore[misc]
    text: str


class FaultyEnvironment(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=None, step_count=0)

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, fails: str = "", **kwargs: Any
    ) -> TextObservation:
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        if fails == "reset":
            raise KeyError("toop")
        return TextObservation(text="Answer.")

    def step(self, action: AnswerAction, timeout_s: float | None = None, **kwargs: Any) -> TextObservation:
        raise KeyError("toop")

    @property
    def state(self) -> State:
        return self._state


app = create_app(FaultyEnvironment, AnswerAction, TextObservation, env_name="faulty", max_concurrent_envs=4)
