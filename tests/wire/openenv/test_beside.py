"""The gateway adds `openenv.core.tasks` to the official package. All other modules stay the official ones."""

from __future__ import annotations

import json
import subprocess
import sysconfig

import pytest

from tests.deadlines import COMMAND_S
from tests.wire.catalog import PROJECT
from tests.wire.openenv.clients import NEWEST, python_of

pytestmark = pytest.mark.wire

PROGRAM = """
import json, sys
sys.path += sys.argv[1:]  # behind the official package's own
import envserver
import openenv.core
from openenv.core import GenericEnvClient
from openenv.core.tasks import Task, TaskRegistry, registry

registry.register(
    "custom/login-test",
    "browsergym",
    {"start_url": "http://localhost:8000/login", "goal": "Log in.", "reward_fn": "check_url_contains('dashboard')"},
)
found = registry.get("custom/login-test")
print(json.dumps({
    "official": openenv.core.__file__,
    "client": GenericEnvClient.__module__,
    "kinds": [isinstance(registry, TaskRegistry), isinstance(found, Task)],
    "task": found.to_dict(),
}))
"""


def test_openenv_core_tasks_is_the_gateways_and_the_rest_of_the_package_is_official() -> None:
    paths = [str(PROJECT / "env_images" / "base"), sysconfig.get_path("purelib")]

    done = subprocess.run(
        [python_of(NEWEST), "-W", "ignore", "-c", PROGRAM, *paths],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert ".venv-openenv" in told["official"]
    assert told["client"].startswith("openenv.core")
    assert told["kinds"] == [True, True]
    assert told["task"]["instruction"] == "Log in."
    assert told["task"]["config"] == {"start_url": "http://localhost:8000/login"}
    assert told["task"]["evaluation"] == {"reward_function": "check_url_contains('dashboard')"}
