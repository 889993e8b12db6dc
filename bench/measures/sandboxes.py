"""Sessions with a sandbox each: first command's output, sustained openings, groups, bursts, memory (S8, S9).

The subjects are the library in this process, the os environment's server called directly, and the gateway with local
processes. With an engine, the gateway with containers and a container a session by the Docker SDK are added.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from envserver.sandbox import SandboxError

from bench.load.boxes import OS, BoxEpisode, Taken, heavy_tasks, light_task, opened_at_once, session
from bench.load.closed_loop import Step, connections, load
from bench.load.episodes import TOKEN_LENGTH
from bench.load.http1 import Address
from bench.measures.footprint import MIB
from bench.measures.opens import Bursts
from bench.measures.sandboxes_report import (
    CONTAINERS,
    LIBRARY,
    OS_SERVER,
    PROCESSES,
    SDK,
    WORKERS,
    HeldBoxes,
    Plan,
    Samples,
    Way,
    make_report,
)
from bench.measures.sandboxes_report import QUICK as QUICK  # each part has its plans in the module that runs it
from bench.reporting.grid import Cell, rotated
from bench.reporting.report import Report
from bench.subjects import sandbox_library
from bench.subjects.containers import Containers, containers
from bench.subjects.processes import ServerProcess, Usage, descendants, pss_bytes
from bench.subjects.targets import GATEWAY, OS_TARGET, Servers

WARMUP = 8
"""Concurrent sessions before the measurement. After them each worker has its spawner and the prepared state."""

Session = Callable[[str], Awaitable[Taken]]
"""Runs one session, in which a shell prints the given token."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway with warm workers."""

    name: str
    process: ServerProcess
    engine: Containers | None = None
    """The engine of its workers, or None if they are local processes."""

    @property
    def address(self) -> Address:
        """The address of the gateway."""
        return self.process.address

    async def memory_bytes(self) -> int:
        """Return the memory of its workers and their sandboxes, with each shared page counted once.

        Raises:
            PermissionError: This process may not read their memory.
        """
        if self.engine is not None:
            return await asyncio.to_thread(self.engine.memory_bytes, OS)
        return await asyncio.to_thread(lambda: sum(map(pss_bytes, descendants(self.process.pid))))

    async def usage(self) -> dict[str, Usage]:
        """Return the usage of the gateway, and of workers in control groups. Sandboxes end too soon to query."""
        used = {GATEWAY: self.process.usage()}
        if self.engine is not None:
            used[WORKERS] = Usage(await asyncio.to_thread(self.engine.cpu_s, OS), 0)
        return used

    @property
    def counted(self) -> str:
        """The method of `memory_bytes`."""
        return "control group" if self.engine is not None else "proportional set"


@dataclass(slots=True)
class _World:
    """All running subjects."""

    ways: dict[str, Session] = field(default_factory=dict)
    gateways: list[Gateway] = field(default_factory=list)
    engine: Containers | None = None


async def run(servers: Servers, plan: Plan) -> Report:
    """Measure. The report lists the measurements that this machine does not allow.

    Raises:
        StartError: A server does not start.
        WrongAnswer: A session of the sequential sessions failed.
        DockerException: An engine operation failed.
    """
    samples = Samples()
    async with AsyncExitStack() as stack:
        world = _World()
        folder = stack.enter_context(sandbox_library.sandbox_folder())
        try:
            library = await stack.enter_async_context(sandbox_library.sandboxes(folder))
        except SandboxError as error:
            samples.missing.append(f"Sandboxes of local processes were not measured: {error}.")
        else:
            world.ways[LIBRARY] = partial(sandbox_library.session, library)
            await _add_local(world, stack, servers, folder)
        if plan.docker:
            await _add_docker(world, stack, servers, plan)
        await _in_turn(world, plan, samples)
        await _sustained(world, plan, samples)
        for gateway in world.gateways:
            await _groups(gateway, plan, samples)
            await _bursts(gateway, plan, samples)
            await _held(gateway, plan, samples)
    return make_report(samples, plan=plan)


# -- subjects -----------------------------------------------------------------------------------------------------


async def _add_local(world: _World, stack: AsyncExitStack, servers: Servers, folder: Path) -> None:
    box = {"ENVSERVER_SANDBOX_BOX": str(folder / "box"), "ENVSERVER_SANDBOX_WORK": str(folder / "work" / "direct")}
    server = await stack.enter_async_context(servers.running(OS_TARGET, box))
    world.ways[OS_SERVER] = await _way(stack, server.address)
    variables = {"GATEWAY_ENVIRONMENTS": OS, "GATEWAY_SANDBOX_DIR": str(folder)}
    process = await stack.enter_async_context(servers.running(GATEWAY, variables))
    world.ways[PROCESSES] = await _way(stack, process.address)
    world.gateways.append(Gateway(PROCESSES, process))


