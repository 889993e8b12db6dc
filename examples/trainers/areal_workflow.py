"""AReaL: GRPO on an environment of the gateway, with AReaL's `PPOTrainer`. AReaL runs one rollout workflow per episode.

    pip install areal ./clients/python
    python examples/trainers/areal_workflow.py http://127.0.0.1:8080 math --config gsm8k_grpo.yaml \
        scheduler.type=local actor.path=Qwen/Qwen3-0.6B gconfig.n_samples=8 gconfig.max_new_tokens=1024

On a gateway with keys, set GATEWAY_KEY to a trainer's key.

The configuration is one of AReaL's `examples/math`; the rows of this script replace its data set. AReaL generates with
the tools of the environment, the workflow calls them for the model's tool calls, and each turn has the reward of its
calls. AReaL rejects an episode that failed, and trains on the others of its group.

Checked against areal 1.0.4. `episode` was run with a model on a CPU; `train` needs GPUs and was not run.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from env_gateway_client import Gateway
from env_gateway_client.areal import GatewayWorkflow

KEY = os.environ.get("GATEWAY_KEY", "")


def workflow(url: str, environment: str, tokenizer: Any, gconfig: Any) -> GatewayWorkflow:
    """Return the workflow. An inference engine in this process takes it: ``engine.submit(row, workflow=…)``."""
    return GatewayWorkflow(url, environment, key=KEY, tokenizer=tokenizer, gconfig=gconfig, max_turns=16)


async def episode(
    url: str, environment: str, *, engine: Any, tokenizer: Any, gconfig: Any, row: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Play one episode on *engine*, and return its interactions with their rewards. None: the episode failed.

    Args:
        engine: Has ``async agenerate(ModelRequest) -> ModelResponse``.
        row: A row of `rows`.
    """
    played: dict[str, Any] | None = await workflow(url, environment, tokenizer, gconfig).arun_episode(engine, dict(row))
    return played


def rows(url: str, environment: str, split: str = "train") -> list[dict[str, Any]]:
    """Return a row for each task of a split."""
    with Gateway(url, KEY) as gateway:
        return [{"split": split, "index": index} for index in range(gateway.task_count(environment, split))]


def train(url: str, environment: str, areal_arguments: Sequence[str]) -> None:
    """Train with the configuration that *areal_arguments* name."""
    from areal import PPOTrainer
    from areal.api.cli_args import GRPOConfig, load_expr_config
    from datasets import Dataset

    config, _ = load_expr_config(list(areal_arguments), GRPOConfig)
    options = {"url": url, "environment": environment, "tokenizer": config.tokenizer_path, "gconfig": config.gconfig}
    with PPOTrainer(config, train_dataset=Dataset.from_list(rows(url, environment))) as trainer:
        # AReaL sends a workflow to its workers as the name of a class with arguments. It would drop those of an object.
        workflow = "env_gateway_client.areal.GatewayWorkflow"
        trainer.train(workflow=workflow, workflow_kwargs={**options, "key": KEY, "max_turns": 16})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("environment", help="such as: math")
    given, areal_arguments = parser.parse_known_args()
    train(given.url, given.environment, areal_arguments)


if __name__ == "__main__":
    main()
