"""The os environment: a Linux box for each session, one shell in it, and a judge at the end.

An action is one of three tools, or free text in the Think/Act form. Tools act in the box. The judge and its expected
values are here, outside the box.
"""

from __future__ import annotations

from typing import Any, ClassVar

from envserver import Environment, Prompt, SessionFailed, SessionLost, StepResult, Task, ToolCall, serve, tool
from envserver.sandbox import Limits, SandboxError
from os_box import is_refusal
from os_episode import Episode, Episodes
from os_judge import JudgeFailed, JudgeStarved
from os_problem import Problem
from os_prompt import instructions
from os_shell import ShellGone
from os_text import REMINDER, Act, observation, parse

LIMITS = Limits(
    memory_bytes=256 * 2**20,  # AgentBench gives 1 GiB; no task here needs a tenth of this
    pids=256,
    disk_bytes=64 * 2**20,
    cpu_s=120,  # a command has 30 s, so this limits programs that stay in the background
    output_bytes=65_536,
)
"""The limits of one session."""


class Os(Environment):
    """A session is one box; it ends with an answer, with `finish_action`, or with the last turn."""

    name = "os"
    default_tool = "bash_action"
    sandbox_limits = LIMITS
    episodes: ClassVar[Episodes | None] = None
    """The worker's boxes, created for the first session."""

    _problem: Problem
    _episode: Episode | None = None
    _parsed: Act | None = None
    """The action of this turn's free text, including its thought."""
    _turns = 0

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Prepare the box and the expected value; *seed* determines bash's `$RANDOM` in init scripts that use it.

        Raises:
            InvalidTask: The task cannot be played; no session starts.
            SetupFailed: An init script failed.
            JudgeFailed: The expected value could not be computed.
            SessionLost: No box could be opened.
        """
        self._problem = Problem.read(task)
        try:
            self._episode = await self._worker().open(self._problem, seed=seed)
        except (SandboxError, ShellGone) as error:
            if is_refusal(error):
                raise
            raise SessionLost(f"no box could be prepared: {error}") from error
        return instructions(self._problem.instruction, max_turns=self._problem.max_turns)

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a task that cannot be played."""
        Problem.read(task)

    async def close(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            await episode.close()

    @classmethod
    def _worker(cls) -> Episodes:
        if cls.episodes is None:
            cls.episodes = Episodes(cls.sandboxes)
        return cls.episodes

    def parse_text(self, text: str) -> ToolCall | str:
        """Read the Think/Act form; a text without an action costs a turn and is answered with the form of actions."""
        self._parsed = parse(text)
        match self._parsed:
            case None:
                self._turns += 1
                return REMINDER
            case Act("bash", script):
                return ToolCall("bash_action", {"script": script})
            case Act("answer", answer):
                return ToolCall("answer_action", {"answer": answer})
            case Act(_, _, thought):
                return ToolCall("finish_action", {"thought": thought})

    @tool
    async def bash_action(self, script: str) -> StepResult:
        """Run a bash script in the session's shell and see its output; directory and variables persist."""
        act = self._act("bash", script)
        episode = self._living()
        try:
            output = await episode.bash(script, within_s=self.step_left_s)
        except (SandboxError, ShellGone) as error:
            return self._ended(episode, act, error)
        if episode.killed is not None:
            return self._ended(episode, act, None)
        seen = observation(output.text, notice=output.notice, newlines=self._problem.newlines)
        if self._turns >= self._problem.max_turns:
            return self._end(seen, act, score=0.0, status="task limit reached")
        return StepResult(seen, metadata={"parsed_action": shown(act), "status": "running", "num_turns": self._turns})

    @tool
    async def answer_action(self, answer: str) -> StepResult:
        """Give the answer: the bare value that the problem asks for. Ends the session."""
        return await self._judged(self._act("answer", answer), answer)

    @tool
    async def finish_action(self, thought: str) -> StepResult:
        """Say that the problem is solved where it asks for a change and not for an answer. Ends the session."""
        return await self._judged(self._act("finish", ""), None, thought=thought)

    async def _judged(self, act: Act, answer: str | None, *, thought: str = "") -> StepResult:
        episode = self._living()
        if not act.thought:
            act = Act(act.kind, act.content, thought)
        if self._turns > self._problem.max_turns:
            return self._end("The turns are used up.", act, score=0.0, status="task limit reached")
        kills = episode.oom_kills
        try:
            score = await episode.judge(answer)
        except JudgeFailed as error:
            raise SessionFailed(f"the judge failed: {error}") from error
        except JudgeStarved as error:
            raise SessionLost(str(error)) from error
        except SandboxError as error:
            if not is_refusal(error) and episode.oom_kills == kills:
                return self._ended(episode, act, error)
            score = 0.0  # the agent obstructed the judge; the box is otherwise intact
        if episode.oom_kills != kills:
            raise SessionLost("the worker was out of memory during the checks, and the kernel killed programs in it")
        text = "Solved." if score == 1.0 else "Not solved." if score == 0.0 else f"Partly solved: {score:.2f} of 1."
        return self._end(text, act, score=score, answer=answer or "")

    def _act(self, kind: str, content: str) -> Act:
        """Count the turn and return its action, with the thought if it came as text."""
        self._turns += 1
        parsed, self._parsed = self._parsed, None
        if parsed is not None and parsed.kind == kind:
            return parsed
        return Act("bash" if kind == "bash" else "answer" if kind == "answer" else "finish", content)

    def _living(self) -> Episode:
        if self._episode is None:
            raise RuntimeError("the session has ended")
        return self._episode

    def _ended(self, episode: Episode, act: Act, error: Exception | None) -> StepResult:
        """End a session whose own commands ended its box, which is the agent's failure.

        Raises:
            SessionLost: The box is gone for another reason.
            Exception: *error* itself, if the box goes on.
        """
        if episode.is_own_doing:
            text = f"The box was ended by what ran in it ({episode.killed})."
            return self._end(text, act, score=0.0, status="agent invalid action")
        if error is None or episode.killed is not None or (isinstance(error, SandboxError) and error.code == "ended"):
            raise SessionLost(f"the box is lost: {error or episode.killed}") from error
        raise error

    def _end(self, text: str, act: Act, *, score: float, status: str = "completed", answer: str = "") -> StepResult:
        return StepResult(
            text,
            reward=float(score),
            finished=True,
            metadata={
                "parsed_action": shown(act),
                "status": status,
                "answer": answer,
                "success": score == 1.0,
                "num_turns": self._turns,
            },
        )


def shown(act: Act) -> dict[str, Any]:
    """Return an action in the form of AReaL's `parsed_action`."""
    return {"thought": act.thought, "action": act.kind, "content": act.content}


if __name__ == "__main__":
    serve(Os)
