"""The test environments in one environment server without a gateway, as a task author runs them."""

import importlib.util
from pathlib import Path
from typing import Any

from envserver import serve

ENVIRONMENTS = Path(__file__).parent.parent / "environments"


def load(name: str) -> Any:
    """Import ``environments/<name>/server.py`` under its own module name, because all files are called ``server``."""
    spec = importlib.util.spec_from_file_location(f"{name}_server", ENVIRONMENTS / name / "server.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    serve(load("probe").Probe, load("counter").Counter, load("slowsetup").SlowSetup, load("judge").Judge)
