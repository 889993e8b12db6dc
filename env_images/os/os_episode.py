"""One session's box: prepared from its task, acted in through its shell, judged, given back."""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable

from os_box import Sandbox, Sandboxes
from os_judge import Judge
from os_problem import Problem
from os_random import feeding, reads_devices, with_pipe
from os_scripts import Script, run_script
from os_shell import Output, Shell

INIT_TIMEOUT_S = 40.0
"""For one init script; a start as a whole has 50 s at the gateway."""
MOMENT_S = 3_600
"""The files that init scripts write are dated at the beginning of such a span: members of a group that open within one
span, in whatever workers, begin alike. A date that is always the same would do so in any case. But tasks ask which
files were modified in the last days, and compare such files with others that are dated `3 days ago`."""
MOST_EXPECTED = 4_096
"""Expected values kept, so that of a group's members only the first works its value out; some 100 bytes each."""


OWN_DOING = ("memory", "pids", "init")
"""Reasons of a sandbox's end that its own commands brought about: too much memory, too many processes, and its first
process ended, which root inside can bring about. Any other is a failure of the worker's."""


class SetupFailed(RuntimeError):
    """An init script failed: no session begins, and no reward is given."""


class Episode:
    """A session in its box."""

    def __init__(self, problem: Problem, sandbox: Sandbox, shell: Shell, judge: Judge) -> None:
        self.problem = problem
        self._sandbox = sandbox
        self._shell = shell
        self._judge = judge

    @property
    def killed(self) -> str | None:
        """Why the box was ended while the session went on; None while it lives."""
        return self._sandbox.killed

    @property
    def is_own_doing(self) -> bool:
        """Whether the session's own commands brought the box down."""
        return self._sandbox.killed in OWN_DOING

    async def bash(self, script: str) -> Output:
        """Run *script* in the session's shell."""
        return await self._shell.run(script)

    async def judge(self, answer: str | None) -> float:
        """Say what the answer is worth, 1 is solved; the shell stays open, as processes count in some tasks."""
        return await self._judge.score(answer)

    async def close(self) -> None:
        """Give the box back with all that runs in it."""
        await self._sandbox.close()


class Episodes:
    """Opens episodes. One per worker."""

    def __init__(self, sandboxes: Sandboxes, *, clock: Callable[[], float] = time.time) -> None:
        """*clock* gives the seconds since the epoch."""
        self._sandboxes = sandboxes
        self._clock = clock
        self._expected: OrderedDict[str, str] = OrderedDict()

    async def open(self, problem: Problem, *, seed: int) -> Episode:
        """Prepare a box for *problem*; its init scripts run once for all sessions of one task and seed.

        Raises:
            SetupFailed: an init script failed.
            JudgeFailed: what is expected could not be worked out.
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
        except BaseException:  # a cancellation too: the trainer hung up
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
    """Open the session's shell and type what the task begins with."""
    shell = Shell(sandbox)
    await shell.open()
    if problem.start:
        await shell.run(problem.start)
    return shell


async def _initialise(sandbox: Sandbox, scripts: tuple[Script, ...], *, seed: int) -> None:
    """Run the init scripts, with the random numbers of *seed*.

    Raises:
        SetupFailed: one of them failed, or did not end in time.
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
