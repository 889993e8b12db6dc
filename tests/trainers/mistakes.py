"""Make the mistakes of docs/trainers.md with unmodified clients, and print what each shows, as lines of JSON.

.venv-trainers/learning/bin/python tests/trainers/mistakes.py URL
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "clients" / "python"))


def show(mistake: str, make: Callable[[], Any]) -> None:
    """Print the error that *make* raises, or its result, without the gateway's address."""
    try:
        shown = repr(make())
    except Exception as error:  # noqa: BLE001  # what a trainer would see
        shown = f"{type(error).__name__}: {error}"
    print(json.dumps({"mistake": mistake, "shown": shown.partition(", url=")[0]}), flush=True)


def main() -> None:
    url = sys.argv[1]
    os.environ |= {"OPENREWARD_SESSION_URL": url, "OPENREWARD_API_URL": url}
    openreward = importlib.import_module("openreward").OpenReward  # TRL's and SkyRL's adapters use it
    openenv = importlib.import_module("openenv.core").GenericEnvClient
    gateway = importlib.import_module("env_gateway_client").Gateway

    show("openreward: a split that is missing", lambda: openreward().environments.get("math").num_tasks("nope"))
    with openenv(base_url=f"{url}/openenv/math").sync() as env:
        show("openenv: a split that is missing", lambda: env.reset(split="nope", index=0))
        env.reset(split="train", index=0)
        show("openenv: a text", lambda: env.step({"text": "the answer is 40"}))
        show("openenv: after the text", lambda: env.step({"answer": "40"}).reward)
    with gateway(url) as client:
        show("client: a split that is missing", lambda: client.open("math", split="nope", index=0))


if __name__ == "__main__":
    main()
