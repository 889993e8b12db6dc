"""One session's box: prepared from its task, used through its shell, judged, and closed."""

from __future__ import annotations

import contextlib
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from os_box import Sandbox, Sandboxes
from os_judge import Judge
from os_problem import Problem
from os_programs import Listing, Programs, listing_of
from os_random import feeding, reads_devices, with_pipe
from os_scripts import Script, run_script
from os_shell import Output, Shell

INIT_TIMEOUT_S = 40.0
"""Seconds for one init script; the gateway gives a whole start 50 s."""
MOMENT_S = 3_600
"""The files of init scripts are dated at the start of such a span of seconds.

Members of a group that open within one span start alike in all workers. A constant date would ensure that in any case.
But tasks ask which files were modified in the last days, and compare them with files dated `3 days ago`.
"""
MOST_EXPECTED = 4_096
"""The maximum number of kept expected values, some 100 bytes each. Only a group's first member computes its value."""


OWN_DOING = ("memory", "pids", "init", "stuck")
"""Reasons of a sandbox's end that its own commands caused: memory, processes, the end of its first
process, or a new program that could not start.

Root inside can end the first process. Any other reason is a failure of the worker.
"""


class SetupFailed(RuntimeError):
    """An init script failed: no session starts, and there is no reward."""


class Episode:
    """A session in its box."""

    def __init__(self, problem: Problem, sandbox: Sandbox, shell: Shell, judge: Judge) -> None:
        self.problem = problem
        self._sandbox = sandbox
        self._shell = shell
        self._judge = judge

    @property
    def killed(self) -> str | None:
        """The reason why the box was ended while the session went on; None while it lives."""
        return self._sandbox.killed

    @property
    def is_own_doing(self) -> bool:
        """True if the session's own commands ended the box."""
        return self._sandbox.killed in OWN_DOING

    @property
    def oom_kills(self) -> int:
        """The number of programs that the kernel has killed because the worker was out of memory."""
        return self._sandbox.oom_kills

    async def bash(self, script: str, *, within_s: float = math.inf) -> Output:
        """Run *script* in the session's shell; see `Shell.run`."""
        return await self._shell.run(script, within_s=within_s)

    async def judge(self, answer: str | None) -> float:
        """Return the answer's score, where 1 is solved; the shell stays open, because some tasks check processes."""
        return await self._judge.score(answer)

    async def close(self) -> None:
        """Close the box and end all its processes."""
        await self._sandbox.close()


class Episodes:
    """Opens episodes. One per worker."""

    def __init__(self, sandboxes: Sandboxes, *, clock: Callable[[], float] = time.time) -> None:
        """Create the opener; *clock* returns the seconds since the epoch."""
        self._sandboxes = sandboxes
        self._clock = clock
        self._expected: OrderedDict[str, str] = OrderedDict()
        self._base: Listing | None = None
        """The programs of a box without a task."""

    async def open(self, problem: Problem, *, seed: int) -> Episode:
        """Prepare a box for *problem*; its init scripts run once for all sessions of one task and seed.

        Raises:
            SetupFailed: An init script failed.
            JudgeFailed: The expected value could not be computed.
        """
        moment = int(self._clock()) // MOMENT_S * MOMENT_S
        sandbox = await self._prepared(problem, seed=seed, moment=moment)
        try:
            shell = await _begun(problem, sandbox)

            @contextlib.asynccontextmanager
            async def untouched() -> AsyncIterator[Sandbox]:
                other = await self._prepared(problem, seed=seed, moment=moment)
                try:
                    await _begun(problem, other)
                    yield other
                finally:
                    await other.close()

            judge = Judge(problem.evaluation, sandbox, instruction=problem.instruction, untouched=untouched)
            await self._expect(judge, problem, problem.expected_key(seed, moment))
            if problem.evaluation.scripts:
                if self._base is None:
                    self._base = await listing_of(self._sandboxes)
                judge.programs = await Programs.of(sandbox, self._base)
        except BaseException:  # also after a cancellation: the trainer disconnected
            await sandbox.close()
            raise
        return Episode(problem, sandbox, shell, judge)

    async def _prepared(self, problem: Problem, *, seed: int, moment: int) -> Sandbox:
        if not problem.init:
            return await self._sandboxes.open()
        if not problem.live_init:

            async def build(sandbox: Sandbox) -> None:
                await _initialise(sandbox, problem.init, seed=seed)

            layer = await self._sandboxes.layer(
                problem.key(seed, moment), build, moment=moment, keeps_seconds=problem.init_sleeps
            )
            return await self._sandboxes.open(layer)
        sandbox = await self._sandboxes.open()
        try:
            await _initialise(sandbox, problem.init, seed=seed)
        except BaseException:  # as above
            await sandbox.close()
            raise
        return sandbox

    async def _expect(self, judge: Judge, problem: Problem, key: str) -> None:
        if not problem.live_init and key in self._expected:
            self._expected.move_to_end(key)
            judge.expected = self._expected[key]
            return
        await judge.prepare()
        if judge.expected is not None:
            self._expected[key] = judge.expected
            if len(self._expected) > MOST_EXPECTED:
                self._expected.popitem(last=False)


async def _begun(problem: Problem, sandbox: Sandbox) -> Shell:
    """Open the session's shell and type the task's start line."""
    shell = Shell(sandbox)
    await shell.open()
    if problem.start:
        await shell.run(problem.start)
    return shell


async def _initialise(sandbox: Sandbox, scripts: tuple[Script, ...], *, seed: int) -> None:
    """Run the init scripts with the random numbers of *seed*.

    Raises:
        SetupFailed: A script failed, or did not end in time.
    """
    async with contextlib.AsyncExitStack() as stack:
        if any(reads_devices(script.code) for script in scripts) and await stack.enter_async_context(
            feeding(sandbox, seed=seed)
        ):
            scripts = tuple(
                Script(with_pipe(script.code, language=script.language), script.language) for script in scripts
            )
        for place, script in enumerate(scripts):
            await _run_init(sandbox, place, script.seeded(seed))


async def _run_init(sandbox: Sandbox, place: int, script: Script) -> None:
    done = await run_script(sandbox, script, timeout_s=INIT_TIMEOUT_S)
    if done.timed_out or done.status != 0:
        said = done.stderr.decode("utf-8", "replace")[-200:]
        how = "did not end in time" if done.timed_out else f"ended with {done.status}"
        raise SetupFailed(f"init script {place} {how}: {said}")
