"""Runs `dashboard_browsing.py` in a container with Chromium."""

from __future__ import annotations

import json
import subprocess
import uuid
from pathlib import Path
from typing import Any

from tests.deadlines import COMMAND_S

PROGRAM = Path(__file__).with_name("dashboard_browsing.py")


def browse(url: str, key: str, screenshots: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """Run the program in a container that sees this machine's network, and return what it prints.

    *key* is an operator's key of the gateway at *url*; the program describes *plan*.
    """
    name = f"eg-test-dashboard-{uuid.uuid4().hex[:8]}"
    command = ["docker", "run", "--rm", "--interactive", "--name", name, "--label", f"env-gateway.instance={name}"]
    command += ["--network", "host", "--volume", f"{PROGRAM}:/program.py:ro", "--volume", f"{screenshots}:/screenshots"]
    command += ["--entrypoint", "python3", "env-gateway/browser:latest", "/program.py", url, key, "/screenshots"]
    try:
        done = subprocess.run(
            command, input=json.dumps(plan), capture_output=True, text=True, check=False, timeout=COMMAND_S
        )
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
