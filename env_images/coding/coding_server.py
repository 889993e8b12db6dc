"""The coding environment: a sandbox to work in, and hidden tests that judge the agent's work.

The agent is root in its sandbox and cannot see this server. Submitted code runs in further sandboxes that the agent
never had; see `coding_judge` and `coding_commands`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any

from coding_blocks import solution_in, submitted
from coding_commands import CommandJudge
from coding_judge import MAX_SOURCE_BYTES, Judge, Verdict
from coding_sandbox import ENVIRONMENT, ITS_OWN_DOING, Sandbox, SandboxFault
from coding_tasks import Command, Evaluation, InvalidTask, Tests, instruction, read_evaluation
from coding_texts import completed_text, opening, public_report
from coding_workspace import MOMENT, SOLUTION, WORKSPACE, Start, collect, read_start
from envserver import Environment, Prompt, StepResult, Task, ToolCall, serve, tool
from envserver.sandbox import Limits, SandboxError

EXECUTE_S = 60.0
"""Default seconds of a command; a task's `config.execute_timeout_s` may differ, up to `MOST_EXECUTE_S`."""
MOST_EXECUTE_S = 300.0
CLOSE_S = 10.0
"""Seconds to end a judgement: a kill and two unmounts."""
SHOWN_BYTES = 64 * 1024
"""Shown bytes of a command's output, per stream, and of a file that is read."""
MAX_FILE_BYTES = 1024 * 1024
LIMITS = Limits(memory_bytes=384 * 2**20, pids=128, disk_bytes=128 * 2**20)
"""The limits of the agent's sandbox and of each sandbox for judging."""


