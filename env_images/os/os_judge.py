"""Decides whether a session's task is solved, by the answer alone or by checks on the answer and on the box.

The expected value is computed after the task's init scripts and before the agent's first action. It is kept here,
outside the box, because the agent is root in the box. Matchers run here too. Only checks of the end state, and items
with AgentBench's own order (`after`), run programs in the box at the end. If the agent has changed such programs
(`os_programs`), the task is not solved.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from envserver.answers import read_number, unmarked
from os_box import Completed, Sandbox, is_refusal
from os_programs import Programs
from os_scripts import Script, run_check, run_script

if TYPE_CHECKING:  # imported for the tasks that name a reward function
    from envserver.generic import RewardCall

JUDGE_TIMEOUT_S = 45.0
"""Seconds for all scripts of a judgement; the client gives a whole request 60 s."""
SCRIPT_TIMEOUT_S = 30.0
SCRIPT_CPU_S = 10.0
"""CPU seconds for which a script has a higher priority than agents' programs."""
STARVED_SHARE = 0.25
"""The share of its time limit for which a script must have waited for other programs, so that its timeout is theirs."""
MOST_READ_BYTES = 2**20


class InvalidEvaluation(ValueError):
    """The task's evaluation cannot be used: no session starts."""


class JudgeStarved(RuntimeError):
    """Other sessions kept a script from the CPU, so there is no verdict."""


class JudgeFailed(RuntimeError):
    """The judgement failed by a mistake of the task's author: a failure, and never a reward of 0."""


@dataclass(frozen=True, slots=True)
class Matcher:
    """Compares the first parameter, the answer, with the second, the expected value."""

    name: str


@dataclass(frozen=True, slots=True)
class Read:
    """Adds the text of a file in the box as the next parameter; fails if it cannot be read."""

    path: str


@dataclass(frozen=True, slots=True)
class Equals:
    """Compares the last parameter with *text*, as `string-match` does."""

    text: str


