"""Speaks ORS to standard servers: images of ``ors-sdk``, of ``openreward``, and other servers that follow the standard.

Differences from a plain client:
* The gateway chooses the session's id.
* The gateway sends a call once. After that it requests only the outcome, by the call's task id.
* The gateway waits for a session whose setup runs.
* The server's own description decides between the dialects of the two packages.

A standard server does not support seeds, and the gateway drops a trainer's seed. The task is complete without it, so
the same task is the same episode for every trainer. The gateway refuses other configuration of an episode, because the
server would silently ignore it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from gateway.core import sse
from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.episode import TOOL_ERROR, TOOL_FAILED, Action, Block, StepResult, Summary
from gateway.core.errors import (
    AuthorFault,
    GatewayError,
    InvalidRequest,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
    author_fault,
)
from gateway.core.ids import SessionId
from gateway.core.json_text import dump
from gateway.core.outcomes import is_without_reward
from gateway.core.ports.transport import Exchange, Headers, Transport, header
from gateway.core.ports.upstream import EpisodeResults
from gateway.core.session import Session, SessionSetup
from gateway.core.worker import Worker, WorkerSession, worker_of
from gateway.upstreams import ors_bodies as answers
from gateway.upstreams.action_mapping import Tool, tool_call, written_call
from gateway.upstreams.idempotency.calls import OnceOnlyCalls
from gateway.upstreams.idempotency.codec import EVENTS
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.idempotency.records import Records
from gateway.upstreams.ors.client import (
    Answer,
    OrsClient,
    Refused,
    path,
    read_blocks,
    read_result,
    refusal,
)
from gateway.upstreams.ors.dialects import (
    Flavours,
    reason_of,
    refuse_config,
    secret_hint,
    split_list,
    task_count,
    task_list,
    tool_list,
    wish_of,
)
from gateway.upstreams.ors.keepalive import Pulse
from gateway.upstreams.ors.streams import outcome
from gateway.upstreams.ors_bodies import read_object
from gateway.upstreams.ors_facade import (
    Frames,
    OrsFacade,
    Whole,
    not_offered,
    told,
)

READY_PAUSE_S: Final = 0.1
"""Seconds between two checks of a starting server."""
READY_ANSWER_S: Final = 5.0
"""Seconds that a server has to answer a check. A starting server may accept a connection and not answer."""
BUSY_ANSWER_S: Final = 2.0
"""Seconds that a server with a running call has to answer. A blocking tool may hold the server's only thread."""
PING_S: Final = 240.0
"""Seconds between pings of a session. A server ends a session after 900 s without a request, even during a call."""
SETTLE_S: Final = 5.0
"""Seconds that a call may outlive its session before the slot is no longer trusted."""
JUDGE_GRACE_S: Final = 2.0
"""Seconds before the stream of a judgement opens. A refusal by the server keeps its HTTP status until then."""
TOOLS_MAX: Final = 4096
"""Largest number of sessions whose tools are cached."""


