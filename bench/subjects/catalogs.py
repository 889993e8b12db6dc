"""Environments made by a benchmark: the ``steps`` environment with a chosen pool."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from bench.subjects.targets import ENVIRONMENTS

STEPS = "steps"
"""The environment's name on the wire, for any name in a catalog."""
STEPS_IMAGE = "env-gateway/bench-steps"
STEPS_FOLDER = ENVIRONMENTS / "steps"
Table = Mapping[str, object]


def steps_toml(name: str, **tables: Table) -> str:
    """Return the ``environment.toml`` of a ``steps`` environment called *name*. *tables* replace single values."""
    wanted: dict[str, dict[str, object]] = {
        "": {
            "name": name,
            "image": STEPS_IMAGE,
            "protocol": "ors",
            "isolation": "shared",
            "command": [sys.executable, str(STEPS_FOLDER / "server.py")],
            "upstream_name": STEPS,
        },
        "pool": {"slots": 64, "min_workers": 1, "max_workers": 1, "idle_worker_s": 3600},
        "limits": {"memory_mib": 128, "cpus": 1.0, "pids": 64, "tmp_mib": 8},
        "timeouts": {"idle_s": 3600, "start_s": 60, "open_s": 60, "setup_s": 30, "call_s": 120, "close_s": 10},
        "areal": {
            "split": "train",
            "max_turns": 1_000_000,
            "observation_type": "text",
            "action_type": "text",
            "start_s": 60,
            "step_s": 60,
        },
        "tasks": {"directory": str(STEPS_FOLDER / "tasks")},
    }
    for table, values in tables.items():
        wanted[table if table != "head" else ""] |= values
    lines: list[str] = []
    for table, inside in wanted.items():
        lines += [f"[{table}]"] if table else []
        lines += [f"{key} = {json.dumps(value)}" for key, value in inside.items()]  # such JSON is also TOML
    return "\n".join(lines) + "\n"


def write_catalog(folder: Path, **tomls: str) -> dict[str, str]:
    """Write a catalog of *tomls* by name below *folder*. Return the gateway settings that offer them."""
    for name, text in tomls.items():
        (folder / "catalog" / name).mkdir(parents=True)
        (folder / "catalog" / name / "environment.toml").write_text(text)
    return {
        "GATEWAY_CATALOG_DIR": str(folder / "catalog"),
        "GATEWAY_ENVIRONMENTS": ",".join(tomls),
        "GATEWAY_DEFAULT_ENVIRONMENT": next(iter(tomls)),
    }