Check = Script | Matcher | Read | Equals | None
"""One step of a `check` list; None means the example."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The evaluation of a task; `Evaluation.read` creates and checks it."""

    match: Callable[[str], bool] | None
    checks: tuple[Check, ...]
    example: Script | None
    after: bool
    """True to compute the expected value at the end, in the box that the agent has changed."""
    live: bool = False
    """True if the agent's processes go on while scripts run, for tasks about a service or about processes."""
    reward: RewardCall | None = None
    """A function that judges the answer alone, instead of the fields above."""

    @classmethod
    def read(cls, data: object, *, live: bool = False) -> Evaluation:
        """Read and check the `evaluation` of a task. *live* is the default of its key `live`.

        Raises:
            InvalidEvaluation: The shape is wrong, or a name in it is unknown.
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
        live = data.get("live", live)
        if not isinstance(live, bool):
            raise InvalidEvaluation(f"evaluation.live must be true or false, not {live!r}")
        return cls(match, checks, example, judge == "after", live)

    @property
    def needs_expected(self) -> bool:
        """True if the example must run before the agent's first action."""
        return not self.after and self.match is None and None in self.checks

    @property
    def compares_answer(self) -> bool:
        """True if a matcher or an example compares the answer with an expected value, so that it must be given."""
        return any(check is None or isinstance(check, Matcher) for check in self.checks)

    @property
    def scripts(self) -> list[Script]:
        """The scripts that run in the box after the agent's last action."""
        if self.match is not None or self.reward is not None:
            return []
        steps = (self.example if check is None and self.after else check for check in self.checks)
        return [step for step in steps if isinstance(step, Script)]


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
        """Create the judge of a session.

        Args:
            evaluation: The task's evaluation.
            sandbox: The session's sandbox.
            instruction: The agent's instruction.
            untouched: Opens another box in the state before the agent's first action.
        """
        self._evaluation = evaluation
        self._sandbox = sandbox
        self._instruction = instruction
        self._untouched = untouched
        self.programs: Programs | None = None
        """The box's programs before the agent's first action; None if none of them judges."""
        self.expected: str | None = None
        """The example's output; None until it is known, or if it is not needed before the end."""

    async def prepare(self) -> None:
        """Compute the expected value, in the box as the init scripts left it.

        Raises:
            JudgeFailed: The example failed.
        """
        if self._evaluation.needs_expected and self._evaluation.example is not None:
            done = await _run(self._sandbox, self._evaluation.example)
            if fault := self._example_fault(done):
                raise JudgeFailed(fault)
            assert not isinstance(done, str)
            self.expected = done.stdout.decode("utf-8", "replace")

    async def score(self, answer: str | None) -> float:
        """Return the score of *answer*, which is None for an episode without an answer: 0 to 1, where 1 is solved.

        An empty answer is no answer: it lies in every text, so a matcher would accept it.

        Raises:
            JudgeFailed: A script lacks a program, or the example or a reward function failed.
        """
        if (reward := self._evaluation.reward) is None:
            return await self.judge(answer)
        if answer is None or not answer.strip():
            return 0.0
        try:
            return await asyncio.to_thread(reward, answer)  # a pattern may take a second
        except RuntimeError as error:
            raise JudgeFailed(str(error)) from error

    async def judge(self, answer: str | None) -> bool:
        """Return True if *answer* solves a task without a reward function; it is None for an episode without an answer.

        Raises:
            JudgeFailed: A script lacks a program, or the example or a pattern failed.
        """
        if answer is not None and not answer.strip():
            answer = None
        if (match := self._evaluation.match) is not None:
            try:
                return answer is not None and await asyncio.to_thread(match, answer)  # a pattern may take a second
            except RuntimeError as error:
                raise JudgeFailed(str(error)) from error
        if answer is None and self._evaluation.compares_answer:
            return False
        if self._evaluation.scripts and not self._evaluation.live:
            await self._sandbox.freeze()
        if await self._has_changed_programs():
            return False
        parameters = [answer or ""]
        try:
            async with asyncio.timeout(JUDGE_TIMEOUT_S):
                for check in self._evaluation.checks:
                    # Without an answer a script gets no argument, which it cannot take for a text.
                    outcome = await self._step(check, parameters if answer or len(parameters) > 1 else [])
                    if outcome is None:
                        return False
                    parameters.append(outcome)
        except TimeoutError:
            return False  # an agent can make a script wait, for example by a pipe in a file's place
        return not await self._has_changed_programs()  # a process of the agent's may have waited for the scripts

    async def _has_changed_programs(self) -> bool:
        if self.programs is None:
            return False
        codes = [script.code for script in self._evaluation.scripts]
        return await self.programs.change(self._sandbox, codes) is not None

    async def _step(self, check: Check, parameters: Sequence[str]) -> str | None:
        """Run one check; return its output, or None if it fails."""
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
        """Run a script of the task; return its output, or None if it fails.

        A missing program is the author's mistake, unless the agent removed it or the instruction names it.
        """
        from envserver.sandbox import TELLING, missing_programs

        told = Script(TELLING + check.code) if check.language == "bash" else check
        done = await _run(self._sandbox, told, parameters, is_after=True)
        if isinstance(done, str):
            missing = [check.interpreter]
        elif done.timed_out:
            return None
        elif done.status == 0:
            return done.stdout.decode("utf-8", "replace")
        else:
            said = done.stderr.decode("utf-8", "replace")
            missing = [name for name in missing_programs(check.code, said) if not self._is_told(name)]
        await self._refuse_missing(missing)
        return None

    async def _refuse_missing(self, names: Sequence[str]) -> None:
        """Fail if an untouched box lacks a program of *names*.

        Raises:
            JudgeFailed: A box without an agent's actions lacks a program of *names*.
        """
        if not names or self._untouched is None:
            return
        from envserver.sandbox import lacks_program

        async with self._untouched() as box:
            for name in names:
                if await lacks_program(box, name):
                    raise JudgeFailed(f"a check needs {name}, which is not in the box")

    def _is_told(self, name: str) -> bool:
        """Return True if the instruction mentions a program *name*, so that the agent may have to make it."""
        return re.search(rf"(?<!\w){re.escape(name.rpartition('/')[2])}(?!\w)", self._instruction) is not None

    async def _example(self, parameters: Sequence[str]) -> str | None:
        """Return the expected value, or None if the agent made the example fail, which is a wrong answer.

        Raises:
            JudgeFailed: The example also fails in a box without an agent's actions.
        """
        if self.expected is not None:
            return self.expected
        example = self._evaluation.example
        assert example is not None  # `Evaluation.read` ensures it
        done = await _run(self._sandbox, example, parameters, is_after=True)
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
        """Return the reason why this run of the example gives no expected value, or an empty text."""
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
            return None  # missing, or not a plain file, by the agent's fault
        return data.decode("utf-8", "replace")


