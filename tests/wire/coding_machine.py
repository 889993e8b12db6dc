"""The engine's view of a gateway's coding workers: their processes, and those of the sandboxes in them.

A worker at rest has four processes: the container's first process, the environment server, its launcher, and below this
the spawner of its sandboxes. Each open sandbox has a supervisor below the spawner, and its other processes are below
the supervisor. The tests list and kill them in their container's PID namespace, because the engine may run on another
machine.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass

import docker
import docker.errors

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.wire.gateways import Gateway

IMAGE = "env-gateway/base"
AT_REST = 4
"""The processes of a worker that has opened a sandbox, without those of sandboxes."""

_LIST = """
import json, os
found = []
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        fields = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()
    except OSError:
        continue  # it ended while it was looked at
    if int(name) != os.getpid() and fields[0] != "Z":
        found.append((int(name), int(fields[1])))
print(json.dumps(found))
"""
_MOUNTS = """
import sys
lines = open(f"/proc/{sys.argv[1]}/mountinfo").read().splitlines()
print(sum(line.partition(" - ")[2].split()[1] == "box" for line in lines))
"""
_KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


@dataclass(frozen=True)
class Process:
    """A process of a worker."""

    container: str
    pid: int
    """The process id in the container."""


@dataclass(frozen=True)
class Tree:
    """The live processes of one container, as a map from process id to parent."""

    container: str
    parents: Mapping[int, int]

    def below(self, process: Process) -> list[Process]:
        found = sorted(child for child, parent in self.parents.items() if parent == process.pid)
        return [Process(self.container, pid) for pid in found]

    @property
    def server(self) -> Process:
        return self.below(Process(self.container, 1))[0]

    @property
    def spawner(self) -> Process:
        (launcher,) = self.below(self.server)
        (spawner,) = self.below(launcher)
        return spawner

    @property
    def supervisors(self) -> list[Process]:
        """The supervisors of the open sandboxes, the oldest first."""
        return self.below(self.spawner)

    def is_at_work(self, supervisor: Process) -> bool:
        """Return True if a program runs in the sandbox in addition to its first process."""
        return len(self.below(supervisor)) > 1


class Machine:
    """The containers of *gateway*'s coding workers, inspected without the gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self._engine = docker.from_env(version="auto")

    def close(self) -> None:
        self._engine.close()

    async def trees(self) -> list[Tree]:
        """Return the processes of each live worker."""
        workers = await self.gateway.workers()
        return await asyncio.to_thread(lambda: [self._tree(str(worker["id"])) for worker in workers])

    async def worker_of(self, session: str) -> str:
        """Return the worker that serves *session*, which is the id that the trainer knows."""
        (worker,) = [str(one["worker"]) for one in await self.gateway.sessions() if one["name"] == session]
        return worker

    async def tree(self, session: str) -> Tree:
        """Return the processes of the worker that serves *session*."""
        worker = await self.worker_of(session)
        return await asyncio.to_thread(self._tree, worker)

    async def judged_in(self, session: str, before: Tree) -> Process:
        """Return the supervisor of a sandbox in which a solution runs and which did not exist *before*."""
        now = await self.tree(session)
        new = [each for each in now.supervisors if each not in before.supervisors and now.is_at_work(each)]
        assert new, "nothing is judged yet"
        return new[-1]

    async def is_at_rest(self) -> None:
        """Assert that no session and no process of a session is left."""
        assert await self.gateway.sessions() == []
        busy = [dict(tree.parents) for tree in await self.trees() if len(tree.parents) > AT_REST]
        assert busy == [], f"processes of sessions are left (pid: parent): {busy}"

    async def kill(self, process: Process) -> None:
        """Kill *process* and wait until it has ended."""
        await asyncio.to_thread(self._killed, process)

    async def mounts(self, process: Process) -> int:
        """Return the number of sandbox mounts that *process* sees."""
        status, printed = await asyncio.to_thread(self._beside, process, _MOUNTS)
        assert status == 0, printed
        return int(printed)

    def _tree(self, worker: str) -> Tree:
        found = self._engine.containers.list(ignore_removed=True, filters={"name": worker})
        assert len(found) == 1, f"{worker} has {len(found)} containers"  # no container: the worker is being stopped
        tree = self._listed(str(found[0].id))
        assert tree is not None, f"{worker} is being stopped"
        return tree

    def _killed(self, process: Process) -> None:
        """Kill *process* and wait until it has ended.

        The killer shares the PID namespace. If the container ends with *process*, the killer ends too, and its status
        means nothing.
        """
        status, printed = self._beside(process, _KILL)
        eventually_now(lambda: self._is_gone(process, f"{status}: {printed!r}"))

    def _is_gone(self, process: Process, told: str) -> None:
        tree = self._listed(process.container)
        assert tree is None or process.pid not in tree.parents, f"{process} still runs; its killer said {told}"

    def _listed(self, container: str) -> Tree | None:
        """Return the live processes of *container*, or None if it has ended.

        Raises:
            AssertionError: The container lives but does not list its processes.
        """
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                found = self._engine.containers.get(container)
                status, printed = found.exec_run(["python3", "-ISc", _LIST], user="0")
            except docker.errors.NotFound:
                return None
            except docker.errors.APIError as error:
                status, printed = None, str(error).encode()
            # If the container ends during an exec, the exec may end with 0 and no output before the engine reports the
            # end.
            if status == 0 and printed:
                assert isinstance(printed, bytes)
                return Tree(container, dict(json.loads(printed)))
            try:
                found.reload()
            except docker.errors.NotFound:
                return None
            if found.status not in ("running", "created"):
                return None
            assert time.monotonic() < deadline, (status, printed)

    def _beside(self, process: Process, program: str) -> tuple[int, bytes]:
        """Run a Python *program* on *process*, with rights that no process in its container has.

        The program runs in its own container. This method, not the engine, removes that container, because a container
        that ends immediately would be gone before the wait. Return the status and the output. The status is 137 if the
        process ended the namespace.
        """
        beside = self._engine.containers.create(
            IMAGE,
            ["python3", "-ISc", program, str(process.pid)],
            user="0",
            pid_mode=f"container:{process.container}",
            cap_add=["KILL", "SYS_PTRACE"],
            network_disabled=True,
        )
        try:
            beside.start()
            status = int(beside.wait(timeout=HANG_S)["StatusCode"])
            return status, beside.logs()
        finally:
            beside.remove(force=True)
