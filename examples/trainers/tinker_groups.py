"""tinker-cookbook: RL on groups of the gateway's episodes. Tinker's service trains and samples, on its own GPUs.

    pip install tinker-cookbook ./clients/python
    TINKER_API_KEY=… python examples/trainers/tinker_groups.py http://127.0.0.1:8080 math --model Qwen/Qwen3-8B

On a gateway with keys, set GATEWAY_KEY to a trainer's key.

The cookbook generates with the tools of the environment, the adapter calls them for the model's tool calls, and each
step has the reward of its calls. An episode that failed raises in its step, and the cookbook plays it again.

Checked against tinker-cookbook 0.6.1: `play_group` ran with a model on a CPU. `train` needs Tinker's service and was
not run.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
from collections.abc import Mapping
from typing import Any

import chz
from env_gateway_client.tinker import GatewayDataset, GatewayGroupBuilder
from tinker_cookbook import model_info
from tinker_cookbook.renderers import get_renderer
from tinker_cookbook.rl.rollouts import do_group_rollout
from tinker_cookbook.rl.types import RLDataset, RLDatasetBuilder
from tinker_cookbook.tokenizer_utils import get_tokenizer

KEY = os.environ.get("GATEWAY_KEY", "")


async def play_group(
    url: str, environment: str, *, renderer: Any, policy: Any, row: Mapping[str, Any], size: int
) -> Any:
    """Play one group on the task of *row* (``split`` and ``index``), and return its ``TrajectoryGroup``.

    Args:
        renderer: One of the cookbook's renderers, which writes prompts and reads the model's tool calls.
        policy: A ``TokenCompleter``.
    """
    builder = GatewayGroupBuilder(url, environment, row, renderer, num_envs=size, key=KEY)
    return await do_group_rollout(builder, policy)


@chz.chz
class GatewayDatasetBuilder(RLDatasetBuilder):
    """Makes the data sets that the cookbook's configuration names."""

    url: str
    environment: str
    model_name: str
    renderer_name: str
    batch_size: int
    group_size: int

    async def __call__(self) -> tuple[RLDataset, RLDataset | None]:
        """Return the groups of the split `train`, and no test set."""
        renderer = get_renderer(self.renderer_name, get_tokenizer(self.model_name))
        place = self.url, self.environment, "train", renderer
        of = functools.partial(GatewayDataset.of, batch_size=self.batch_size, group_size=self.group_size, key=KEY)
        return await asyncio.to_thread(of, *place), None


async def train(url: str, environment: str, *, model: str, steps: int) -> None:
    """Train *model* for *steps* batches of 16 groups of 8 episodes."""
    from tinker_cookbook.rl.train import Config, main

    renderer = model_info.get_recommended_renderer_name(model)
    config = Config(
        model_name=model,
        renderer_name=renderer,
        recipe_name="env_gateway",
        dataset_builder=GatewayDatasetBuilder(
            url=url, environment=environment, model_name=model, renderer_name=renderer, batch_size=16, group_size=8
        ),
        learning_rate=4e-5,
        max_tokens=1024,
        max_steps=steps,
        eval_every=0,
        rollout_error_tolerance=True,  # play a failed episode again; without it, the first one ends the training run
        log_path="out",
    )
    await main(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("environment", help="such as: math")
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    asyncio.run(train(given.url, given.environment, model=given.model, steps=given.steps))


if __name__ == "__main__":
    main()
