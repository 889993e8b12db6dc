"""One run of a trainer that learns on a gateway: the program that runs in the venv of the trainers.

    .venv-trainers/learning/bin/python tests/trainers/learning.py RUN URL

It plays with the scripts of examples/trainers and the tiny model. It prints a line of JSON for each step of a run over
ORS (``{"rewards": […], "failed": 0}``, None for an episode without a reward). At its end it prints the result
(``{"curve": […], "versions": {…}}``).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER.parents[1] / "examples" / "trainers"), str(FOLDER.parents[1] / "clients" / "python")]

RIGHT = "40"
ANSWERS = [("submit", {"answer": answer}) for answer in (RIGHT, "7", "12", "-3", "99", "5", "18", "61")]
MOVES = [("act", {"message": f"[{move}]"}) for move in ("up", "down", "left", "right")]
REPLIES = [("reply", {"message": message}) for message in ("TUNNEL-BASKET", "tunnel", "basket")]
GROUP = 8
STEPS = {"math": 20, "game": 20, "mixture": 80, "curriculum": 20}
"""Optimizer steps of each kind of run."""


def imported(name: str) -> Any:
    """Import a script of examples/trainers, or a module of this folder. Trainers bring packages of their own along that
    are called ``tests``."""
    return importlib.import_module(name)


def config(steps: int, calls: int, model: Any) -> dict[str, Any]:
    """Return the fields of ``GRPOConfig`` for *steps* with one group each, of at most *calls* calls per episode."""
    return {
        "output_dir": "out",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "per_device_train_batch_size": GROUP,
        "num_generations": GROUP,
        "max_steps": steps,
        "learning_rate": 2e-2,
        "lr_scheduler_type": "constant",
        "seed": 1,
        "beta": 0.0,
        "max_completion_length": 1024,
        "max_tool_calling_iterations": calls,
        "chat_template_kwargs": {"enable_thinking": False},
        "generation_kwargs": model.generation,
    }


def shown(environments: Sequence[Any], **_: Any) -> list[float | None]:
    """Return the rewards as ``OpenRewardSpec`` does, and print them with the number of episodes that failed."""
    rewards = [episode.reward for episode in environments]
    failed = sum(episode.reward is None and _has_failed(episode) for episode in environments)
    print(json.dumps({"rewards": rewards, "failed": failed}), flush=True)
    return rewards


def zero_if_unfinished(environments: Sequence[Any], **_: Any) -> list[float | None]:
    """Return 0.0 for an episode in which the agent did not reach a reward, and None only for one that failed.

    In a mixture, the agent may call tools of another environment. Without the 0.0 it would never learn not to do so.
    """
    return [
        0.0 if reward is None and not _has_failed(episode) else reward
        for reward, episode in zip(shown(environments), environments, strict=True)
    ]


def _has_failed(episode: Any) -> bool:
    return bool(episode.last_output.startswith("Error:"))


def over_ors(url: str, environments: Sequence[str], **options: Any) -> list[float]:
    trl_openreward = imported("trl_openreward")
    tiny = imported("tiny").tiny

    kind = "mixture" if len(environments) > 1 else environments[0]
    calls = {"math": ANSWERS, "game": MOVES, "mixture": ANSWERS[:3] + REPLIES}[kind]
    model = tiny(calls, seed=0)
    steps = STEPS["curriculum" if "split" in options else kind]
    settings = config(steps, 3 if kind == "game" else 1, model)
    if kind == "mixture":  # each step has a group of each environment
        settings |= {"per_device_train_batch_size": 2 * GROUP, "learning_rate": 5e-3}
    where = {"indices": [0]} | options
    log = trl_openreward.train(
        url,
        environments,
        model=model.model,
        tokenizer=model.tokenizer,
        reward_funcs=zero_if_unfinished if kind == "mixture" else shown,
        **where,
        **settings,
    )
    return [entry["reward"] for entry in log]


def over_openenv(url: str, environment: str) -> list[float]:
    trl_openenv = imported("trl_openenv")
    tiny = imported("tiny").tiny

    model = tiny(ANSWERS if environment == "math" else MOVES, seed=0)
    settings = config(STEPS[environment], 1 if environment == "math" else 3, model)
    log = trl_openenv.train(url, environment, model=model.model, tokenizer=model.tokenizer, indices=[0], **settings)
    return [entry["reward"] for entry in log]


def with_the_client(url: str) -> list[float]:
    trl_client = imported("trl_client")
    tiny = imported("tiny").tiny

    model = tiny(ANSWERS, seed=0)
    log = trl_client.train(
        url, "math", model=model.model, tokenizer=model.tokenizer, stop=1, **config(STEPS["math"], 1, model)
    )
    return [entry["reward"] for entry in log]


def in_skyrl(url: str) -> list[float]:
    """Play a right and a wrong answer through the environment for SkyRL."""
    skyrl_env = imported("skyrl_env")

    rewards = []
    for answer in (RIGHT, "41"):
        call = json.dumps({"name": "submit", "arguments": {"answer": answer}})
        text = f"<tool_call>\n{call}\n</tool_call>"
        env = skyrl_env.GatewayTextEnv(url=url, environment="math", extras={"split": "train", "index": 0})
        rewards.append(skyrl_env.play(env, lambda _, text=text: text))
    return rewards


def in_areal(url: str) -> list[float]:
    """Play a right and a wrong answer through AReaL's workflow class and client, with a scripted engine."""
    areal_workflow = imported("areal_workflow")
    from areal.api import ModelResponse

    tiny = imported("tiny").tiny

    model = tiny(ANSWERS, seed=0)

    class Engine:
        """Generates one scripted text."""

        def __init__(self, answer: str) -> None:
            self._answer = answer

        async def agenerate(self, request: Any) -> Any:
            call = json.dumps({"name": "submit", "arguments": {"answer": self._answer}})
            tokens = model.tokenizer.encode(f"<tool_call>\n{call}\n</tool_call><|im_end|>", add_special_tokens=False)
            return ModelResponse(
                input_tokens=list(request.input_ids),
                output_tokens=tokens,
                output_logprobs=[-1.0] * len(tokens),
                output_versions=[0] * len(tokens),
                stop_reason="stop",
                tokenizer=model.tokenizer,
            )

    async def reward(answer: str) -> float:
        found = await areal_workflow.episode(
            url,
            "math",
            engine=Engine(answer),
            tokenizer=model.tokenizer,
            gconfig=SimpleNamespace(temperature=1.0, top_p=1.0, max_new_tokens=64),
            row={"split": "train", "index": 0},
        )
        return float(sum(interaction.reward or 0.0 for interaction in found.values()))

    return [asyncio.run(reward(answer)) for answer in (RIGHT, "41")]


