"""verl: the data set for the agent loop of `verl_agent_loop.yaml`, and the command that trains with both.

    pip install "verl[vllm]" ./clients/python
    export GATEWAY_URL=http://127.0.0.1:8080 GATEWAY_ENVIRONMENT=math
    python examples/trainers/verl_agent_loop.py train.parquet --split train
    python examples/trainers/verl_agent_loop.py test.parquet --split test
    python -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
        data.train_files=train.parquet data.val_files=test.parquet data.train_batch_size=128 \
        data.max_prompt_length=2048 data.max_response_length=8192 \
        actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \
        actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_dynamic_bsz=true \
        actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=8 \
        actor_rollout_ref.rollout.multi_turn.format=hermes \
        actor_rollout_ref.rollout.agent.agent_loop_config_path=examples/trainers/verl_agent_loop.yaml

On a Ray cluster that runs already, write the gateway's URL into the YAML file. The agent loop generates with the tools
of the environment, calls them for the model's tool calls, and returns the sum of the rewards, so verl calls no reward
function. It plays an episode that failed again, three times at most.

Checked against the sources of verl 0.9.1: its classes read the command, the YAML file and the data set, and the loop
ran with a small model on a CPU in place of vLLM. The training itself needs GPUs and was not run.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from env_gateway_client import Gateway

URL = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080")
ENVIRONMENT = os.environ.get("GATEWAY_ENVIRONMENT", "math")
KEY = os.environ.get("GATEWAY_KEY", "")


def rows(split: str) -> list[dict[str, Any]]:
    """Return a row for each task of a split. The agent loop appends the prompt of the episode to the row's prompt."""
    with Gateway(URL, KEY) as gateway:
        count = gateway.task_count(ENVIRONMENT, split)
    return [
        {
            "data_source": ENVIRONMENT,  # verl reports validation rewards by this name
            "agent_name": "gateway",
            "prompt": [{"role": "system", "content": "You solve tasks with tools."}],
            "extra_info": {"split": split, "index": index},
        }
        for index in range(count)
    ]


def main() -> None:
    from datasets import Dataset

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="where to write the data set, such as train.parquet")
    parser.add_argument("--split", default="train")
    given = parser.parse_args()
    tasks = Dataset.from_list(rows(given.split))
    tasks.to_parquet(given.file)
    print(f"{given.file}: {len(tasks)} tasks of {ENVIRONMENT}")


if __name__ == "__main__":
    main()
