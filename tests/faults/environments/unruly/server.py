"""``unruly``: counts its steps, and has a tool for each thing that a worker must not do.

``MODE`` breaks it from the start: ``crash`` ends it with a message, ``silent`` never lets it listen.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from envserver import Environment, Prompt, StepResult, Task, serve, tool

FOLDER = Path(os.environ.get("ENVSERVER_SOCKET", "/run/envserver/http.sock")).parent
"""Shared with the tests, which see it as the worker's socket folder."""
LAST_WORDS = "cannot load the weights: no such file"


class Unruly(Environment):
    """A task may hold ``start``, the number that the steps are counted from."""

    name = "unruly"
    lanes = "shared"  # hundreds of sessions, and one thread

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        self.steps = int(task.get("start", 0))
        return f"{self.steps} steps"

    @tool
    async def count(self) -> StepResult:
        """Count a step."""
        return self._counted()

    @tool
    async def wait(self, gate: str) -> StepResult:
        """Count a step, then wait until a file of that name is in the folder; two minutes at most."""
        result = self._counted()
        note(gate)
        for _ in range(1200):
            if (FOLDER / gate).exists():
                return result
            await asyncio.sleep(0.1)
        raise TimeoutError(f"nobody opened {gate}")

    @tool
    async def big(self, n: int) -> StepResult:
        """Count a step and give n characters."""
        self._counted()
        return StepResult("x" * n)

    @tool
    async def finish(self) -> StepResult:
        """End the episode with the number of steps as its reward."""
        return StepResult(str(self.steps), reward=float(self.steps), finished=True)

    @tool
    def eat_memory(self) -> StepResult:
        """Allocate memory until something kills the process."""
        eaten = []
        while True:
            eaten.append(bytearray(os.urandom(1)) * 2**20)

    @tool
    def fork_bomb(self) -> StepResult:
        """Fork as long as it can be done."""
        while True:
            if os.fork() == 0:
                signal.pause()
                os._exit(0)

    @tool
    def flood_log(self, mib: int) -> StepResult:
        """Write to the log as fast as it takes it."""
        line = "flood " * 170 + "\n"
        for _ in range(mib * 1024):
            sys.stdout.write(line)
        sys.stdout.flush()
        self.steps += 1
        return StepResult(str(self.steps))

    @tool
    def fill_disk(self, where: str) -> StepResult:
        """Write a file that never ends."""
        with open(f"{where}/filled", "wb") as file:
            while True:
                file.write(b"x" * 2**20)

    @tool
    def hang(self) -> StepResult:
        """Never end, in a thread."""
        while True:
            time.sleep(60)

    @tool(inline=True)
    async def hang_server(self) -> StepResult:
        """Never end, and block all other work."""
        while True:
            time.sleep(60)  # noqa: ASYNC251  # that is the point

    def _counted(self) -> StepResult:
        self.steps += 1
        return StepResult(str(self.steps))


def note(gate: str) -> None:
    """Add a line to the gate's ledger: a step runs that waits for it."""
    ledger = os.open(FOLDER / f"{gate}.ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(ledger, b"step\n")
    os.close(ledger)


if __name__ == "__main__":
    print("unruly begins", flush=True)
    if os.environ.get("MODE") == "crash":
        sys.exit(LAST_WORDS)
    if os.environ.get("MODE") == "silent":
        print("still downloading", flush=True)
        signal.pause()
    serve(Unruly)
