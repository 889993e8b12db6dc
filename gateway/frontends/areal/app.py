"""Serves AReaL's Task Server API at ``/areal/{environment}/api/…``, and at ``/api/…`` for the default environment.

An episode is a session whose name is the episode's id. Its worker counts the turns, or else the store does. AReaL
clients open a connection for each request, accept only 200, and never retry. An error costs a client the trajectory,
often with its whole group. So a start waits for a slot rather than fails, and a refused action is an observation.

Differences from the published API:
* A start for which there is no capacity gets 503 with ``"status": "capacity"``. A missing or wrong key gets 401.
* A step that takes longer than the environment's ``step_s`` ends its episode, because its effect is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Final

import anyio
from starlette.types import Receive, Scope, Send

from gateway.catalog.catalog import Catalog
from gateway.core.environment import ActionType, Areal, Environment, ObservationType, SeedRule, UpstreamKind
from gateway.core.episode import EPISODE_FINISHED, TOOL_FAILED, Block, StepResult, TextBlock
from gateway.core.errors import (
    AuthorFault,
    GatewayError,
    InvalidRequest,
    SessionClosed,
    SessionError,
    SessionFailed,
    SessionNotFound,
    StoreUnavailable,
    UnknownTask,
    UpstreamError,
)
from gateway.core.faults import FaultKind
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.json_text import dump, parse
from gateway.core.session import CloseReason, EpisodeRequest, Group, SessionSetup
from gateway.core.worker import WorkerState
from gateway.frontends.areal.replies import (
    Json,
    error_reply,
    is_conversation,
    is_last_turn,
    shown_of,
    start_reply,
    stated_turns,
    step_reply,
)
from gateway.frontends.areal.requests import (
    Object,
    Start,
    read_action,
    read_episode_id,
    read_object,
    read_start,
    sample_request,
)
from gateway.frontends.asgi import (
    Attended,
    FrontendParts,
    HungUp,
    Refusal,
    catalog_of,
    group_of,
    header,
    policy_tag,
    read_body,
    respond_json,
)
from gateway.frontends.errors import LOSSES, WorkerDied, headers_of, name_limit, why_ended, why_not_opened
from gateway.sessions.last_replies import LastRequest
from gateway.sessions.service import ActiveSession
from gateway.tasks.resolver import session_setup
from gateway.tasks.task_ref import TaskRef, seed_of
from gateway.upstreams.action_mapping import Tool, instructions

logger = logging.getLogger(__name__)

TEARDOWN_WAIT_S: Final = 2.0
"""Seconds that the last reply waits for the teardown to free the slot. A longer teardown continues after the reply."""
CLEANUP_S: Final = 5.0
MAX_TOOLS_BYTES: Final = 4 * 2**20
AT_ONCE_MAX: Final = 8
"""Largest number of running and waiting steps of one episode. The known clients send one step at a time."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One request with its owner, environment and body."""

    scope: Scope
    receive: Receive
    owner: Owner
    environment: Environment
    raw: bytes
    """The body as it was sent."""
    body: Object


