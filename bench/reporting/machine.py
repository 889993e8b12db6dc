"""The machine and the software of a run: figures are comparable only with these facts."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("env-gateway", "ors-sdk", "openreward", "uvicorn", "uvloop", "httptools", "h11", "starlette", "fastapi"),
    *("sse-starlette", "pydantic", "reasoning-gym", "docker"),
)
GIT_S = 10.0


def machine() -> dict[str, Any]:
    """Return the processor, memory and system. ``load_average`` shows other load."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cpus": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": load_average(),
    }


def load_average() -> list[float]:
    """Return the load averages over one, five and fifteen minutes."""
    return [round(each, 2) for each in os.getloadavg()]


def versions() -> dict[str, str | None]:
    """Return the versions of the relevant packages; None for a package that is not installed."""
    return {name: _version(name) for name in PACKAGES}


def commit() -> dict[str, Any]:
    """Return the measured sources' commit. Both values are None outside a repository or before its first commit."""
    found = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain") if found else None
    return {"commit": found, "has_changes": None if status is None else bool(status)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _first(path: str, key: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _git(*arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