class Coding(Environment):
    """A session is one problem; it ends with `submit`."""

    name = "coding"
    env_types = ("coding_env",)
    default_tool = "submit"
    sandbox_limits = LIMITS

    _evaluation: Evaluation
    _start: Start
    _layer: Any
    _execute_s: float
    _sandbox: Sandbox | None = None
    _closed = False
    _judging: asyncio.Task[Verdict] | None = None

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Open the sandbox with the task's files in it; *seed* is unused, because the task determines everything.

        Raises:
            InvalidTask: The task cannot be asked or judged; no session starts.
            SandboxFault: No sandbox could be opened.
        """
        text, self._evaluation, self._start, self._execute_s = read_task(task)
        await self._open()
        return opening(text, self._evaluation, files=sorted(self._start.files))

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a task that cannot be asked or judged."""
        read_task(task)

    async def close(self) -> None:
        """Close the sandbox and cancel a running judgement, because no client waits for it any more."""
        self._closed = True
        if self._judging is not None:
            self._judging.cancel()
            await asyncio.wait((self._judging,), timeout=CLOSE_S)
        if self._sandbox is not None:
            await self._sandbox.close()

    @tool
    async def execute(self, command: Annotated[str, "a bash command line"]) -> StepResult:
        """Run a command with bash in your workspace, as root, without a network; what it leaves running goes on."""
        timeout_s = min(self._execute_s, self.step_left_s)
        try:
            done = await self._live.run(
                ["bash", "-c", command],
                cwd=WORKSPACE,
                env=ENVIRONMENT,
                timeout_s=timeout_s,
                output_bytes=SHOWN_BYTES,
            )
        except SandboxError as error:
            return await self._refused(error, "The command was not run")
        return StepResult(completed_text(done, timeout_s=timeout_s), data={"status": done.status})

    @tool
    async def write_file(
        self, path: Annotated[str, f"absolute, or relative to {WORKSPACE}"], content: str
    ) -> StepResult:
        """Write a text file; the directories above it are made."""
        data = content.encode("utf-8", "replace")
        if len(data) > MAX_FILE_BYTES:
            return StepResult(f"Not written: a file may have {MAX_FILE_BYTES} bytes here.")
        place = absolute(path)
        if "\0" in place:
            return StepResult("Not written: the path has a zero byte.")
        try:
            parent = ["sh", "-c", 'mkdir -p -- "$(dirname -- "$0")"', place]
            timeout_s = min(self._execute_s, self.step_left_s)
            await self._live.run(parent, cwd="/", env=ENVIRONMENT, timeout_s=timeout_s)
            await self._live.write_file(place, data)
        except SandboxError as error:
            return await self._refused(error, f"{place} was not written")
        return StepResult(f"Wrote {len(data)} bytes to {place}.")

    @tool
    async def read_file(self, path: Annotated[str, f"absolute, or relative to {WORKSPACE}"]) -> StepResult:
        """Read a text file."""
        place = absolute(path)
        if "\0" in place:
            return StepResult("Not read: the path has a zero byte.")
        try:
            data = await self._live.read_file(place, max_bytes=SHOWN_BYTES + 1)
        except SandboxError as error:
            return await self._refused(error, f"{place} cannot be read")
        text = data[:SHOWN_BYTES].decode("utf-8", "replace")
        return StepResult(text if len(data) <= SHOWN_BYTES else f"{text}\n[cut after {SHOWN_BYTES} bytes]")

    @tool
    async def run_tests(self) -> StepResult:
        """Run solution.py on the public examples and show what it answers; gives no reward."""
        if isinstance(self._evaluation, Command) or not self._evaluation.public:
            return StepResult("This task has no public tests; run your own with `execute`.")
        source = await self._solution()
        if isinstance(source, StepResult):
            return source
        verdict = await self._judged(self._evaluation, source, public=True)
        return StepResult(public_report(self._evaluation, verdict))

    @tool
    async def submit(
        self, code: Annotated[str | None, "the whole of solution.py; without it, the file is taken"] = None
    ) -> StepResult:
        """Hand the solution in to be judged by hidden tests. This ends the task: there is no second attempt."""
        evaluation = self._evaluation
        if isinstance(evaluation, Command):
            return await self._submit_tree(evaluation, code)
        if code is None:
            source = await self._solution()
        elif len(code.encode("utf-8", "replace")) > MAX_SOURCE_BYTES:
            source = StepResult(f"Not submitted: a solution may have {MAX_SOURCE_BYTES} bytes.")
        else:
            source = submitted(code, evaluation)
        if isinstance(source, StepResult):
            return source
        is_inside = any(isinstance(test, str) for test in evaluation.hidden)
        return finished(await self._judged(evaluation, source, public=False), is_inside=is_inside)

    def parse_text(self, text: str) -> ToolCall:
        """Treat a block of the text as the solution; see `solution_in`."""
        code = solution_in(text, self._evaluation) if isinstance(self._evaluation, Tests) else text
        return ToolCall("submit", {"code": code})

    @property
    def _live(self) -> Sandbox:
        assert self._sandbox is not None  # `reset` has opened it, or there is no session
        return self._sandbox

    async def _open(self) -> None:
        try:
            self._layer = await self.sandboxes.layer(self._start.key, self._start.build(), moment=MOMENT)
            sandbox = await self.sandboxes.open(self._layer)
        except SandboxError as error:
            raise SandboxFault(f"no sandbox could be opened: {error}") from error
        self._sandbox = sandbox
        if self._closed:  # `close` may be called while a sandbox opens, and then finds no sandbox
            await sandbox.close()

    async def _begin_again(self, error: SandboxError) -> StepResult:
        """Replace a sandbox that its watchdog ended.

        Raises:
            SandboxFault: It ended for another reason, which the trainer must see.
        """
        reason = self._live.killed
        if reason not in ITS_OWN_DOING:
            raise SandboxFault(f"the sandbox is lost: {error}") from error
        await self._live.close()
        await self._open()
        return StepResult(
            f"Your sandbox was ended by its watchdog ({reason}). A new one is open, as it was at the start: "
            "what you had written and what was running is gone."
        )

    async def _refused(self, error: SandboxError, text: str) -> StepResult:
        """Return the sandbox's refusal to the agent; open a new sandbox if it has ended."""
        if error.code == "ended":
            return await self._begin_again(error)
        return StepResult(f"{text}: {str(error).strip()[:500]}")

    async def _solution(self) -> str | StepResult:
        """Return the contents of solution.py, or an answer that states why it cannot be read."""
        try:
            data = await self._live.read_file(SOLUTION, max_bytes=MAX_SOURCE_BYTES + 1)
        except SandboxError as error:
            return await self._refused(error, f"There is no solution: {SOLUTION} cannot be read")
        if len(data) > MAX_SOURCE_BYTES:
            return StepResult(f"Not taken: {SOLUTION} has more than {MAX_SOURCE_BYTES} bytes.")
        return data.decode("utf-8", "replace")

    async def _judged(self, evaluation: Tests, source: str, *, public: bool) -> Verdict:
        judge = Judge(sandboxes=self.sandboxes, error=SandboxError)
        return await self._while_open(judge.judge(evaluation, source, public=public))

    async def _while_open(self, judgement: Coroutine[Any, Any, Verdict]) -> Verdict:
        """Await *judgement*, which `close` cancels.

        Raises:
            SandboxFault: The session was closed meanwhile.
        """
        self._judging = asyncio.get_running_loop().create_task(judgement)
        if self._closed:
            self._judging.cancel()
        try:
            return await self._judging
        except asyncio.CancelledError:
            if not self._closed:
                raise
            raise SandboxFault("the session was closed while its solution was judged") from None

    async def _submit_tree(self, evaluation: Command, code: str | None) -> StepResult:
        if code is not None:
            return StepResult("Not submitted: this task judges your workspace; call submit without code.")
        judge = CommandJudge(sandboxes=self.sandboxes, error=SandboxError)
        try:
            tree = await collect(self._live)
            verdict = await self._while_open(judge.judge(evaluation, tree, layer=self._layer))
            return finished(verdict, is_inside=True)
        except InvalidTask as error:
            return StepResult(f"Not submitted: {error}")
        except SandboxError as error:
            return await self._refused(error, "Not submitted")


