"""TRL over ORS: GRPO on an environment of the gateway, through TRL's own adapter for the package `openreward`.

    pip install trl openreward jmespath
    python examples/trainers/trl_openreward.py http://127.0.0.1:8080 math --model Qwen/Qwen3-0.6B

On a gateway with keys, set OPENREWARD_API_KEY to a trainer's key.

TRL generates with the tools of the environment, calls them for the model's tool calls, and takes the last reward of an
episode. A failed call has no reward (None), which TRL leaves out of the group. Several environments
(`math game`) train in one run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any


def train(
    url: str,
    environments: Sequence[str],
    *,
    model: Any,
    tokenizer: Any = None,
    split: str = "train",
    indices: Sequence[int] | None = None,
    reward_funcs: Any = None,
    **config: Any,
) -> list[dict[str, Any]]:
    """Train *model* on the tasks *indices* (None: all) of a split of each environment, and return TRL's log.

    Args:
        model: A name of the model hub, or a model, which needs its *tokenizer*.
        reward_funcs: Reward functions of your own, instead of the last reward of each episode.
        config: Fields of ``GRPOConfig``.
    """
    # With a base URL alone, the package calls the hosts sessions.HOST and api.HOST, which a gateway does not have.
    os.environ |= {"OPENREWARD_SESSION_URL": url, "OPENREWARD_API_URL": url}
    from datasets import concatenate_datasets
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.openreward import OpenRewardSpec

    wanted = None if indices is None else list(indices)
    # Columns for rewards of one's own. Two environments have different columns, so a mixture goes without.
    has_metadata = len(environments) == 1
    specs = {
        name: OpenRewardSpec(url, env_name=name, split=split, indices=wanted, include_metadata=has_metadata)
        for name in environments
    }
    episodes: list[Any] = []

    def noted(factory: Callable[[], Any]) -> Callable[[], Any]:
        def make() -> Any:
            episodes.append(factory())
            return episodes[-1]

        return make

    rows = [
        spec.train_dataset.add_column("environment", [name] * len(spec.train_dataset)) for name, spec in specs.items()
    ]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=concatenate_datasets(rows),
        environment_factory={name: noted(spec.environment_factory) for name, spec in specs.items()},
        reward_funcs=reward_funcs or specs[environments[0]].reward_funcs,
        args=GRPOConfig(logging_steps=1, **config),
    )
    try:
        trainer.train()
    finally:  # TRL closes no episode of its last batch; the gateway would end them after 300 s
        for episode in episodes:
            episode._close()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("environments", nargs="+", help="such as: math game")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--split", default="train", help="train:NAME draws from the curriculum NAME")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    log = train(
        given.url,
        given.environments,
        model=given.model,
        split=given.split,
        output_dir="out",
        max_steps=given.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=1024,
        max_tool_calling_iterations=16,
    )
    print("mean rewards:", [round(entry["reward"], 3) for entry in log])


if __name__ == "__main__":
    main()