async def _add_docker(world: _World, stack: AsyncExitStack, servers: Servers, plan: Plan) -> None:
    instance = f"bench-{uuid.uuid4().hex[:8]}"
    engine = world.engine = stack.enter_context(containers(plan.engine, plan.image, instance))
    await asyncio.to_thread(engine.check_image)
    variables = {
        "GATEWAY_ENVIRONMENTS": OS,
        "GATEWAY_BACKEND": "docker",
        "GATEWAY_DOCKER_URL": plan.engine,
        "GATEWAY_INSTANCE": instance,
    }
    process = await stack.enter_async_context(servers.running(GATEWAY, variables))
    world.ways[CONTAINERS] = await _way(stack, process.address)
    world.gateways.append(Gateway(CONTAINERS, process, engine))
    await engine.session(_token())  # the first session reads the image from disk
    world.ways[SDK] = engine.session


async def _way(stack: AsyncExitStack, address: Address) -> Session:
    """Warm a server up, and return a function that runs sessions on it over one connection."""
    (await opened_at_once(address, [light_task()] * WARMUP)).raise_errors()
    (connection,) = await stack.enter_async_context(connections(address, 1))
    return partial(session, connection, light_task())


# -- measurements -------------------------------------------------------------------------------------------------


async def _in_turn(world: _World, plan: Plan, samples: Samples) -> None:
    names = list(world.ways)
    for turn in range(plan.rounds):
        for name in rotated(names, turn):
            for _ in range(plan.sdk_opens if name == SDK else plan.opens):
                samples.in_turn[name].append(await world.ways[name](_token()))


async def _sustained(world: _World, plan: Plan, samples: Samples) -> None:
    for _, callers in itertools.product(range(plan.sustain_rounds), plan.callers):
        for gateway in world.gateways:
            async with connections(gateway.address, callers) as opened:
                steps = [_step(partial(session, connection, light_task())) for connection in opened]
                before = await gateway.usage()
                became = await load(steps, duration_s=plan.sustain_s)
                _cell(samples, gateway.name, callers).add(became, before, await gateway.usage())
        if world.engine is not None:
            steps = [_step(world.engine.session)] * callers
            _cell(samples, SDK, callers).add(await load(steps, duration_s=plan.sustain_s), {}, {})


def _cell(samples: Samples, name: str, callers: int) -> Cell:
    return samples.sustained.setdefault(name, {}).setdefault(callers, Cell())


def _step(one: Session) -> Step:
    async def step(_: int) -> None:
        await one(_token())

    return step


async def _groups(gateway: Gateway, plan: Plan, samples: Samples) -> None:
    make = heavy_tasks(uuid.uuid4().hex[:8])
    for _ in range(plan.groups):
        task = make()
        for way, tasks in (
            (Way.EACH, [make() for _ in range(plan.group)]),
            (Way.ONCE, [task] * plan.group),
            (Way.KEPT, [task] * plan.group),
        ):
            became = await opened_at_once(gateway.address, tasks)
            samples.group_errors += became.errors
            if not became.errors:
                samples.groups_s[gateway.name][way].append(max(became.samples_s))


async def _bursts(gateway: Gateway, plan: Plan, samples: Samples) -> None:
    for size in plan.bursts:
        bursts = samples.bursts[gateway.name][size] = Bursts()
        for _ in range(plan.burst_rounds):
            bursts.add(await opened_at_once(gateway.address, [light_task()] * size))


async def _held(gateway: Gateway, plan: Plan, samples: Samples) -> None:
    """Open sessions that run a first command and then stay idle. Record the memory that they add."""
    try:
        before = await gateway.memory_bytes()
        async with connections(gateway.address, plan.held) as opened:
            episodes = [BoxEpisode(connection) for connection in opened]
            for episode in episodes:
                await episode.open(light_task())
                await episode.command(_token())
            added = await gateway.memory_bytes() - before
            for episode in episodes:
                await episode.close()
    except PermissionError as error:
        samples.missing.append(f"The memory of sessions ({gateway.name}) was not measured: {error}.")
        return
    samples.held.append(HeldBoxes(gateway.name, gateway.counted, plan.held, added / MIB / plan.held))


def _token() -> str:
    return uuid.uuid4().hex[:TOKEN_LENGTH]