def finished(verdict: Verdict, *, is_inside: bool) -> StepResult:
    """End the episode; the agent learns only the number of passed hidden tests.

    Args:
        is_inside: True if tests ran in the solution's own process, which code written for it can deceive.
    """
    total = len(verdict.outcomes)
    return StepResult(
        f"Passed {verdict.passed} of {total} hidden tests.",
        reward=verdict.score,
        finished=True,
        metadata={"passed": verdict.passed, "total": total} | ({"in_process": True} if is_inside else {}),
    )


def absolute(path: str) -> str:
    """Return a path as absolute; a relative path is in the workspace."""
    return path if path.startswith("/") else f"{WORKSPACE}/{path}"


def read_task(task: Task) -> tuple[str, Evaluation, Start, float]:
    """Return a task's text, its evaluation, the files at the start, and the seconds of a command.

    Raises:
        InvalidTask: The task cannot be asked or judged.
    """
    config = task.get("config")
    return instruction(task), read_evaluation(task), read_start(config), execute_timeout_s(config)


def execute_timeout_s(config: object) -> float:
    """Return `execute_timeout_s` of a task's configuration, by default `EXECUTE_S`.

    Raises:
        InvalidTask: The value is not a number above 0 and up to `MOST_EXECUTE_S`.
    """
    given = config.get("execute_timeout_s", EXECUTE_S) if isinstance(config, dict) else EXECUTE_S
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 < given <= MOST_EXECUTE_S:
        raise InvalidTask(f"config.execute_timeout_s must be above 0 and at most {MOST_EXECUTE_S:g}")
    return float(given)


if __name__ == "__main__":
    serve(Coding)
