"""OpenRLHF: the agent file for ``--train.agent_func_path``, and the data set that names the tasks.

    pip install "openrlhf[vllm]" ./clients/python
    export GATEWAY_URL=http://127.0.0.1:8080 GATEWAY_ENVIRONMENT=math
    python examples/trainers/openrlhf_agent.py tasks.jsonl
    python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path Qwen/Qwen3-0.6B \
        --train.agent_func_path $PWD/examples/trainers/openrlhf_agent.py \
        --data.prompt_dataset tasks.jsonl --data.input_key prompt --data.label_key label --data.max_len 8192 \
        --algo.advantage.estimator group_norm --rollout.n_samples_per_prompt 8 --rollout.batch_size 128 \
        --vllm.num_engines 8 --train.colocate_all --vllm.enable_sleep --ckpt.output_dir out

OpenRLHF loads `AgentExecutor` from this file in each vLLM actor. On a Ray cluster that runs already, pass the variables
with ``ray job submit --runtime-env-json``. The executor generates, runs the tool calls of the model's text, and takes
the rewards of the calls. It plays an episode that failed again, three times at most.

Checked against the sources of openrlhf 0.11.2, whose executor ran with a small model on a CPU in place of vLLM. The
training itself needs GPUs and was not run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from env_gateway_client import Gateway
from env_gateway_client.openrlhf import executor

URL = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080")
ENVIRONMENT = os.environ.get("GATEWAY_ENVIRONMENT", "math")
KEY = os.environ.get("GATEWAY_KEY", "")

AgentExecutor = executor(URL, ENVIRONMENT, key=KEY)


def rows(split: str) -> list[dict[str, str]]:
    """Return a row for each task of a split. The executor opens the episode that the label names.

    The prompt is for OpenRLHF's log: the model sees the prompt of the episode.
    """
    with Gateway(URL, KEY) as gateway:
        tasks = gateway.tasks(ENVIRONMENT, split)
    return [
        {
            "prompt": str(task.spec.get("instruction", task.id)),
            "label": json.dumps({"split": split, "index": task.index}),
        }
        for task in tasks
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="where to write the data set, such as tasks.jsonl")
    parser.add_argument("--split", default="train")
    given = parser.parse_args()
    lines = [json.dumps(row) + "\n" for row in rows(given.split)]
    given.file.write_text("".join(lines))
    print(f"{given.file}: {len(lines)} tasks of {ENVIRONMENT}")


if __name__ == "__main__":
    main()