def in_gymnasium(url: str) -> list[float]:
    gymnasium_policy = imported("gymnasium_policy")

    return list(gymnasium_policy.train(url, 40, 0))


RUNS: Mapping[str, tuple[Callable[[str], list[float]], Sequence[str]]] = {
    "trl-ors-math": (lambda url: over_ors(url, ["math"]), ("trl", "openreward")),
    "trl-ors-game": (lambda url: over_ors(url, ["game"]), ("trl", "openreward")),
    "trl-ors-mixture": (lambda url: over_ors(url, ["math", "chat"]), ("trl", "openreward")),
    "trl-ors-curriculum": (
        lambda url: over_ors(url, ["math"], split="train:levels", indices=[0, 1]),
        ("trl", "openreward"),
    ),
    "trl-ors-kill": (lambda url: over_ors(url, ["math"]), ("trl", "openreward")),
    "trl-openenv-math": (lambda url: over_openenv(url, "math"), ("trl", "openenv")),
    "trl-openenv-game": (lambda url: over_openenv(url, "game"), ("trl", "openenv")),
    "trl-client-math": (with_the_client, ("trl",)),
    "skyrl-ors-math": (in_skyrl, ("skyrl-gym",)),
    "areal-ors-math": (in_areal, ("areal",)),
    "gymnasium-ors-game": (in_gymnasium, ("gymnasium",)),
}
"""Each run by name, and the packages whose versions it reports."""


def main() -> None:
    play, packages = RUNS[sys.argv[1]]
    curve = [round(float(reward), 4) for reward in play(sys.argv[2])]
    print(json.dumps({"curve": curve, "versions": {name: version(name) for name in packages}}), flush=True)


if __name__ == "__main__":
    main()
