"""Decides whether a session's task is solved: by the answer alone, or by checks on the answer and on the box.

What is expected is worked out after the task's init scripts and before the agent's first action, and kept here,
outside the box, where the agent is root. Matchers run here too. Only a check of the end state, and items with
AgentBench's own order (`after`), run something in the box at the end.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from os_box import Completed, Sandbox, is_refusal
from os_scripts import Script, run_script

if TYPE_CHECKING:  # imported for the tasks that name a reward function
    from envserver.generic import RewardCall

JUDGE_TIMEOUT_S = 45.0
"""All scripts of a judgement together; the client gives a whole request 60 s."""
SCRIPT_TIMEOUT_S = 30.0
MOST_READ_BYTES = 2**20
NO_ANSWER = "None"
"""What matchers see when the episode was finished without an answer, as in AgentBench."""


class InvalidEvaluation(ValueError):
    """The task's evaluation cannot be used: no session begins."""


class JudgeFailed(RuntimeError):
    """The judgement could not be made, by a mistake of the task's author: a failure, and never a reward of 0."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """Compares the first parameter, the answer, with the second, what is expected."""

    name: str


@dataclass(frozen=True, slots=True)
class Read:
    """Takes the text of a file of the box as the next parameter; fails where it cannot be read."""

    path: str


@dataclass(frozen=True, slots=True)
class Equals:
    """Compares the last parameter with *text*, both as `string-match` does."""

    text: str


Check = Script | Matcher | Read | Equals | None
"""One step of a `check` list; None stands for the example."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a task is judged; made by `Evaluation.read`, which checks it."""

    match: Callable[[str], bool] | None
    checks: tuple[Check, ...]
    example: Script | None
    after: bool
    """Work out what is expected at the end, in the box that the agent has changed."""
    reward: RewardCall | None = None
    """Judges the answer by itself, in place of all of the above."""

    @classmethod
    def read(cls, data: object) -> Evaluation:
        """Check the `evaluation` of a task.

        Raises:
            InvalidEvaluation: the shape is wrong, or a name in it is unknown.
        """
        if not isinstance(data, Mapping):
            raise InvalidEvaluation("evaluation must be an object")
        if "reward_function" in data:
            return cls(None, (), None, after=False, reward=_reward(data))
        if "script" in data:
            data = _with_check(data)
        judge = data.get("judge", "before")
        if judge not in ("before", "after"):
            raise InvalidEvaluation(f"evaluation.judge must be 'before' or 'after', not {judge!r}")
        match = None if data.get("match") is None else _match(data["match"])
        try:
            example = None if data.get("example") is None else Script.read(data["example"])
            given = data.get("check")
            steps: list[Any] = given if isinstance(given, list) else [] if given is None else [given]
            checks = tuple(_check(step) for step in steps)
        except ValueError as error:
            raise InvalidEvaluation(f"evaluation: {error}") from error
        if match is None and not ("check" in data and checks):
            raise InvalidEvaluation("evaluation needs match or check, or script or reward_function")
        if None in checks and example is None:
            raise InvalidEvaluation("evaluation: null in check stands for example, and there is none")
        return cls(match, checks, example, judge == "after")

    @property
    def needs_expected(self) -> bool:
        """Whether the example is to be run before the agent's first action."""
        return not self.after and self.match is None and None in self.checks


