"""Calls: admitted once, run in turn, with their outcomes kept.

A call belongs to its session and outlives its request. It runs at most once. A client can repeat it by task id, by
idempotency key, or by sending it again after its stream was cut. The client then gets the outcome of the first run.
"""

import asyncio
import inspect
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

from envserver.content import GroupCandidate, GroupScore, ToolCall
from envserver.environment import STEP_ENDS_AT, Environment
from envserver.errors import (
    EnvServerError,
    InvalidInput,
    Refused,
    SessionFailed,
    ToolError,
    Unexpected,
    WrongReward,
    describe,
    line_of,
    message_of,
    spoken,
)
from envserver.execution.runner import Runner
from envserver.http.bodies import Action, CallBody
from envserver.http.json_text import canonical, encode
from envserver.sessions.outcomes import Ending, Outcome, Outcomes, Turn, failed, refusal
from envserver.sessions.session import Call, Session, deleted
from envserver.tools import Mode, Ran, Tool

logger = logging.getLogger("envserver")
WAITING_MAX = 256
"""Maximum number of waiting calls in a session."""
TOOL_ERROR = "tool_error"
"""The reason of a result whose tool raised an error that belongs to the episode."""
CUT_MAX = 64
"""Maximum number of cut calls that a session remembers."""


class Calls:
    """The calls of a server. Used from the server's thread only."""

    def __init__(
        self, *, runner: Runner, outcomes: Outcomes, clock: Callable[[], float], unexpected: Unexpected
    ) -> None:
        self._runner = runner
        self._unexpected = unexpected
        self._outcomes = outcomes
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    # -- admission

    def admit(self, session: Session, body: CallBody, *, key: str | None, ends_at: float = math.inf) -> Call | None:
        """Return the existing call for *body*, or start a new call. Return None for an unknown task id.

        A failed session still returns known outcomes, but starts no new call. *ends_at*: see `Call`.

        Raises:
            Refused: 409: The key belongs to another body, or its outcome was dropped. 429: Too many calls wait. 410:
                The session was deleted. 500: The session has failed.
        """
        if body.task_id is not None:
            found = self._resume(session, body.task_id)
            if found is None:
                session.check()
            return found
        task_id = os.urandom(16).hex()
        if key is not None:
            known = self._outcomes.claim(session.serial, key, _digest(body.action), task_id)
            if known is not None:
                live = session.calls.get(known.task_id)
                return live or _ended(session, known.task_id, known.outcome, known.turn, key=key)
        elif session.cut and (same := self._same(session, body.action)) is not None:
            return same
        try:
            session.check()
            if len(session.turns.waiting) >= WAITING_MAX:
                raise Refused(429, "too many calls wait in this session", {"Retry-After": "1"})
        except Refused:
            if key is not None:
                self._outcomes.abandon(session.serial, key)
            raise
        call = Call(session, body.action, task_id, key, ends_at=ends_at)
        session.calls[task_id] = call
        session.turns.waiting.append(call)
        if session.state == "ready":
            call.mode = self._mode(call)
            self._advance(session)
        return call

    def detach(self, call: Call, *, delivered: bool) -> None:
        """Record that a listening request got the whole outcome, or disconnected without it.

        A call without listeners that has not started is withdrawn and never runs.
        """
        call.listeners -= 1
        session = call.session
        if delivered:
            call.was_delivered = True
            session.cut.pop(call.task_id, None)
        elif not call.listeners and not call.was_delivered and call.refusal is None:
            if call.state == "waiting":
                self._withdraw(call)
            else:
                session.cut[call.task_id] = _digest(call.action)
                if len(session.cut) > CUT_MAX:
                    del session.cut[next(iter(session.cut))]

    def _resume(self, session: Session, task_id: str) -> Call | None:
        if (live := session.calls.get(task_id)) is not None:
            return live
        kept = self._outcomes.find(session.serial, task_id)
        return None if kept is None else _ended(session, task_id, *kept)

    def _same(self, session: Session, action: Action) -> Call | None:
        """Return a call with the same action whose outcome reached no client."""
        wanted = _digest(action)
        for task_id in [task_id for task_id, digest in session.cut.items() if digest == wanted]:
            call = self._resume(session, task_id)
            if call is None:  # its outcome is no longer kept
                del session.cut[task_id]
            elif not call.listeners:
                return call
        return None

    # -- order

    def settle(self, session: Session) -> None:
        """Continue the calls that waited for *session*'s setup: start them in turn, or refuse them."""
        if session.state == "ready":
            for call in session.turns.waiting:
                call.mode = self._mode(call)
            self._advance(session)
            return
        for call in session.turns.drain():
            self._refuse(call, session.refusal() if session.state == "failed" else deleted())
        if session.state == "closed":
            self._outcomes.forget(session.serial)

    def abort(self, session: Session, text: str) -> None:
        """End the running calls of *session* with an error. Their code may continue, but its result is ignored."""
        for call in list(session.calls.values()):
            # This must not look like a tool's outcome.
            self._finish(call, failed(text, ending="session_failed"))

    def _advance(self, session: Session) -> None:
        # If a call ends immediately, the loop below starts the next call without recursion. `settle` continues after a
        # setup.
        if session.is_advancing or session.state != "ready":
            return
        session.is_advancing = True
        try:
            while (call := session.turns.next()) is not None:
                self._begin(call)
        finally:
            session.is_advancing = False

    def _mode(self, call: Call) -> Mode:
        session, action = call.session, call.action
        if action.spelling == "score":
            return "concurrent"
        if action.spelling == "text" and session.kind.parses_text:
            # The tool is known only after parsing, so use the strictest mode among the possible tools.
            tools = (*session.kind.tools.values(), *session.task_tools.values())
            return "exclusive" if any(tool.mode == "exclusive" for tool in tools) else "serial"
        tool = self._tool(session, self._name(session, action))
        return tool.mode if isinstance(tool, Tool) else "serial"

    def _withdraw(self, call: Call) -> None:
        call.session.turns.leave(call)
        self._refuse(call, deleted())
        self._advance(call.session)

    def _refuse(self, call: Call, refusal: Refused) -> None:
        call.session.calls.pop(call.task_id, None)
        if call.key is not None:
            self._outcomes.abandon(call.session.serial, call.key)
        call.end(None, refusal)

    # -- running

    def _begin(self, call: Call) -> None:
        call.state = "running"
        STEP_ENDS_AT.set(call.ends_at)  # the code that runs from here on has a copy of this context
        session, action = call.session, call.action
        if action.spelling == "score":
            self._spawn(self._score(call))
        elif action.spelling == "text" and session.kind.parses_text:
            self._spawn(self._parse_and_run(call))
        else:
            self._dispatch(call, self._name(session, action), self._given(session, action))

    def _dispatch(self, call: Call, name: str | None, given: dict[str, Any] | str) -> None:
        """Run the tool *name* with *given*. If *given* is a text, it states why the tool cannot run."""
        session = call.session
        tool = self._tool(session, name)
        if isinstance(tool, str):
            known = name in session.task_tools
            self._finish(call, refusal("name_collision" if known else "not_found", tool))
            return
        if session.finished:
            self._finish(call, _not_run(tool.name))
            return
        if isinstance(given, str):
            self._finish(call, refusal("input_validation", given))
            return
        try:
            # ORS ignores unknown arguments. A client that sends a gym's object gets an error for an unknown field.
            arguments = tool.arguments(given, strict=call.action.spelling == "action")
        except InvalidInput as error:
            self._finish(call, refusal("input_validation", str(error)))
            return
        if tool.inline and not tool.is_async:
            self._run_inline(call, tool, arguments)
        else:
            self._spawn(self._run(call, tool, arguments))

    def _run_inline(self, call: Call, tool: Tool, arguments: dict[str, Any]) -> None:
        session = call.session
        try:
            outcome = self._returned(call, tool, tool.run(session.environment, arguments))
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the author's code: its failure is an outcome
            outcome = self._raised(call, f"tool:{tool.name}", error)
            session.steps += 1
        self._finish(call, outcome)

    async def _run(self, call: Call, tool: Tool, arguments: dict[str, Any]) -> None:
        session = call.session
        try:
            if tool.inline:
                ran = await tool.run_async(session.environment, arguments)
            else:
                step = tool.run_async if tool.is_async else tool.run
                ran = await self._runner.run(session.place, step, session.environment, arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the author's code: its failure is an outcome
            outcome = self._raised(call, f"tool:{tool.name}", error)
            session.steps += 1
        else:
            outcome = self._returned(call, tool, ran)
        self._finish(call, outcome)

    async def _parse_and_run(self, call: Call) -> None:
        session = call.session
        assert session.environment is not None
        try:
            parsed = await self._runner.run(session.place, session.environment.parse_text, call.action.given)
            if not isinstance(parsed, ToolCall | str):
                raise TypeError(f"parse_text returned {type(parsed).__name__}; expected ToolCall or str")
        except Exception as error:  # noqa: BLE001  # the author's code: its failure is an outcome
            self._finish(call, self._raised(call, "parse_text", error))
            return
        if isinstance(parsed, str):
            self._finish(call, refusal("input_validation", parsed))
        else:
            self._dispatch(call, parsed.name, dict(parsed.input))

    async def _score(self, call: Call) -> None:
        session = call.session
        judge = session.environment
        assert judge is not None
        judging = _judge_async if inspect.iscoroutinefunction(judge.score_group) else _judge
        try:
            outcome: Outcome = ("result", await self._runner.run(session.place, judging, judge, call.action.given))
        except Exception as error:  # noqa: BLE001  # the author's code: its failure is an outcome
            outcome = self._judge_raised(call, error)
        self._finish(call, outcome)

    def _returned(self, call: Call, tool: Tool, ran: Ran) -> Outcome:
        session = call.session
        payload, reward, finished = ran
        session.steps += 1
        if session.state == "failed":  # a parallel call found the session broken: ignore this result
            return failed(session.failure, ending=self._ending(session))
        if session.finished:  # a parallel call ended the episode first: one grade, not two
            return _not_run(tool.name)
        if reward is not None and not math.isfinite(reward):
            wrong = f"{tool.name!r} returned the reward {reward}; a reward is a finite number"
            return self._raised(call, "reward", WrongReward(wrong))
        if not math.isfinite(session.reward + (reward or 0.0)):
            wrong = f"{tool.name!r} returned the reward {reward}; the sum of the episode's rewards is no finite number"
            return self._raised(call, "reward", WrongReward(wrong))
        session.finished = finished
        session.reward += reward or 0.0
        session.is_rewarded = session.is_rewarded or reward is not None
        return "result", payload

    def _raised(self, call: Call, place: str, error: BaseException) -> Outcome:
        """Record an exception of the author's code in the hook *place*, and return it as the outcome of *call*."""
        session, name = call.session, call.session.kind.name
        if isinstance(error, ToolError):
            return refusal(TOOL_ERROR, message_of(error))
        text = spoken(error, secrets=(session.create.secrets or {}).values())
        is_expected = self._unexpected == "agent" and not isinstance(error, EnvServerError)
        if is_expected or not (isinstance(error, SessionFailed) or self._unexpected == "fail"):
            logger.warning("tool_raised environment=%s place=%s error=%s", name, place, type(error).__name__)
            logger.debug("tool_traceback", exc_info=error)
            if is_expected:
                return refusal(TOOL_ERROR, text)
            self._note(session, error, place)
            if not session.unexpected:
                line = line_of(error)
                session.unexpected = f"{text} ({line})" if line else text
            return failed(text)
        self._note(session, error, place)
        logger.warning("session_failed environment=%s place=%s", name, place)
        logger.debug("session_traceback", exc_info=error)
        if session.state == "ready":  # and not deleted meanwhile
            session.failure = describe(error)
            session.settle("failed")
            self.settle(session)
        text = message_of(error) if isinstance(error, EnvServerError) else text
        return failed(text, ending=self._ending(session))

    def _judge_raised(self, call: Call, error: Exception) -> Outcome:
        """Record an exception of ``score_group``. A judge is not a tool: no agent can repair it."""
        session, place = call.session, "score_group"
        if isinstance(error, SessionFailed):
            return self._raised(call, place, error)
        self._note(session, error, place)
        logger.warning("tool_raised environment=%s place=%s error=%s", session.kind.name, place, type(error).__name__)
        logger.debug("tool_traceback", exc_info=error)
        text = spoken(error, secrets=(session.create.secrets or {}).values())
        return failed(text, ending=self._ending(session))

    @staticmethod
    def _note(session: Session, error: BaseException, place: str) -> None:
        if session.state != "failed":  # else a parallel call has already recorded the reason
            session.note_fault(error, "reward" if isinstance(error, WrongReward) else place)

    @staticmethod
    def _ending(session: Session) -> Ending:
        is_authors = session.fault is not None and session.fault.kind == "author"
        return "author_fault" if is_authors else "session_failed"

    def _finish(self, call: Call, outcome: Outcome) -> None:
        if call.state == "ended":  # aborted meanwhile
            return
        session = call.session
        # Neither a call that broke the session nor a judgement is a turn. A call is one even if its client has left.
        if outcome[0] in ("result", "tool_failed") and call.action.spelling != "score":
            session.turns_taken += 1
            call.turn = session.turns_taken
        call.end(outcome)
        session.calls.pop(call.task_id, None)
        self._outcomes.keep(session.serial, call.task_id, outcome, call.turn)
        if call.key is not None:
            self._outcomes.hold(session.serial, call.key, outcome, call.turn)
        if outcome[0] == "result" and session.state == "ready":
            session.fault = None  # the episode continued
        session.turns.leave(call)
        session.used_at = self._clock()
        if session.is_over:
            self._runner.leave(session.place)
        self._advance(session)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # -- from an action to a tool

    def _tool(self, session: Session, name: str | None) -> Tool | str:
        """Return the tool *name*, or the reason why it cannot be called."""
        if name is None:
            names = ", ".join(sorted({**session.kind.tools, **session.task_tools}))
            return f"this environment has no default tool; call one by its name, with its arguments: {names}"
        own, further = session.kind.tools.get(name), session.task_tools.get(name)
        if own is not None and further is not None:
            return (
                f"Tool name collision: '{name}' is defined in both the environment and the task's tools. "
                f"Please rename one of them to avoid conflicts."
            )
        return own or further or f"{name!r} is not a valid tool"

    def _name(self, session: Session, action: Action) -> str | None:
        if action.spelling == "name":
            return action.name
        return session.kind.default_tool.name if session.kind.default_tool else None

    def _given(self, session: Session, action: Action) -> dict[str, Any] | str:
        if action.spelling != "text":
            given: dict[str, Any] = action.given
            return given
        tool = session.kind.default_tool
        read = tool.input_of(action.given) if tool is not None else None
        return read if read is not None else "free text is not understood here; call a tool by its name"


def _digest(action: Action) -> int:
    # Python's own text hash has a random key per process, so that no client can construct a collision.
    return hash(canonical(action))


def _ended(session: Session, task_id: str, outcome: Outcome | None, turn: Turn, *, key: str | None = None) -> Call:
    call = Call(session, Action("name", "", None), task_id, key, turn=turn)
    call.end(outcome)
    call.was_delivered = True  # only requested again: if this stream is cut as well, there is no call to attach to
    return call


def _not_run(name: str) -> Outcome:
    return refusal(
        "episode_finished",
        f"{name!r} was not run: the episode has finished (a tool returned finished=True), "
        f"so no further tool calls are accepted.",
    )


def _judge(environment: Environment, candidates: Sequence[GroupCandidate]) -> bytes:
    return _scores(environment.score_group(candidates), len(candidates))


async def _judge_async(environment: Environment, candidates: Sequence[GroupCandidate]) -> bytes:
    judged: Any = environment.score_group(candidates)
    return _scores(await judged, len(candidates))


def _scores(judged: Any, count: int) -> bytes:
    scores = [score if isinstance(score, GroupScore) else GroupScore(float(score)) for score in judged]
    if len(scores) != count:
        raise ValueError(f"score_group returned {len(scores)} scores for {count} candidates")
    for score in scores:
        if not math.isfinite(score.reward):
            raise ValueError(f"score_group returned the score {score.reward}; a score is a finite number")
    return encode({"scores": [score.wire() for score in scores]})
