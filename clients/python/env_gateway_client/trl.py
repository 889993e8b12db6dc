"""TRL: an environment factory for ``GRPOTrainer(environment_factory=…)`` and TRL's async GRPO.

Checked against the sources of trl 1.16.0: ``trl/trainer/grpo_trainer.py`` and
``trl/experimental/async_grpo/async_rollout_worker.py``; the tools' schemas with transformers 5.24. This module does not
import TRL.

TRL takes the public methods of the environment's class as tools. So the factory asks the gateway for the tools of the
environment, and makes a class that has a method for each. Tools that only single tasks have are not among them.

    factory = EnvironmentFactory("http://127.0.0.1:8080", "math")
    GRPOTrainer(…, train_dataset=Dataset.from_list(factory.rows("train")), environment_factory=factory)

* The factory can be pickled, which async GRPO needs. Each process then has its own connections.
* An episode that failed has the reward None, which TRL leaves out of its group's baseline.
* An episode that its environment ended frees its slot at once: TRL closes no environment after its last batch.
"""

from __future__ import annotations

import functools
import inspect
import json
import keyword
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

from env_gateway_client.agent import ATTEMPTS, options_of, pil_parts
from env_gateway_client.client import Episode, Gateway
from env_gateway_client.content import Image, StepResult, Tool, text_of
from env_gateway_client.errors import EpisodeFailed
from env_gateway_client.plans import Timeouts

_TYPES: Mapping[str, type] = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict
}  # fmt: skip


@dataclass(frozen=True)
class EnvironmentFactory:
    """Makes environments for TRL: call it without arguments."""

    url: str
    environment: str
    key: str = field(default="", repr=False)
    policy: str = ""
    """Tag of the policy, for the gateway's records of tasks."""
    timeouts: Timeouts = Timeouts()  # noqa: RUF009  # a frozen value

    def __call__(self) -> Any:
        return _class_of(self)()

    def rows(self, split: str, start: int = 0, stop: int | None = None) -> list[dict[str, Any]]:
        """Return the rows of a dataset with the tasks of *split*. The prompt itself comes from `reset`."""
        tasks = _gateway(self).tasks(self.environment, split, start, stop)
        prompt = [{"role": "user", "content": ""}]
        return [{"prompt": prompt, "split": task.split, "index": task.index, "task_id": task.id} for task in tasks]


@functools.cache
def _gateway(factory: EnvironmentFactory) -> Gateway:
    return Gateway(factory.url, factory.key, timeouts=factory.timeouts)


class _Environment:
    """Base of the classes that factories make. Public functions of a class are tools, so it has only these two."""

    _factory: EnvironmentFactory

    def __init__(self) -> None:
        self._episode: Episode | None = None

    def reset(self, **row: Any) -> Any:
        """Open an episode on the row's ``split`` and ``index``, or else on its ``task_id``. ``seed`` is optional.

        Returns:
            The task: text, or a list of parts if it has images. TRL appends it to the prompt.
        """
        self._close()
        options = options_of(row)
        options["policy"] = self._factory.policy
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._episode = _gateway(self._factory).open(self._factory.environment, keep_alive=True, **options)
                break
            except EpisodeFailed:  # an error of `reset` ends the training run
                if attempt == ATTEMPTS:
                    raise
        assert self._episode is not None
        return _content(self._episode.prompt)

    def get_reward(self) -> float | None:
        """Return the sum of the episode's rewards, and close it. None: it failed, so it has no reward."""
        self._close()
        try:
            return None if self._episode is None else self._episode.final_reward()
        except EpisodeFailed:
            return None

    @property
    def finished(self) -> bool:
        """True if the environment ended the episode. For reward functions, which get ``environments``."""
        return self._episode is not None and self._episode.finished

    @property
    def episode(self) -> Episode | None:
        """The present episode, with its results and its error. For reward functions."""
        return self._episode

    def _call(self, tool: str, arguments: Mapping[str, Any]) -> Any:
        assert self._episode is not None, "TRL calls reset first"
        if self._episode.finished:
            return "The episode has finished. Nothing more can be done."
        result: StepResult = self._episode.step(tool, arguments)
        if result.finished:
            self._close()
        return _content(result.blocks)

    def _close(self) -> None:
        if self._episode is not None:
            self._episode.close()


def _content(blocks: tuple[Any, ...]) -> Any:
    return pil_parts(blocks) if any(isinstance(block, Image) for block in blocks) else text_of(blocks)


@functools.cache
def _class_of(factory: EnvironmentFactory) -> type[_Environment]:
    """Return the class of *factory*, one per process: TRL compares the types of environments."""
    methods = {}
    for tool in _gateway(factory).tools(factory.environment):
        name = _method_name(tool.name)
        methods[name] = _method(name, tool)
    name = "".join(part.capitalize() for part in factory.environment.replace("_", "-").split("-"))
    return type(
        name, (_Environment,), {"_factory": factory, "__doc__": f"Episodes of {factory.environment}.", **methods}
    )


def _method_name(tool: str) -> str:
    name = "".join(letter if letter.isalnum() else "_" for letter in tool)
    is_taken = keyword.iskeyword(name) or name.startswith("_") or hasattr(_Environment, name) or not name.isidentifier()
    return f"call_{name}" if is_taken else name


def _method(name: str, tool: Tool) -> Callable[..., Any]:
    """Return a method with the signature, type hints and Google docstring that Transformers makes the schema from."""
    schema = tool.input_schema or {}
    needed = set(schema.get("required", ()))
    properties = sorted(dict(schema.get("properties", {})).items(), key=lambda item: item[0] not in needed)

    def method(self: _Environment, *values: Any, **arguments: Any) -> Any:
        given = dict(zip((key for key, _ in properties), values, strict=False)) | arguments
        return self._call(tool.name, {k: v for k, v in given.items() if k in needed or v is not None})

    hints: dict[str, Any] = {}
    lines, parameters = [], [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD)]
    for key, one in properties:
        hint: Any = _TYPES.get(str(one.get("type")), str)
        hints[key] = hint if key in needed else hint | None
        default = inspect.Parameter.empty if key in needed else None
        parameters.append(
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[key])
        )
        choices = f" (choices: {json.dumps(one['enum'])})" if one.get("enum") else ""
        text = " ".join(str(one.get("description") or one.get("title") or key).split())
        lines.append(f"    {key}: {text}{choices}")
    method.__name__ = name
    method.__qualname__ = f"{tool.name}.{name}"
    method.__annotations__ = {**hints, "return": str}
    method.__signature__ = inspect.Signature(parameters, return_annotation=str)  # type: ignore[attr-defined]  # inspect's
    about = [tool.description.strip() or name]
    method.__doc__ = "\n".join([*about, *(["", "Args:", *lines] if lines else []), "", "Returns:", "    The result."])
    return method
