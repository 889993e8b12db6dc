"""Gymnasium: an ``Env`` and a ``VectorEnv`` whose observations and actions are texts.

Checked against gymnasium 1.4.0, with which it was run too.

* An observation is the text of a prompt or a result. ``info["blocks"]`` has its blocks, with images.
* An action is ``{"tool": NAME, "arguments": {…}}``, or a text, which is the only argument of the only tool.
* ``info["rewarded"]`` is False in a step without a reward, where Gymnasium needs a number and gets 0.0.
* A failed episode has no reward: `GatewayEnv` raises `EpisodeFailed`. `GatewayVectorEnv` goes on without the episode:
  its reward is NaN, it is truncated, and ``info["error"]`` has the reason. Drop such an episode.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
from gymnasium import Env, spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from env_gateway_client.client import Episode, Gateway
from env_gateway_client.content import StepResult, Tool, text_of
from env_gateway_client.errors import EpisodeFailed, InvalidRequest

MAX_CHARS = 1_000_000
"""Length that the spaces state for texts. They accept longer ones."""


class AnyText(spaces.Text):
    """The space of all texts. The space of Gymnasium has a finite set of characters."""

    def __init__(self) -> None:
        super().__init__(MAX_CHARS, min_length=0)

    def contains(self, x: Any) -> bool:
        """Return True for each text, and for an action that names its tool."""
        return isinstance(x, str | Mapping)


def call_of(action: str | Mapping[str, Any], tools: Sequence[Tool]) -> tuple[str, Mapping[str, Any]]:
    """Return tool and arguments of *action*. Raises ``InvalidRequest``: a text does not determine them."""
    if isinstance(action, Mapping):
        return str(action["tool"]), action.get("arguments", {})
    if len(tools) == 1:
        names = list((tools[0].input_schema or {}).get("properties", {}))
        if len(names) == 1:
            return tools[0].name, {names[0]: action}
    names = [tool.name for tool in tools]
    raise InvalidRequest(f"a text is an action only with one tool of one argument; pass tool and arguments, of {names}")


def info_of(result: StepResult) -> dict[str, Any]:
    """Return Gymnasium's info of a step."""
    info = {"blocks": result.blocks, "metadata": result.metadata, "ok": result.ok, "reason": result.reason}
    return info | {"rewarded": result.reward is not None}


class GatewayEnv(Env):
    """One episode at a time.

    Args:
        tasks: Pairs of split and index to draw from when `reset` has no options. Default: the tasks of ``train``.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  # as in the base class

    def __init__(self, gateway: Gateway, environment: str, tasks: Sequence[tuple[str, int]] = ()) -> None:
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.episode: Episode | None = None
        self._gateway = gateway
        self._environment = environment
        self._tasks = tasks

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Open an episode. *options* are those of ``Gateway.open``; without them, *seed* chooses the task too."""
        super().reset(seed=seed)
        self.close()
        chosen = dict(options or {}) or self._drawn(seed)
        if seed is not None:
            chosen.setdefault("seed", seed)
        self.episode = self._gateway.open(self._environment, keep_alive=True, **chosen)
        blocks, tools = self.episode.prompt, self.episode.openai_tools
        return text_of(blocks), {"blocks": blocks, "tools": tools, "episode": self.episode.id}

    def step(self, action: str | Mapping[str, Any]) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act. Raises ``EpisodeFailed``: the episode is over, and has no reward."""
        if self.episode is None:
            raise InvalidRequest("no episode is open: call reset first")
        result = self.episode.step(*call_of(action, self.episode.tools))
        return result.text, result.reward or 0.0, result.finished, False, info_of(result)

    def close(self) -> None:
        """End the episode."""
        if self.episode is not None:
            self.episode.close()

    def _drawn(self, seed: int | None) -> dict[str, Any]:
        if not self._tasks:
            self._tasks = [("train", i) for i in range(self._gateway.task_count(self._environment, "train"))]
        split, index = random.Random(seed).choice(self._tasks)
        return {"split": split, "index": index}


class GatewayVectorEnv(VectorEnv):
    """Episodes side by side, whose openings and steps wait in threads. Autoreset is off: pass ``reset_mask``."""

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012  # as in the base class

    def __init__(
        self, gateway: Gateway, environment: str, num_envs: int, tasks: Sequence[tuple[str, int]] = ()
    ) -> None:
        self.num_envs = num_envs
        self.single_observation_space = self.single_action_space = AnyText()
        self.observation_space = self.action_space = spaces.Tuple([AnyText()] * num_envs)
        self.envs = [GatewayEnv(gateway, environment, tasks) for _ in range(num_envs)]
        self._threads = ThreadPoolExecutor(num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """Open episodes: all, or those of ``options["reset_mask"]``. With an int, seeds are *seed*, *seed* + 1, …"""
        chosen = dict(options or {})
        mask = chosen.pop("reset_mask", [True] * self.num_envs)
        seeds = [seed + i for i in range(self.num_envs)] if isinstance(seed, int) else seed or [None] * self.num_envs

        def one(i: int) -> tuple[str, dict[str, Any]]:
            return self.envs[i].reset(seed=seeds[i], options=chosen) if mask[i] else ("", {})

        found = list(self._threads.map(one, range(self.num_envs)))
        return tuple(text for text, _ in found), self._infos([info for _, info in found])

    def step(self, actions: Sequence[str | Mapping[str, Any]]) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Act in all episodes that are not over. An episode that is over stays over, with no more reward."""

        def one(i: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
            episode = self.envs[i].episode
            if episode is not None and (episode.finished or episode.error is not None):
                reward = 0.0 if episode.error is None else float("nan")
                return "", reward, episode.finished, not episode.finished, {"rewarded": False}
            try:
                return self.envs[i].step(actions[i])
            except EpisodeFailed as error:
                return "", float("nan"), False, True, {"error": str(error), "rewarded": False}

        texts, rewards, ends, cuts, infos = zip(*self._threads.map(one, range(self.num_envs)), strict=True)
        flags = numpy.array(ends, dtype=numpy.bool_), numpy.array(cuts, dtype=numpy.bool_)
        return texts, numpy.array(rewards, dtype=numpy.float64), *flags, self._infos(list(infos))

    def close_extras(self, **kwargs: Any) -> None:
        """End all episodes."""
        for env in self.envs:
            env.close()
        self._threads.shutdown(wait=False)

    def _infos(self, infos: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one entry for each key, with a value for each episode, and ``_key`` with which of them have it."""
        found: dict[str, Any] = {}
        for key in sorted({key for info in infos for key in info}):
            values: Any = numpy.empty(len(infos), dtype=object)
            values[:] = [info.get(key) for info in infos]
            found[key], found[f"_{key}"] = values, numpy.array([key in info for info in infos])
        return found
