"""The client package's adapters fit the classes of the installed trainers."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.deadlines import COMMAND_S
from tests.trainers.runs import VENVS
from tests.wire.catalog import PROJECT

pytestmark = [pytest.mark.wire, pytest.mark.needs("trainers")]
CLASSES = {
    "AnyText",
    "GatewayAgent",
    "GatewayAgentLoop",
    "GatewayDataset",
    "GatewayEnv",
    "GatewayExecutor",
    "GatewayGroupBuilder",
    "GatewayMessageEnv",
    "GatewayVectorEnv",
    "GatewayWorkflow",
}


def test_every_adapter_fits_its_trainers_interface() -> None:
    done = subprocess.run(
        [VENVS / "learning" / "bin" / "python", PROJECT / "tests" / "trainers" / "interfaces.py"],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    assert {row["class"] for row in rows} == CLASSES
    assert {row["class"]: row["misfits"] for row in rows if row["misfits"]} == {}