class Judge:
    """Judges one session."""

    def __init__(
        self,
        evaluation: Evaluation,
        sandbox: Sandbox,
        *,
        instruction: str = "",
        untouched: Callable[[], AbstractAsyncContextManager[Sandbox]] | None = None,
    ) -> None:
        """
        Args:
            evaluation: how the task is judged.
            sandbox: the session's.
            instruction: what the agent was told.
            untouched: opens another box as the session's was before the agent's first action.
        """
        self._evaluation = evaluation
        self._sandbox = sandbox
        self._instruction = instruction
        self._untouched = untouched
        self.expected: str | None = None
        """The example's output; None until it is known, or where it is not needed before the end."""

    async def prepare(self) -> None:
        """Work out what is expected, in the box as the init scripts left it.

        Raises:
            JudgeFailed: the example failed.
        """
        if self._evaluation.needs_expected and self._evaluation.example is not None:
            done = await _run(self._sandbox, self._evaluation.example)
            if fault := self._example_fault(done):
                raise JudgeFailed(fault)
            assert not isinstance(done, str)
            self.expected = done.stdout.decode("utf-8", "replace")

    async def score(self, answer: str | None) -> float:
        """Say what *answer*, None for an episode without one, is worth: from 0 to 1, where 1 is solved.

        Raises:
            JudgeFailed: a script did not end in time or lacks a program, the example or a reward function failed.
        """
        if (reward := self._evaluation.reward) is None:
            return await self.judge(answer)
        if answer is None:
            return 0.0
        try:
            return await asyncio.to_thread(reward, answer)  # a pattern may take a second
        except RuntimeError as error:
            raise JudgeFailed(str(error)) from error

    async def judge(self, answer: str | None) -> bool:
        """Say whether *answer*, None for an episode without one, solves the task, where no reward function is named.

        Raises:
            JudgeFailed: a script did not end in time or lacks a program, or the example failed.
        """
        if self._evaluation.match is not None:
            return answer is not None and self._evaluation.match(answer)
        parameters = [NO_ANSWER if answer is None else answer]
        try:
            async with asyncio.timeout(JUDGE_TIMEOUT_S):
                for check in self._evaluation.checks:
                    outcome = await self._step(check, parameters)
                    if outcome is None:
                        return False
                    parameters.append(outcome)
        except TimeoutError:
            raise JudgeFailed(f"the checks took more than {JUDGE_TIMEOUT_S:g} s") from None
        return True

    async def _step(self, check: Check, parameters: Sequence[str]) -> str | None:
        """Run one check; its output, or None where it fails."""
        match check:
            case Matcher(name):
                return "" if len(parameters) > 1 and MATCHERS[name](parameters[0], parameters[1]) else None
            case Equals(text):
                return "" if string_match(parameters[-1], text) else None
            case Read(path):
                return await self._content(path)
            case Script():
                return await self._checked(check, parameters)
            case None:
                return await self._example(parameters)

    async def _checked(self, check: Script, parameters: Sequence[str]) -> str | None:
        """Run a script of the task; its output, or None where it fails.

        A program that is missing is the author's mistake, unless the agent removed it or was told to make it.
        """
        from envserver.sandbox import TELLING, missing_programs

        told = Script(TELLING + check.code) if check.language == "bash" else check
        done = await _run(self._sandbox, told, parameters)
        if isinstance(done, str):
            missing = [check.interpreter]
        elif done.timed_out:
            raise JudgeFailed(f"a check did not end within {SCRIPT_TIMEOUT_S:g} s")
        elif done.status == 0:
            return done.stdout.decode("utf-8", "replace")
        else:
            said = done.stderr.decode("utf-8", "replace")
            missing = [name for name in missing_programs(check.code, said) if not self._is_told(name)]
        await self._refuse_missing(missing)
        return None

    async def _refuse_missing(self, names: Sequence[str]) -> None:
        """
        Raises:
            JudgeFailed: a box that no agent has acted in lacks a program of *names*.
        """
        if not names or self._untouched is None:
            return
        from envserver.sandbox import lacks_program

        async with self._untouched() as box:
            for name in names:
                if await lacks_program(box, name):
                    raise JudgeFailed(f"a check needs {name}, which is not in the box")

    def _is_told(self, name: str) -> bool:
        """Say whether the agent was told of a program *name*, and so may be the one who has to make it."""
        return re.search(rf"(?<!\w){re.escape(name.rpartition('/')[2])}(?!\w)", self._instruction) is not None

    async def _example(self, parameters: Sequence[str]) -> str | None:
        """Give what is expected; None where the agent made the example fail, which is a wrong answer.

        Raises:
            JudgeFailed: the example fails in a box that no agent has acted in as well.
        """
        if self.expected is not None:
            return self.expected
        example = self._evaluation.example
        assert example is not None  # `Evaluation.read` has seen to it
        done = await _run(self._sandbox, example, parameters)
        if not (fault := self._example_fault(done)):
            assert not isinstance(done, str)
            return done.stdout.decode("utf-8", "replace")
        if self._untouched is not None:
            async with self._untouched() as box:
                fault = self._example_fault(await _run(box, example, parameters))
        if fault:
            raise JudgeFailed(fault)
        return None

    def _example_fault(self, done: Completed | str) -> str:
        """Say why nothing can be expected by this run of the example; empty where something can."""
        if isinstance(done, str):
            return f"the example does not start: {done}"
        if done.timed_out:
            return "the example did not end in time"
        if done.status != 0:
            return f"the example ended with {done.status}: {done.stderr.decode('utf-8', 'replace')[:200]}"
        if not done.stdout.strip() and any(isinstance(check, Matcher) for check in self._evaluation.checks):
            return "the example printed nothing, so that an empty answer would be right"
        return ""

    async def _content(self, path: str) -> str | None:
        try:
            data = await self._sandbox.read_file(path, max_bytes=MOST_READ_BYTES)
        except Exception as error:
            if not is_refusal(error):
                raise
            return None  # not there, or no file: the agent's doing
        return data.decode("utf-8", "replace")


