"""Runs episodes of OpenEnv clients: reset, step, state and tool calls, over WebSockets, HTTP and JSON-RPC.

An episode is a session. The session's name is its attachment's and outlives its episodes. All errors that leave this
module are `FrameError`.

Differences from a stock server:
* No environment exists before the first reset or after a loss. A step is then refused, instead of run in an
  environment that was not reset.
* A step has a deadline (``step_s``). A late step ends its episode, because its effect is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Final, TypeVar

import anyio

from gateway.catalog.toml import RESET_KEYS
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.episode import Action, Block, StepResult
from gateway.core.errors import (
    GatewayError,
    SessionClosed,
    SessionNotFound,
    StoreUnavailable,
    UnknownTask,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.ports.tasks import TaskQueries
from gateway.core.session import CloseReason, EpisodeRequest, SessionSetup
from gateway.core.task_name import TaskName
from gateway.frontends.asgi import FrontendParts
from gateway.frontends.errors import name_limit, why_ended, why_not_opened
from gateway.frontends.openenv.frames import (
    Code,
    FrameError,
    Json,
    ListTools,
    ResetRequest,
    ToolCall,
    invalid,
    validated,
)
from gateway.frontends.openenv.replies import (
    NO_EPISODE,
    RESERVED,
    first_observation,
    listed,
    marks,
    read_tools,
    refusal,
    step_reply,
    tool_reply,
    unknown_tool,
)
from gateway.sessions.service import ActiveSession
from gateway.tasks.resolver import SHOWN_CHARS, TaskRequest, session_setup
from gateway.tasks.task_ref import TaskRef

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLEANUP_S: Final = 30.0
TEARDOWN_WAIT_S: Final = 2.0
"""Seconds that the end of an episode waits for the teardown. A longer teardown continues in the background."""


class Episodes:
    """Opens, serves and ends episodes."""

    def __init__(self, parts: FrontendParts) -> None:
        self._sessions = parts.sessions
        self._queries = parts.queries
        self._store = parts.store
        self._resolver = parts.resolver
        self._lifecycle = parts.lifecycle
        self._tools: dict[EnvironmentName, tuple[bytes, list[Json]]] = {}
        """Last tool listing of each environment, as bytes and parsed."""

    async def reset(self, owner: Owner, name: str, environment: Environment, reset: ResetRequest) -> Json:
        """Start an episode, which replaces the open episode of *name*, if any. Return its first observation.

        Raises:
            FrameError: The reset is invalid or not admitted: the open episode stays. A later failure leaves none open.
        """

        async def first(session: ActiveSession, within_s: float) -> list[Block]:
            return await session.prompt(within_s=within_s)

        chosen, blocks = await self.begin(owner, name, environment, reset, first)
        return first_observation(blocks, _shown_task(chosen))

    async def begin(
        self,
        owner: Owner,
        name: str,
        environment: Environment,
        reset: ResetRequest,
        first: Callable[[ActiveSession, float], Awaitable[T]],
    ) -> tuple[TaskRef, T]:
        """Start an episode. Return its task and the result of *first*, called with the session and the seconds left.

        Raises like `reset`.
        """
        if self._lifecycle.is_closing:
            message = "this replica accepts no new episodes: it is about to stop"
            raise FrameError(Code.SESSION_ERROR, message, status=503)
        deadline = asyncio.get_running_loop().time() + environment.openenv.reset_s
        async with self.refusing(environment, closes=False):
            task = task_request(environment, reset)
            chosen = await self._choose(patient(environment), reset, task)
        request = EpisodeRequest(
            owner=owner,
            name=name,
            environment=environment,
            setup=self._setup(environment, reset, task, chosen),
            fingerprint=uuid.uuid4().hex,
            protocol="openenv",
            episode=reset.episode_id if reset.episode_id is not None else str(uuid.uuid4()),
        )
        async with contextlib.AsyncExitStack() as stack:
            async with self.refusing(environment, closes=False):
                await stack.enter_async_context(self._resolver.admitted(environment, request.setup))
            return chosen, await self._begin(request, first, deadline)

    async def _begin(
        self, request: EpisodeRequest, first: Callable[[ActiveSession, float], Awaitable[T]], deadline: float
    ) -> T:
        limit_s = request.environment.openenv.reset_s
        async with self.refusing(request.environment):
            session = None
            try:
                session = await self._sessions.reset(replace(request, within_s=_left(deadline)))
                return await first(session, _left(deadline))
            except UpstreamError as error:
                if session is not None:
                    await self._lose(request.owner, request.name, why_not_opened(error))
                name_limit(error, "openenv.reset_s", limit_s)
                raise

    async def _choose(self, environment: Environment, reset: ResetRequest, task: TaskRequest) -> TaskRef:
        if not self._resolver.passes_place(environment, task):
            refuse_negative_index(reset)
        await refuse_unknown_keys(environment, reset, self._queries)
        return await self._resolver.resolve(environment, task)

    def _setup(self, environment: Environment, reset: ResetRequest, task: TaskRequest, chosen: TaskRef) -> SessionSetup:
        config = config_of(environment, reset)
        if self._resolver.passes_place(environment, task):
            place = {"split": reset.split, "index": reset.index}
            config = {**config, **{key: value for key, value in place.items() if value is not None}}
        return session_setup(
            environment, chosen, seed=reset.seed, config=config or None, episode=reset.episode_id or ""
        )

    async def step(self, owner: Owner, name: str, environment: Environment, data: Json) -> Json:
        """Run an action and return its observation.

        Raises:
            FrameError: The action was refused or failed, and the episode continues. Or the episode is over.
        """
        kind = data.get("type")
        if kind == "call_tool":
            call = validated(ToolCall, data)
            result = await self.call_tool(owner, name, environment, call.tool_name, call.arguments)
            return tool_reply(call.tool_name, result)
        if kind == "list_tools":
            validated(ListTools, data)
            return listed(await self.tools(environment))
        if data.get("metadata") == {}:  # the clients' base class adds it to actions without such a field
            data = {key: value for key, value in data.items() if key != "metadata"}
        return step_reply(await self._act(owner, name, environment, Action(fields=data)), data)

    async def call_tool(
        self, owner: Owner, name: str, environment: Environment, tool: str, arguments: Json
    ) -> StepResult:
        """Call a tool by its name. A name in `RESERVED` is a tool only where the environment lists one."""
        if tool in RESERVED and all(tool != known["name"] for known in await self.tools(environment)):
            return unknown_tool(tool)
        return await self._act(owner, name, environment, Action(name=tool, arguments=arguments))

    async def state(self, owner: Owner, name: str, environment: Environment) -> Json:
        """Return the state of the episode, or an empty state if there is no such session."""
        async with self.refusing(environment):
            try:
                active = await self._sessions.find(owner, name)
                steps = await active.steps(within_s=environment.openenv.step_s)
                shown = await active.client_state(within_s=environment.openenv.step_s)
            except SessionNotFound:
                return empty_state()
            session = active.session
            task_id = TaskName.of(session.task).label or None
            return {**shown, "episode_id": session.episode, "step_count": steps, "task_id": task_id}

    async def tools(self, environment: Environment) -> list[Json]:
        """Return name, description and input schema of each tool that an agent may call."""
        async with self.refusing(environment, closes=False):
            listing = await self._queries.tools(patient(environment))
            known = self._tools.get(environment.name)
            if known is None or known[0] is not listing:
                try:
                    # An image of OpenEnv without tools has the gateway's tool `step`, for clients of other protocols.
                    without = RESERVED if environment.wire is UpstreamKind.OPENENV else ()
                    known = self._tools[environment.name] = listing, read_tools(json.loads(listing), without=without)
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise UpstreamError(f"the worker's list of tools can't be read: {error}") from error
            return known[1]

    async def default_tool(self, environment: Environment) -> str | None:
        """Return the tool that gets actions without a tool name. None: the environment names no such tool."""
        if environment.wire is not UpstreamKind.OWN:
            return environment.actions.default_tool or None
        async with self.refusing(environment, closes=False):
            about = await self._queries.about(patient(environment))
        return about.get("default_tool")

    async def has(self, owner: Owner, name: str, environment: Environment, *, or_ended: bool = False) -> bool:
        """Return True if an episode is open under *name*. With *or_ended*, also if the gateway ended one.

        Raises:
            FrameError: The store does not answer.
        """
        async with self.refusing(environment, closes=False):
            try:
                await self._sessions.find(owner, name)
            except SessionNotFound:
                return False
            except SessionClosed:
                return or_ended
        return True

    async def end(self, owner: Owner, name: str) -> bool:
        """End the episode, even if the caller is cancelled. Return False without an episode, or if the store fails."""
        # Without the shield, a cancelled anyio scope would cancel each await of the cleanup again.
        with anyio.move_on_after(CLEANUP_S, shield=True):
            try:
                return await self._sessions.end(owner, name, CloseReason.DELETED, wait_s=TEARDOWN_WAIT_S)
            except StoreUnavailable:
                logger.warning("episode_not_ended name=%s", name)  # the session expires later
        return False

    async def _act(self, owner: Owner, name: str, environment: Environment, action: Action) -> StepResult:
        try:
            session = await self._sessions.find(owner, name)
            return await session.act(action, within_s=environment.openenv.step_s)
        except GatewayError as error:
            raise await self.failed(owner, name, environment, error) from error

    async def failed(self, owner: Owner, name: str, environment: Environment, error: GatewayError) -> FrameError:
        """Return the error for a client whose request failed with *error*. End the episode if a worker failed."""
        if isinstance(error, UpstreamTimeout):
            await self._lose(owner, name, CloseReason.TIMEOUT)
            message = (
                f"the step exceeded its deadline of {environment.openenv.step_s:g} s (openenv.step_s of its "
                "environment.toml): the episode has ended; send reset to go on"
            )
            return FrameError(Code.EXECUTION_ERROR, message, status=504, **marks(error))
        if isinstance(error, UpstreamError):
            logger.warning("openenv_failed environment=%s error=%s", environment.name, error.detail)
            await self._lose(owner, name, why_ended(error))
            refused = await refusal(error, environment, self._store)
            message = f"the episode has ended: {refused.message}; send reset to begin another one"
            return FrameError(Code.SESSION_ERROR, message, status=refused.status, **marks(error))
        if isinstance(error, SessionNotFound):
            return FrameError(Code.SESSION_ERROR, NO_EPISODE, status=404)
        return await refusal(error, environment, self._store)

    async def _lose(self, owner: Owner, name: str, reason: CloseReason) -> None:
        """End a failed episode, or one with a step of unknown effect. Later requests for it get *reason*."""
        with contextlib.suppress(StoreUnavailable):
            await self._sessions.end(owner, name, reason, wait_s=0)

    @contextlib.asynccontextmanager
    async def refusing(self, environment: Environment, *, closes: bool = True) -> AsyncIterator[None]:
        """Turn a ``GatewayError`` of the block into ``FrameError``. If *closes* is False, the socket stays open."""
        try:
            yield
        except GatewayError as error:
            refused = await refusal(error, environment, self._store)
            refused.closes = refused.closes and closes
            if isinstance(error, UnknownTask):
                logger.info("openenv_not_found environment=%s detail=%r", environment.name, error.detail)
            if refused.status >= 500:
                logger.warning("openenv_failed environment=%s error=%s", environment.name, error.detail)
            raise refused from error


def empty_state() -> Json:
    """Return the state before the first reset."""
    return {"episode_id": None, "step_count": 0}


def _left(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())


def patient(environment: Environment) -> Environment:
    """Return *environment* with ``open_s`` limited to ``reset_s``, so that no query to a worker outlasts a reset."""
    open_s = min(environment.timeouts.open_s, environment.openenv.reset_s)
    return replace(environment, timeouts=replace(environment.timeouts, open_s=open_s))


def _shown_task(task: TaskRef) -> Json:
    """Return the fields of a task that a trainer sees."""
    shown = {"task_id": task.name.label or None, "split": task.split or None, "index": task.index}
    return {name: value for name, value in shown.items() if value is not None}


def task_request(environment: Environment, reset: ResetRequest) -> TaskRequest:
    """Return the request for the task of *reset*.

    Raises:
        FrameError: The reset names its task twice.
    """
    keys = [key for key in environment.openenv.task_keys if reset.config.get(key) is not None]
    if keys and (reset.task is not None or reset.index is not None):
        twice = "task" if reset.task is not None else "index"
        entry = {"type": "value_error", "loc": ["data", keys[0]], "msg": f"{twice} is given too", "input": None}
        raise invalid([entry], f"Invalid message: data: only one of {twice} and {', '.join(keys)} may be given")
    return TaskRequest(
        spec=reset.task if isinstance(reset.task, dict) else None,
        ids=tuple(_spellings(environment, reset.task)) if isinstance(reset.task, str) else (),
        values={environment.openenv.task_keys[key]: reset.config[key] for key in keys},
        split=reset.split,
        index=reset.index,
        seed=reset.seed,
        usual_split=environment.openenv.split,
        may_pass_place=True,
        is_checked=True,
    )


def refuse_negative_index(reset: ResetRequest) -> None:
    """Raise ``FrameError`` for a negative index, which ORS counts from the end and OpenEnv does not define."""
    if reset.index is not None and reset.index < 0:
        message = "Input should be greater than or equal to 0"
        entry = {"type": "greater_than_equal", "loc": ["data", "index"], "msg": message, "input": reset.index}
        raise invalid([entry], f"Invalid message: data.index: {message}")


def config_of(environment: Environment, reset: ResetRequest) -> Json:
    """Return the fields of *reset* that the environment itself gets."""
    return {key: value for key, value in reset.config.items() if key not in environment.openenv.task_keys}


async def refuse_unknown_keys(environment: Environment, reset: ResetRequest, queries: TaskQueries) -> None:
    """Refuse reset keys that the environment would ignore.

    An OpenEnv image's own reset gets all keys, as from its own clients. Other servers report the keys that they accept.

    Raises:
        FrameError: The reset has such keys.
    """
    given = {key: value for key, value in config_of(environment, reset).items() if value is not None}
    if not given or environment.wire is UpstreamKind.OPENENV:
        return
    taken = (await queries.registered(environment)).config_keys
    unknown = [] if taken is None else [key for key in given if key not in taken]
    if taken is None or not unknown:
        return
    message = "Extra inputs are not permitted"
    entries = [
        {"type": "extra_forbidden", "loc": ["data", key], "msg": message, "input": given[key]} for key in unknown
    ]
    known = ", ".join((*RESET_KEYS, *environment.openenv.task_keys, *taken))
    names = ", ".join(repr(key[:SHOWN_CHARS]) for key in unknown)
    raise invalid(entries, f"Invalid message: data: reset of {environment.name!r} has no {names}; it takes {known}")


def _spellings(environment: Environment, id: str) -> Iterator[str]:
    """Yield *id*, and *id* without a leading environment name."""
    yield id
    prefix, slash, rest = id.partition("/")
    if slash and rest and prefix in (environment.name, *environment.env_types):
        yield rest
