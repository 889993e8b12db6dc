"""Prepares the needs of tests with the project's scripts, while the first tests run."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.runner import stacks

PROJECT = Path(__file__).resolve().parents[2]
STEP_S = 1_800.0
AT_ONCE = 2
"""Number of concurrent scripts: the scripts compute as much as they download."""


@dataclass(frozen=True)
class Step:
    """A script that satisfies one need."""

    command: Sequence[str]
    requires: Sequence[str] = ()
    """Needs that the script requires."""
    after: Sequence[str] = ()
    """Needs that are prepared earlier if both are requested: apt allows one process at a time."""


def _image(name: str, base: str) -> Step:
    return Step(["scripts/build-images", name], requires=[base])


STEPS = {
    "packages": Step(["scripts/install"]),
    "redis": Step(["scripts/redis"]),
    "faketime": Step(["scripts/faketime"], after=["redis"]),
    "bubblewrap": Step(["scripts/bubblewrap"], after=["redis", "faketime"]),
    "prometheus": Step(["scripts/prometheus"], after=["redis", "faketime", "bubblewrap"]),
    "engine": Step(["scripts/docker-engine"], after=["redis", "faketime", "bubblewrap", "prometheus"]),
    "openenv-clients": Step(["scripts/openenv-clients"], requires=["packages"]),
    "nemo-gym": Step(["scripts/nemo-gym"], requires=["packages"]),
    "trainers": Step(["scripts/trainers"], requires=["packages"]),
    "base-image": Step(["scripts/base-image"], requires=["engine"]),
    "image:redis": _image("redis", "base-image"),
    "image:base": _image("base", "base-image"),
    "image:gateway": _image("gateway", "base-image"),
    "image:base-sandbox": _image("base-sandbox", "image:base"),
    **{
        f"image:{name}": _image(name, "image:base")
        for name in ("browser", "chat", "game", "math", "reasoning_gym", "textarena")
    },
    **{f"image:{name}": _image(name, "image:base-sandbox") for name in ("coding", "os")},
    "third-party-images": Step(["scripts/foreign-images"], requires=["base-image"]),
}
"""The steps of all needs that a test may name, in the order of preparation."""


def with_requirements(needs: Collection[str]) -> list[str]:
    """Return *needs* and their requirements, in the order of `STEPS`.

    Raises:
        KeyError: `STEPS` does not have one of the needs.
    """
    wanted = set(needs)
    for need in reversed(STEPS):  # a step comes after its requirements
        if need in wanted:
            wanted.update(STEPS[need].requires)
    if unknown := wanted - set(STEPS):
        raise KeyError(f"no such need: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    return [need for need in STEPS if need in wanted]


class Preparation:
    """Runs the steps of *needs*, and notes each result in *ready*: a file NEED, or NEED.failed with the reason.

    Args:
        needs: Names of `STEPS`.
        ready: An existing folder.
        log: The file for the scripts' output.
    """

    def __init__(self, needs: Collection[str], *, ready: Path, log: Path) -> None:
        self._ready = ready
        self._log = log
        self._lock = threading.Lock()
        self._free = threading.Semaphore(AT_ONCE)
        self._ended = {need: threading.Event() for need in with_requirements(needs)}
        self._running: list[subprocess.Popen[str]] = []
        self._stopping = threading.Event()
        self.seconds: dict[str, float] = {}
        """Seconds that each script took."""
        self.failed: dict[str, str] = {}
        """Reasons of failed needs, by need."""

    def start(self) -> None:
        for need in self._ended:
            threading.Thread(target=self._prepare, args=(need,), daemon=True).start()

    def wait(self, *needs: str) -> bool:
        """Wait until the steps of *needs*, by default all, have ended. Return True if they succeeded."""
        for need in needs or self._ended:
            self._ended[need].wait()
        return not self.failed.keys() & set(needs or self._ended)

    def stop(self) -> None:
        """Start no further step, and kill the running steps."""
        self._stopping.set()
        running = [script.pid for script in self._running]
        stacks.kill([pid for script in running for pid in (script, *stacks.descendants(script))])

    def _prepare(self, need: str) -> None:
        step = STEPS[need]
        for other in (*step.requires, *step.after):
            if other in self._ended:
                self._ended[other].wait()
        reason = next((self.failed[other] for other in step.requires if other in self.failed), "")
        if not reason:
            with self._free:
                reason = self._run(step)
        if reason:
            self.failed[need] = reason
            (self._ready / f"{need}.failed").write_text(reason)
        else:
            (self._ready / need).touch()
        self._ended[need].set()

    def _run(self, step: Step) -> str:
        """Run a script. Return the reason of its failure, or an empty string."""
        name = " ".join(step.command)
        if self._stopping.is_set():
            return f"{name} was not begun"
        began = time.monotonic()
        script = subprocess.Popen(
            step.command,
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._running.append(script)
        try:
            output, _ = script.communicate(timeout=STEP_S)
            reason = f"{name} ended with {script.returncode}:\n{output[-3000:]}" if script.returncode else ""
        except subprocess.TimeoutExpired:
            stacks.kill([script.pid, *stacks.descendants(script.pid)])
            output, reason = "", f"{name} did not end within {STEP_S:.0f} s"
        self._running.remove(script)
        if self._stopping.is_set():
            return reason
        with self._lock:
            self.seconds[name] = round(time.monotonic() - began, 1)
            with self._log.open("a") as log:
                log.write(f"$ {name}\n{output}\n")
            if reason:
                print(f"scripts/test: {reason}", file=sys.stderr, flush=True)
        return reason