async def _run(sandbox: Sandbox, script: Script, arguments: Sequence[str] = ()) -> Completed | str:
    """Run *script*; a text is why it does not start."""
    try:
        return await run_script(sandbox, script, arguments=arguments, timeout_s=SCRIPT_TIMEOUT_S)
    except Exception as error:
        if not is_refusal(error):
            raise
        return str(error)


def integer_match(answer: str, expected: str) -> bool:
    """Compare as whole numbers; what is no number is never equal."""
    try:
        return int(answer) == int(expected)
    except ValueError:  # also for more than the 4,300 digits that `int` accepts
        return False


def string_match(answer: str, expected: str) -> bool:
    """Compare as text, without white space around and with one kind of line end."""
    return _unified(answer) == _unified(expected)


def size_match(answer: str, expected: str) -> bool:
    """Compare sizes such as `5K`, `5120` or `5120B`; both sides in whole numbers."""
    sizes = size_bytes(answer), size_bytes(expected)
    return sizes[0] is not None and sizes[0] == sizes[1]


def size_bytes(text: str) -> int | None:
    """Read a size; units are powers of 1024.

    Difference from AgentBench, which looks for the suffix `B` first and so turns `5KB` away: `5KB` is 5 KiB here.
    """
    if (found := re.fullmatch(r"\s*(\d{1,30})\s*([KMGTP]?)(?:I?B|BYTES?)?\s*", text.upper())) is None:
        return None
    return int(found[1]) << 10 * " KMGTP".index(found[2] or " ")


MATCHERS: Mapping[str, Callable[[str, str], bool]] = {
    "integer-match": integer_match,
    "string-match": string_match,
    "size-match": size_match,
    "containing": lambda answer, expected: expected.strip() in answer,
    "in": lambda answer, expected: answer.strip() in expected,
}
"""By the names of AgentBench's scripts."""


def _unified(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _reward(data: Mapping[str, Any]) -> RewardCall:
    """Read a reward function that judges the answer; further keys are its arguments."""
    from envserver.generic import read_reward

    try:
        return read_reward(data)
    except ValueError as error:
        raise InvalidEvaluation(f"evaluation.reward_function: {error}") from error


def _with_check(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write ``script``, the generic form, as the one step of ``check`` that it is."""
    if "check" in data or "match" in data:
        raise InvalidEvaluation("evaluation must have script, or check or match, not both")
    script = data["script"]
    if not isinstance(script, str) or not script.strip():
        raise InvalidEvaluation("evaluation.script must be a text")
    return {**data, "check": [{"code": script, "language": data.get("language")}]}


def _check(data: object) -> Check:
    match data:
        case None:
            return None
        case {"matcher": str(name)}:
            if name not in MATCHERS:
                raise InvalidEvaluation(f"no matcher {name!r}; there are {', '.join(MATCHERS)}")
            return Matcher(name)
        case {"read": str(path)} if path.startswith("/"):
            return Read(path)
        case {"equals": str(text)}:
            return Equals(text)
    return Script.read(data)


def _match(data: object) -> Callable[[str], bool]:
    given: Mapping[str, Any] = {"answer": data} if isinstance(data, str) else data if isinstance(data, Mapping) else {}
    strip = bool(given.get("strip", True))
    answer, pattern = given.get("answer"), given.get("regex")
    if isinstance(answer, str):
        return lambda text: (text.strip() if strip else text) == answer
    if isinstance(pattern, str):
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise InvalidEvaluation(f"evaluation.match.regex: {error}") from error
        return lambda text: compiled.search(text.strip() if strip else text) is not None
    raise InvalidEvaluation("evaluation.match must be a text, or an object with answer or regex")
