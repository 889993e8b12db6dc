"""Pictures to be named: an OpenEnv environment with the habits of public ones, on the unmodified package.

The question is in the metadata of an observation, the picture is an array of pixels, and an unknown name raises an
exception. ``server.py --port PORT``, run by the Python of a venv with openenv.
"""

import argparse
from typing import Any

import uvicorn
from openenv.core.env_server import create_app  # type: ignore[import-not-found]  # not installed where types are checked
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255)}
SIZE = 8


class Name(Action):  # type: ignore[misc]
    color: str


class Picture(Observation):  # type: ignore[misc]
    pixels: list[list[list[int]]]
    lives: int
    hint: str | None = None


class Gallery(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self._state = State(episode_id=None, step_count=0)
        self._left = 2
        self._color = "red"

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id, step_count=0)
        self._left = 2
        self._color = list(COLORS)[(seed or 0) % len(COLORS)]
        return self._seen(metadata={"prompt": "Which color has this picture?", "colors": list(COLORS)})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        if action.color not in COLORS:
            raise ValueError(f"there is no color {action.color!r}")
        if action.color == self._color:
            return self._seen(reward=0.75, done=True)
        self._left -= 1
        return self._seen(reward=-0.25, done=self._left == 0, hint=f"not {action.color}")

    def _seen(self, *, reward: float = 0.0, done: bool = False, hint: str | None = None, **more: Any) -> Observation:
        pixels = [[list(COLORS[self._color])] * SIZE] * SIZE
        return Picture(pixels=pixels, lives=self._left, hint=hint, reward=reward, done=done, **more)

    @property
    def state(self) -> State:
        return self._state


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    app = create_app(Gallery, Name, Picture, env_name="gallery", max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port)
