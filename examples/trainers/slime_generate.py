"""slime and miles: the file for ``--custom-generate-function-path``, and the data set that names the tasks.

    pip install ./clients/python
    export GATEWAY_URL=http://127.0.0.1:8080 GATEWAY_ENVIRONMENT=math
    python examples/trainers/slime_generate.py tasks.jsonl

Start slime as one of its own scripts does, such as `examples/search-r1/run_qwen2.5_3B.sh`. Put the folder of this file
and the three variables into ``--runtime-env-json``, and use these arguments for the rollout:

    --prompt-data tasks.jsonl --input-key prompt --label-key label
    --custom-generate-function-path slime_generate.generate
    --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192

Leave out ``--apply-chat-template``, ``--custom-rm-path`` and ``--rm-type``: `generate` writes the conversation, runs
the tool calls of the model's text, and sets ``sample.reward``. It plays an episode that failed again, three times at
most.

Checked against the sources of THUDM/slime at 624b824a, whose rollout ran with a small model on a CPU in place of
SGLang, and against those of radixark/miles at 31f1ca96. The training itself needs GPUs and was not run.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from env_gateway_client import Gateway
from env_gateway_client.slime import generator

URL = os.environ.get("GATEWAY_URL", "http://127.0.0.1:8080")
ENVIRONMENT = os.environ.get("GATEWAY_ENVIRONMENT", "math")
KEY = os.environ.get("GATEWAY_KEY", "")

generate = generator(URL, ENVIRONMENT, key=KEY)  # for miles: package="miles"


def rows(split: str) -> list[dict[str, str]]:
    """Return a row for each task of a split. `generate` opens the episode that the label names.

    The prompt is replaced: the model sees the prompt of the episode.
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