async def _run(
    sandbox: Sandbox, script: Script, arguments: Sequence[str] = (), *, is_after: bool = False
) -> Completed | str:
    """Run *script*, *is_after* the agent's actions; return a text with the reason if it does not start."""
    try:
        if is_after:
            return await _run_judged(sandbox, script, arguments)
        return await run_script(sandbox, script, arguments=arguments, timeout_s=SCRIPT_TIMEOUT_S)
    except Exception as error:
        if not is_refusal(error):
            raise
        return str(error)


async def _run_judged(sandbox: Sandbox, script: Script, arguments: Sequence[str]) -> Completed:
    """Run *script* with the priority of a judge.

    Raises:
        JudgeStarved: It did not end in time, because other sessions had the CPU.
    """
    from envserver.sandbox import Judged

    sandbox.judged = judged = Judged(SCRIPT_CPU_S)
    try:
        done = await run_check(sandbox, script, arguments=arguments, timeout_s=SCRIPT_TIMEOUT_S)
    finally:
        sandbox.judged = None
    if done.timed_out and judged.waited_s - judged.used_s > STARVED_SHARE * SCRIPT_TIMEOUT_S:
        raise JudgeStarved(f"other sessions kept a check from the CPU for {judged.waited_s:.0f} s")
    return done


def integer_match(answer: str, expected: str) -> bool:
    """Compare as numbers, in any usual notation; a text that is not a number never matches."""
    wanted = read_number(expected)
    return wanted is not None and read_number(answer) == wanted


def string_match(answer: str, expected: str) -> bool:
    """Compare as text, without surrounding white space and with one kind of line end."""
    return _unified(answer) == _unified(expected)


def _answer_match(answer: str, expected: str) -> bool:
    """Compare an answer as `string_match` does, with or without the marks around it."""
    return string_match(answer, expected) or string_match(unmarked(answer), expected)


def size_match(answer: str, expected: str) -> bool:
    """Compare sizes such as `5K`, `5120` or `5120B`, both in whole numbers."""
    sizes = size_bytes(unmarked(answer)), size_bytes(expected)
    return sizes[0] is not None and sizes[0] == sizes[1]


def size_bytes(text: str) -> int | None:
    """Return a size in bytes, or None; units are powers of 1024.

    Difference from AgentBench, which checks the suffix `B` first and so refuses `5KB`: here `5KB` is 5 KiB.
    """
    if (found := re.fullmatch(r"\s*(\d{1,30})\s*([KMGTP]?)(?:I?B|BYTES?)?\s*", text.upper())) is None:
        return None
    return int(found[1]) << 10 * " KMGTP".index(found[2] or " ")


MATCHERS: Mapping[str, Callable[[str, str], bool]] = {
    "integer-match": integer_match,
    "string-match": _answer_match,
    "size-match": size_match,
    "containing": lambda answer, expected: expected.strip() in answer,
    "in": lambda answer, expected: answer.strip() in expected,
}
"""The matchers by the names of AgentBench's scripts."""


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
    """Convert the generic form ``script`` into a ``check`` of one step."""
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
        return lambda text: answer in _forms(text, strip=strip)
    if isinstance(pattern, str):
        return _regex(pattern, strip=strip)
    raise InvalidEvaluation("evaluation.match must be a text, or an object with answer or regex")


def _regex(pattern: str, *, strip: bool) -> Callable[[str], bool]:
    from envserver.generic.patterns import compiled, matches

    try:
        found = compiled(pattern)
    except ValueError as error:
        raise InvalidEvaluation(f"evaluation.match.regex: {error}") from error
    return lambda text: any(matches(found, form) for form in _forms(text, strip=strip))


def _forms(text: str, *, strip: bool) -> tuple[str, ...]:
    """Return the texts for which an answer stands: also without the marks around it, unless each character counts."""
    return (text.strip(), unmarked(text)) if strip else (text,)