class ArealFrontend:
    """The Task Server API as an ASGI application."""

    def __init__(self, parts: FrontendParts) -> None:
        self._sessions = parts.sessions
        self._queries = parts.queries
        self._resolver = parts.resolver
        self._lookup = parts.resolver.lookup
        self._store = parts.store
        self._catalog = parts.catalog
        self._metrics = parts.metrics
        self._lifecycle = parts.lifecycle
        self._max_body_bytes = parts.max_body_bytes
        self._turns = StepLocks()
        self._shown: dict[EnvironmentName, Areal] = {}
        """Last known `shown_of` result of each environment."""
        self._routes: dict[tuple[str, ...], tuple[str, Callable[[_Request], Awaitable[Json]]]] = {
            ("task", "info"): ("GET", self._info),
            ("health",): ("GET", self._health),
            ("episode", "start"): ("POST", self._start),
            ("episode", "step"): ("POST", self._step),
            ("episode", "cancel"): ("POST", self._cancel),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request. Every response, also that of an error, has the API's format."""
        named: dict[str, str] = {}
        try:
            await respond_json(send, 200, await self._answer(scope, receive, named))
        except HungUp:
            pass
        except Refusal as refusal:
            if refusal.status == 404:
                logger.info("areal_not_found path=%r detail=%r", scope["path"][:200], str(refusal))
            await respond_json(send, refusal.status, refusal.body)
        except GatewayError as error:
            status, body = error_reply(error, named)
            if isinstance(error, UnknownTask):
                logger.info("areal_not_found path=%r detail=%r", scope["path"][:200], error.detail)
            if status >= 500:
                logger.warning("areal_failed path=%s status=%d error=%s", scope["path"], status, error.detail)
            await respond_json(send, status, body, headers_of(error))
        except Exception:  # the client gets a JSON body, and other episodes continue
            logger.exception("areal_broken path=%s", scope["path"])
            body = {"error": "internal error", **named, "detail": "a fault of the gateway", "status": "internal"}
            await respond_json(send, 500, body)

    async def _answer(self, scope: Scope, receive: Receive, named: dict[str, str]) -> Json:
        """Run the handler of the route. Store the requested episode's id in *named*, for error bodies."""
        environment, rest = self._place(scope["path"], catalog_of(scope, self._catalog))
        if rest not in self._routes:
            routes = ", ".join("/".join(route) for route in self._routes)
            raise Refusal(404, f"there are {routes}", more={"error": "no such route"})
        method, handler = self._routes[rest]
        if scope["method"] != method:
            raise Refusal(405, f"{'/'.join(rest)} takes {method}", more={"error": "method not allowed"})
        raw = b""
        body: Object = {}
        if method == "POST":
            raw = await read_body(scope, receive, self._max_body_bytes)
            body = read_object(raw)
            if isinstance(episode := body.get("episode_id"), str):
                named["episode_id"] = episode
        return await handler(_Request(scope, receive, scope["gateway.owner"], environment, raw, body))

    def _place(self, path: str, catalog: Catalog) -> tuple[Environment, tuple[str, ...]]:
        # Ignore empty segments: clients of this API follow no redirect, not even to remove a trailing slash.
        match [segment for segment in path.split("/") if segment]:
            case ["areal", name, "api", *rest]:
                environment = catalog.offered.get(name.lower())
                if environment is None:
                    raise Refusal(404, catalog.unknown(name).detail, more={"error": "unknown environment"})
                return environment, tuple(rest)
            case ["api", *rest]:
                return catalog.default, tuple(rest)
            case _:
                raise Refusal(
                    404, "episodes are at /areal/{environment}/api/… and /api/…", more={"error": "no such route"}
                )

    # -- the task and the server ----------------------------------------------------------------------------------

    async def _info(self, request: _Request) -> Json:
        environment = request.environment
        async with Attended(request.scope, request.receive):  # may query a worker for its description and task count
            shown, count = await shown_of(self._queries, environment), await self._count(environment)
            return self._described(environment, shown, count)
        raise HungUp

    def _described(self, environment: Environment, shown: Areal, count: int) -> Json:
        is_text = shown.observation_type in (ObservationType.TEXT, ObservationType.MESSAGES)
        return {
            "name": shown.name or environment.name,
            "num_samples": count,
            "max_episode_length": stated_turns(shown),
            "observation_type": "text" if is_text else shown.observation_type.value,
            "action_type": ActionType(shown.action_type).value,
            "description": shown.description or environment.description or environment.name,
        }

    async def _count(self, environment: Environment) -> int:
        await self._lookup.refresh()
        return await self._lookup.count(environment, await self._lookup.areal_split(environment))

    async def _health(self, request: _Request) -> Json:
        if self._lifecycle.is_draining:
            raise Refusal(503, "this replica accepts no new episodes: it is about to stop", more={"error": "draining"})
        load = (await self._store.load()).get(request.environment.name)
        workers = load.workers if load is not None else ()
        tally = self._metrics.tally(request.environment.name)
        return {
            "status": "healthy",
            "active_episodes": sum(entry.used for entry in workers),
            "task_name": request.environment.areal.name or request.environment.name,
            "starting": sum(entry.worker.state is WorkerState.STARTING for entry in workers),
            "queued": load.waiting if load is not None else 0,
            "boxes": len(workers),
            "expired": tally.expired,
            "leaked": tally.leaked,
        }

    # -- an episode -----------------------------------------------------------------------------------------------

    async def _start(self, request: _Request) -> Json:
        start = read_start(request.body)
        policy, group = policy_tag(request.scope), group_of(request.scope)
        episode = str(uuid.uuid4())
        async with Attended(request.scope, request.receive) as trainer:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + request.environment.areal.start_s
            environment = _patient(request.environment)
            task = await self._resolver.resolve(environment, sample_request(environment, start.sample))
            setup = _setup(environment, start, task, policy=policy, group=group)
            async with self._resolver.admitted(request.environment, setup):
                shown = await shown_of(self._queries, request.environment)
                try:
                    blocks = await self._opened(request, episode, task, setup, deadline)
                except UpstreamError as error:
                    name_limit(error, "areal.start_s", request.environment.areal.start_s)
                    raise
                if trainer.left:
                    await self._undo(request.owner, episode, CloseReason.OPEN_FAILED)
                    raise HungUp
            # The ``task/info`` of an AReaL server cannot announce messages, so the prompt decides.
            if request.environment.wire in (UpstreamKind.AREAL, UpstreamKind.NEMO) and is_conversation(blocks):
                shown = replace(shown, observation_type=ObservationType.MESSAGES)
            return start_reply(shown, episode, blocks, sample=start.as_sent, task=task.spec)
        raise HungUp

    async def _opened(
        self, request: _Request, episode: str, task: TaskRef, setup: SessionSetup, deadline: float
    ) -> list[Block]:
        """Open the session and return its prompt. End the session if this fails or the trainer disconnects."""
        loop = asyncio.get_running_loop()
        try:
            session = await self._sessions.open(
                EpisodeRequest(
                    owner=request.owner,
                    name=episode,
                    environment=request.environment,
                    setup=setup,
                    fingerprint=episode,
                    protocol="areal",
                    within_s=max(0.0, deadline - loop.time()),
                )
            )
        except InvalidRequest as error:
            if task.is_images and not task.split:  # only the image knows its samples
                raise UnknownTask(error.detail) from error
            # Otherwise the gateway supplied the task, so the sample itself is valid.
            raise UpstreamError(f"the environment rejected this sample: {error.detail}") from error
        except SessionError as error:
            raise _lost_at_start(error) from error
        try:
            blocks = await session.prompt(within_s=max(0.0, deadline - loop.time()))
            return [*blocks, *await _how_to_act(session)]
        except BaseException as error:  # includes the cancellation after the trainer disconnected
            await self._undo(request.owner, episode, why_not_opened(error))
            if isinstance(error, SessionError):
                raise _lost_at_start(error) from error
            raise

    async def _undo(self, owner: Owner, episode: str, reason: CloseReason) -> None:
        # Without the shield, a cancelled anyio scope would cancel each await of the cleanup again.
        with anyio.move_on_after(CLEANUP_S, shield=True), contextlib.suppress(StoreUnavailable):
            await self._sessions.end(owner, episode, reason, wait_s=TEARDOWN_WAIT_S)

    async def _step(self, request: _Request) -> Json:
        episode, action = read_episode_id(request.body), read_action(request.body)
        owner, shown = request.owner, await self._shown_in_step(request.environment)
        key = header(request.scope, b"idempotency-key") or ""
        last = LastRequest(key, request.raw)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + shown.step_s
        async with self._turns.one(owner, episode, within_s=shown.step_s):
            try:
                session = await self._find(request, episode)
            except (SessionNotFound, SessionClosed):
                if (kept := await self._sessions.repeated(owner, episode, last)) is None:
                    raise
                repeated: Json = json.loads(kept)
                return repeated
            played = None
            async with Attended(request.scope, request.receive):
                try:
                    left_s = max(0.0, deadline - loop.time())
                    played = await session.play(action, within_s=left_s, key=key)
                    _refuse_fault_at_the_end(shown, *played)
                except UpstreamError as error:
                    await self._lose(owner, episode, why_ended(error))
                    name_limit(error, "areal.step_s", shown.step_s)
                    raise
                except SessionClosed as error:
                    if error.reason not in LOSSES:
                        raise
                    message = "the worker died during this step; the episode is lost"
                    raise WorkerDied(message, reason=error.reason) from error
            if played is None:
                raise HungUp
            result, turn = played
            if result.reason == EPISODE_FINISHED:  # an earlier step ended it, but its reply or its end was lost
                await self._sessions.end(owner, episode, CloseReason.DELETED, wait_s=TEARDOWN_WAIT_S)
                raise SessionNotFound(episode)
            reply = step_reply(shown, episode, action, result, turn)
            if reply["done"]:
                await self._sessions.finish(owner, episode, dump(reply), request=last, wait_s=TEARDOWN_WAIT_S)
            return reply

    async def _shown_in_step(self, environment: Environment) -> Areal:
        """Return the environment's `Areal` settings, or the last known settings if its server does not answer."""
        with contextlib.suppress(GatewayError):
            self._shown[environment.name] = await shown_of(self._queries, environment)
        return self._shown.get(environment.name, environment.areal)

    async def _lose(self, owner: Owner, episode: str, reason: CloseReason) -> None:
        """End a failed episode, or one with a step of unknown effect. Later requests for it get *reason*."""
        with contextlib.suppress(StoreUnavailable):
            await self._sessions.end(owner, episode, reason, wait_s=0)

    async def _cancel(self, request: _Request) -> Json:
        episode = read_episode_id(request.body)
        await self._find(request, episode)
        if not await self._sessions.end(request.owner, episode, CloseReason.CANCELLED, wait_s=TEARDOWN_WAIT_S):
            raise SessionNotFound(episode)
        return {"status": "cancelled", "episode_id": episode}

    async def _find(self, request: _Request, episode: str) -> ActiveSession:
        """Return the session of *episode*.

        Raises:
            SessionNotFound, SessionClosed: The request's environment has no such open episode.
        """
        session = await self._sessions.find(request.owner, episode)
        if session.environment.name != request.environment.name:
            raise SessionNotFound(episode)
        return session


def _refuse_fault_at_the_end(shown: Areal, result: StepResult, turn: int) -> None:
    """Refuse an episode whose last allowed turn failed in the environment: its reward would blame the agent.

    Raises:
        AuthorFault: The environment author's code failed in the last turn.
        SessionFailed: The infrastructure failed in the last turn.
    """
    if result.reason != TOOL_FAILED or not is_last_turn(shown, turn):
        return
    is_lost = any(fault.kind is FaultKind.INFRASTRUCTURE for fault in result.faults)
    failed = SessionFailed if is_lost else AuthorFault
    raise failed(f"the last turn failed in the environment, so the episode has no reward: {result.error}")


async def _how_to_act(session: ActiveSession) -> list[Block]:
    """Return the tools of a third-party server for an agent that acts by texts. Our own prompts say how to act."""
    if session.environment.wire not in (UpstreamKind.ORS, UpstreamKind.OPENENV, UpstreamKind.NEMO):
        return []
    answer = await session.forward("task_tools", body=b"", headers=[])
    try:
        listed = parse(await answer.read(MAX_TOOLS_BYTES)) if answer.status == 200 else {"tools": []}
    finally:
        await answer.aclose()
    tools = [Tool(one["name"], one["input_schema"], one["description"]) for one in listed["tools"]]
    terminal = (listed.get("terminal_tool") or {}).get("name", "")
    told = instructions(tools, session.environment, terminal=terminal)
    return [TextBlock(f"\n{told}")] if told else []


def _lost_at_start(error: SessionError) -> WorkerDied:
    reason = error.reason if isinstance(error, SessionClosed) else ""
    message = f"the worker was lost while the episode began: {error.detail}"
    return WorkerDied(message, reason=reason if reason in LOSSES else CloseReason.WORKER_LOST.value)


def _setup(environment: Environment, start: Start, task: TaskRef, *, policy: str, group: Group | None) -> SessionSetup:
    seed = start.seed
    if seed is None and environment.seed_rule is SeedRule.DRAWN:
        seed = seed_of(start.sample)
    return session_setup(environment, task, seed=seed, config=dict(start.config) or None, policy=policy, group=group)


def _patient(environment: Environment) -> Environment:
    """Return *environment* with ``open_s`` limited to ``start_s``, so that no query to a worker outlasts the start."""
    open_s = min(environment.timeouts.open_s, environment.areal.start_s)
    return replace(environment, timeouts=replace(environment.timeouts, open_s=open_s))


@dataclass(slots=True)
class _Place:
    """Lock of one episode, and the number of its running and waiting steps."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    steps: int = 0


class StepLocks:
    """Runs the steps of each episode one after another in this replica."""

    def __init__(self) -> None:
        self._places: dict[tuple[Owner, str], _Place] = {}

    @contextlib.asynccontextmanager
    async def one(self, owner: Owner, episode: str, *, within_s: float) -> AsyncIterator[None]:
        """Run the block as the only step of *episode*. Wait at most *within_s* seconds for earlier steps.

        Raises:
            InvalidRequest: Too many steps wait, or earlier steps took too long. The block did not run.
        """
        place = self._places.setdefault((owner, episode), _Place())
        if place.steps >= AT_ONCE_MAX:
            raise InvalidRequest(f"{place.steps} steps of this episode run or wait already")
        place.steps += 1
        try:
            try:
                async with asyncio.timeout(within_s):
                    await place.lock.acquire()
            except TimeoutError:
                raise InvalidRequest("another step of this episode runs") from None
            try:
                yield
            finally:
                place.lock.release()
        finally:
            place.steps -= 1
            if not place.steps:
                del self._places[owner, episode]
