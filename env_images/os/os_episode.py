"""One session's box: prepared from its task, acted in through its shell, judged, given back."""

from __future__ import annotations

from collections import OrderedDict

from os_box import Sandbox, Sandboxes
from os_judge import Judge
from os_problem import Problem
from os_scripts import Script, run_script
from os_shell import Output, Shell

INIT_TIMEOUT_S = 40.0
"""For one init script; a start as a whole has 50 s at the gateway."""
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

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._expected: OrderedDict[str, str] = OrderedDict()

    async def open(self, problem: Problem, *, seed: int) -> Episode:
        """Prepare a box for *problem*; its init scripts run once for all sessions of one task and seed.

        Raises:
            SetupFailed: an init script failed.
            JudgeFailed: what is expected could not be worked out.
        """
        sandbox = await self._prepared(problem, seed=seed)
        try:
            shell = Shell(sandbox)
            await shell.open()
            if problem.start:
                await shell.run(problem.start)
            judge = Judge(problem.evaluation, sandbox)
            await self._expect(judge, problem, seed=seed)
        except BaseException:  # a cancellation too: the trainer hung up
            await sandbox.close()
            raise
        return Episode(problem, sandbox, shell, judge)

    async def _prepared(self, problem: Problem, *, seed: int) -> Sandbox:
        scripts = problem.seeded_init(seed)
        if not scripts:
            return await self._sandboxes.open()
        if not problem.live_init:

            async def build(sandbox: Sandbox) -> None:
                await _initialise(sandbox, scripts)

            return await self._sandboxes.open(await self._sandboxes.layer(problem.key(seed), build))
        sandbox = await self._sandboxes.open()
        try:
            await _initialise(sandbox, scripts)
        except BaseException:  # as above
            await sandbox.close()
            raise
        return sandbox

    async def _expect(self, judge: Judge, problem: Problem, *, seed: int) -> None:
        key = problem.expected_key(seed)
        if not problem.live_init and key in self._expected:
            self._expected.move_to_end(key)
            judge.expected = self._expected[key]
            return
        await judge.prepare()
        if judge.expected is not None:
            self._expected[key] = judge.expected
            if len(self._expected) > MOST_EXPECTED:
                self._expected.popitem(last=False)


async def _initialise(sandbox: Sandbox, scripts: tuple[Script, ...]) -> None:
    for place, script in enumerate(scripts):
        done = await run_script(sandbox, script, timeout_s=INIT_TIMEOUT_S)
        if done.timed_out or done.status != 0:
            said = done.stderr.decode("utf-8", "replace")[-200:]
            how = "did not end in time" if done.timed_out else f"ended with {done.status}"
            raise SetupFailed(f"init script {place} {how}: {said}")