class ThirdPartyOrsUpstream(OrsFacade):
    """Speaks ORS to standard servers over *transport*."""

    raises_by_event: ClassVar[bool] = True

    def __init__(
        self,
        transport: Transport,
        *,
        recorder: Recorder | None = None,
        results: EpisodeResults | None = None,
        ping_s: float = PING_S,
    ) -> None:
        super().__init__(recorder=recorder, results=results)
        self._link = OrsClient(transport)
        self._flavours = Flavours(self._link)
        self._scores: OnceOnlyCalls[sse.Event] = OnceOnlyCalls(None if recorder is None else Records(recorder, EVENTS))
        self._tools: OrderedDict[tuple[SessionId, str], Mapping[str, Any]] = OrderedDict()
        self._pulse = Pulse(self, every_s=ping_s)

    async def aclose(self) -> None:
        """Cancel pings and calls. Sessions stay open in their servers."""
        await self._pulse.aclose()
        await self.calls.aclose()
        await self._scores.aclose()

    # -- workers --------------------------------------------------------------------------------------------------

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return 0 when the server answers and serves the environment: the protocol does not report a capacity."""
        self._flavours.forget(worker.id, worker.address)
        while True:
            with contextlib.suppress(UpstreamGone, UpstreamTimeout):
                if await self._is_ready(worker, environment):
                    return 0
            await asyncio.sleep(READY_PAUSE_S)

    async def _is_ready(self, worker: Worker, environment: Environment) -> bool:
        place = worker.id, worker.address
        if target := environment.server.ready:
            answer = await self._link.ask(*place, target.encode(), silence_s=READY_ANSWER_S)
            if answer.status != 200:
                return False
        answer = await self._link.ask(*place, b"/health", silence_s=READY_ANSWER_S)
        if answer.status not in (200, 404, 405):  # the standard does not require /health
            return False
        (await self._flavours.of(*place)).named(environment)
        return True

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if the server answers. With *busy_counts*, a server that a running call blocks is alive too."""
        is_busy = busy_counts and bool(self.calls.busy(worker.id))
        silence_s = BUSY_ANSWER_S if is_busy else READY_ANSWER_S
        try:
            answer = await self._link.ask(worker.id, worker.address, b"/list_environments", silence_s=silence_s)
        except UpstreamTimeout:
            if is_busy:
                return
            raise
        if answer.status != 200:
            raise UpstreamError(f"worker {worker.id} answered {answer.status} to /list_environments")

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """Return the environment's tool list, with every key of the standard."""
        return dump(tool_list(await self._listed(worker, environment, "tools")))

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """Return the splits that the server lists."""
        return split_list(await self._listed(worker, environment, "splits"))

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """Return the number of tasks in a split."""
        return task_count(await self._listed(worker, environment, "num_tasks", {"split": split}))

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Return the tasks of a split from index *start* up to *stop*, exclusive.

        A server may have too many tasks to list all.
        """
        wish = {"split": split, "start": start, "stop": stop}
        return task_list(await self._listed(worker, environment, "task_range", wish))

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """Return the sessions in which this replica runs a call, because the server itself does not list its sessions.

        The call may belong to a trainer that disconnected.
        """
        return [
            WorkerSession(id=one.id, busy=True, steps=self.tallies.steps(one), idle_s=0.0)
            for one in self.calls.busy(worker.id)
        ]

    async def _listed(
        self, worker: Worker, environment: Environment, operation: str, wish: Mapping[str, Any] | None = None
    ) -> Any:
        name = (await self._flavours.of(worker.id, worker.address)).named(environment)
        return await self._link.listed(worker, name, operation, wish)

    # -- sessions -------------------------------------------------------------------------------------------------

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """Open the session under its lease. The handle is the server's name for the environment."""
        refuse_config(setup)
        flavour = await self._flavours.of(session.worker, session.address)
        name = flavour.named(environment)
        wish, headers = wish_of(setup, name, flavour)
        silence_s = environment.timeouts.setup_s
        create = partial(self._link.settled, session, b"/create", body=wish, headers=headers, silence_s=silence_s)
        answer = await create()
        if answer.status == 400 and answer.detail == "Session already exists":
            # The server still has an earlier episode of this name, which no trainer uses. It opened nothing new.
            await self._delete(session, environment)
            answer = await create()
        if answer.status == 200:
            self.tallies.begin(session)
            self._note(session, environment)
            return replace(session, handle=name)
        if answer.status in (404, 422):
            self._flavours.forget(session.worker, session.address)  # another server may have replaced this one
        if answer.status == 429:
            raise WorkerFull(answer.detail)
        raise refusal(answer)

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Close the session in its server, wait for its teardown, and return the summary over all replicas.

        A server does not end a call when its session ends. ``UpstreamError`` is raised if a call still runs after a few
        seconds (at most `SETTLE_S`).
        """
        self._pulse.forget(session)
        try:
            await self._delete(session, environment)
            is_idle = await self.calls.settle(session, within_s=min(SETTLE_S, environment.timeouts.close_s / 2))
            summary = await self.tallies.summary(session)
            if summary is not None and is_without_reward(summary):
                summary = replace(summary, is_judged=await self._judges(session, environment))
        finally:
            self._tools.pop((session.id, session.lease), None)
            self._scores.forget(session)
            self.forget(session)
        if not is_idle:
            raise UpstreamError("the session was closed, but a call still runs in it")
        return summary

    async def _judges(self, session: Session, environment: Environment) -> bool:
        """Return True if the environment judges groups of episodes, or if the server does not answer.

        If groups are judged, an episode without a reward of its own is not a fault.
        """
        try:
            listed = json.loads(await self.tools(worker_of(session), environment))
        except GatewayError:
            return True
        return listed["supports_score_group"] is True

    async def _delete(self, session: Session, environment: Environment) -> None:
        answer = await self._link.ask(
            session.worker,
            session.address,
            b"/delete",
            method=b"POST",
            headers=self._link.of(session),
            silence_s=environment.timeouts.close_s,
        )
        if answer.status != 200:
            raise UpstreamError(f"the worker answered {answer.status} to /delete: {answer.detail}")

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """Wait for the task's setup and return the prompt, the first observation of the agent."""
        return read_blocks((await self._told(session, environment, "prompt")).parsed("/prompt"))

    async def task_tools(self, session: Session, environment: Environment) -> bytes:
        """Return the session's tools, including those of its task."""
        return dump(await self._session_tools(session, environment))

    async def messages(self, session: Session, environment: Environment) -> bytes:
        """Return the first conversation with the agent: the prompt, if the server does not offer ``messages``."""
        flavour = await self._flavours.of(session.worker, session.address)
        if not flavour.offers("messages"):
            return await super().messages(session, environment)
        return (await self._told(session, environment, "messages")).body

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """Run *action*. If the stream breaks, request only the outcome again."""
        name, arguments = await self._meant(session, environment, action)
        wish = {"name": name, "input": arguments}
        try:
            end = await self._stream(session, environment, "call", wish)
        except Refused as error:
            raise refusal(error.answer) from error
        if end.name == "error":
            return StepResult(error=end.data, reason=TOOL_ERROR)
        result = read_result(end.data.encode())
        if result.error is not None and result.reason == TOOL_FAILED:
            return replace(result, reason=reason_of(result.error))
        return result

    async def score_group(
        self, session: Session, environment: Environment, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Judge a group of candidates once, if the server offers this operation."""
        flavour = await self._flavours.of(session.worker, session.address)
        wish = read_object(body, header(headers, b"content-type"))
        if not flavour.offers("score_group"):
            return not_offered(environment)
        if isinstance(task_id := wish.get("task_id"), str):
            begun = await self._scores.seek(session, task_id, within_s=environment.timeouts.call_s)
            return await told(self._scores, session, begun, headers, _scored)

        async def judge() -> sse.Event:
            return await self._stream(session, environment, "score_group", wish)

        call = self._scores.begin(session, wish, judge, within_s=environment.timeouts.call_s)
        try:
            return await told(self._scores, session, call, headers, _scored, grace_s=JUDGE_GRACE_S)
        except Refused as error:
            return Whole(error.answer.status, error.answer.body)

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _stream(
        self, session: Session, environment: Environment, operation: str, wish: Mapping[str, Any]
    ) -> sse.Event:
        target = await self._target(session, environment, operation)
        return await outcome(self._link, session, environment, target, wish)

    async def _told(self, session: Session, environment: Environment, operation: str) -> Answer:
        target = await self._target(session, environment, operation)
        answer = await self._link.settled(session, target, silence_s=environment.timeouts.call_s)
        if answer.status == 500:
            self.tallies.failed(session)
            await self.tallies.tell(session)
            raise author_fault(f"{answer.detail}{secret_hint(answer.detail)}", "reset")
        if answer.status != 200:
            raise UpstreamError(answer.detail)
        return answer

    async def _meant(self, session: Session, environment: Environment, action: Action) -> tuple[str, dict[str, Any]]:
        if action.name is not None:
            return action.name, dict(action.arguments)
        listed = await self._session_tools(session, environment)
        terminal = listed["terminal_tool"]
        tools = [Tool(tool["name"], tool["input_schema"]) for tool in listed["tools"]]
        if action.text is not None and not action.is_final and (call := written_call(action.text, tools)) is not None:
            return call
        if action.text is not None and isinstance(terminal, Mapping) and not environment.actions.default_tool:
            # A harness treats a text without a tool call as the final message.
            field = environment.actions.text_field or terminal.get("arg")
            return str(terminal["name"]), {str(field): action.text} if field else {}
        is_terminal = isinstance(terminal, Mapping) and terminal["name"] == environment.actions.default_tool
        if action.is_final and not is_terminal:
            raise InvalidRequest("a final text is no action here, because it goes to no terminal tool of the server")
        return tool_call(action, environment, tools)

    async def _session_tools(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        place = session.id, session.lease
        known = self._tools.get(place)
        if known is None:
            answer = await self._told(session, environment, "task_tools")
            known = self._tools[place] = tool_list(answer.parsed("/task_tools"))
            if len(self._tools) > TOOLS_MAX:
                self._tools.popitem(last=False)
        return known

    async def _target(self, session: Session, environment: Environment, operation: str) -> bytes:
        """Return the path of *operation*, and note that a request now names the session."""
        self._note(session, environment)
        name = session.handle or (await self._flavours.of(session.worker, session.address)).named(environment)
        return path(name, operation)

    def _note(self, session: Session, environment: Environment) -> None:
        self._pulse.note(session, keep_s=environment.timeouts.idle_s)

    def is_busy(self, session: Session) -> bool:
        """Return True if a call or a judgement runs in *session*; see ``PingedServers.is_busy``."""
        return bool(self.calls.running(session) or self._scores.running(session))

    async def ping(self, session: Session) -> bool:
        """Ping the server of *session*; see ``PingedServers.ping``."""
        place = session.worker, session.address
        answer = await self._link.ask(*place, b"/ping", method=b"POST", headers=self._link.of(session))
        return answer.status != 404


def _scored(event: sse.Event) -> Frames:
    if event.name == "error":
        typed = f"{AuthorFault.code}: {event.data}"
        return sse.event("error", typed), answers.refusal(event.data, AuthorFault.code)
    try:
        payload = dump(json.loads(event.data))
    except (ValueError, RecursionError) as error:
        raise UpstreamError("the worker's scores are not JSON") from error
    return sse.result(payload), payload
