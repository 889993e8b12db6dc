"""Episodes of OpenEnv's clients: reset, step, state and tool calls, whatever they came over.

An episode is a session; its name is the attachment's, and outlives its episodes. All errors leave here as `FrameError`.

Differences from a stock server:
* An environment is not there before its first reset: a step then is refused, and never answered by one that nobody
  reset. After an episode was lost it is the same.
* A step has a deadline (``step_s``); one that is late ends its episode, as nobody can know any more what it did.
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
    UpstreamError,
    UpstreamTimeout,
)
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.ports.store import WorkerStore
from gateway.core.ports.tasks import TaskQueries
from gateway.core.session import CloseReason, SessionSetup
from gateway.frontends.errors import why_ended, why_not_opened
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
from gateway.server import Lifecycle
from gateway.sessions.opening import EpisodeRequest
from gateway.sessions.service import ActiveSession, Sessions
from gateway.sessions.worker_queries import WorkerQueries
from gateway.tasks.resolver import SHOWN_CHARS, TaskRequest, TaskResolver, session_setup
from gateway.tasks.task_ref import TaskRef

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLEANUP_S: Final = 30.0
TEARDOWN_WAIT_S: Final = 2.0
"""An end that somebody waits for waits this long for the teardown; the rest of it goes on."""


class Episodes:
    """Opens, serves and ends episodes."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        queries: WorkerQueries,
        store: WorkerStore,
        resolver: TaskResolver,
        lifecycle: Lifecycle,
    ) -> None:
        self._sessions = sessions
        self._queries = queries
        self._store = store
        self._resolver = resolver
        self._lifecycle = lifecycle
        self._tools: dict[EnvironmentName, tuple[bytes, list[Json]]] = {}
        """The last listing of each environment, and what it was read as."""

    async def reset(self, owner: Owner, name: str, environment: Environment, reset: ResetRequest) -> Json:
        """Begin an episode in the place of the one that is open under *name*, if any; answers its first observation.

        Raises:
            FrameError: What is wrong with *reset* leaves the open episode as it was; any other failure leaves none.
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
        """Begin an episode; answers its task and what *first* found of it, which gets the session and its seconds.

        Raises as `reset`.
        """
        if self._lifecycle.is_closing:
            message = "this replica takes no new episodes: it is about to stop"
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
            task=chosen.label,
            episode=reset.episode_id if reset.episode_id is not None else str(uuid.uuid4()),
        )
        async with contextlib.AsyncExitStack() as stack:
            async with self.refusing(environment, closes=False):
                await stack.enter_async_context(self._resolver.admitted(environment, request.setup))
            return chosen, await self._begin(request, first, deadline)

    async def _begin(
        self, request: EpisodeRequest, first: Callable[[ActiveSession, float], Awaitable[T]], deadline: float
    ) -> T:
        async with self.refusing(request.environment):
            session = await self._sessions.reset(replace(request, within_s=_left(deadline)))
            try:
                return await first(session, _left(deadline))
            except UpstreamError as error:
                await self._lose(request.owner, request.name, why_not_opened(error))
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
        """Act; answers what is observed.

        Raises:
            FrameError: the action is refused or failed, and the episode goes on; or the episode is over.
        """
        kind = data.get("type")
        if kind == "call_tool":
            call = validated(ToolCall, data)
            result = await self.call_tool(owner, name, environment, call.tool_name, call.arguments)
            return tool_reply(call.tool_name, result)
        if kind == "list_tools":
            validated(ListTools, data)
            return listed(await self.tools(environment))
        if data.get("metadata") == {}:  # of the clients' base class for actions, and no field of this one
            data = {key: value for key, value in data.items() if key != "metadata"}
        return step_reply(await self._act(owner, name, environment, Action(fields=data)), data)

    async def call_tool(
        self, owner: Owner, name: str, environment: Environment, tool: str, arguments: Json
    ) -> StepResult:
        """Call a tool by its name; what runs the episode is none, whatever an environment calls its tools."""
        if tool in RESERVED:
            return unknown_tool(tool)
        return await self._act(owner, name, environment, Action(name=tool, arguments=arguments))

    async def state(self, owner: Owner, name: str, environment: Environment) -> Json:
        """The state of the episode; an empty one where none was ever begun."""
        async with self.refusing(environment):
            try:
                active = await self._sessions.find(owner, name)
                steps = await active.steps(within_s=environment.openenv.step_s)
                shown = await active.client_state(within_s=environment.openenv.step_s)
            except SessionNotFound:
                return empty_state()
            session = active.session
            return {**shown, "episode_id": session.episode, "step_count": steps, "task_id": session.task or None}

    async def tools(self, environment: Environment) -> list[Json]:
        """The tools that an agent may call: name, description and input schema of each."""
        async with self.refusing(environment, closes=False):
            listing = await self._queries.tools(patient(environment))
            known = self._tools.get(environment.name)
            if known is None or known[0] is not listing:
                try:
                    known = self._tools[environment.name] = listing, read_tools(json.loads(listing))
                except (ValueError, TypeError, KeyError, AttributeError) as error:
                    raise UpstreamError(f"the worker's list of tools can't be read: {error}") from error
            return known[1]

    async def default_tool(self, environment: Environment) -> str | None:
        """The tool that an action without a tool's name is an input of; None where none is named."""
        if environment.wire is not UpstreamKind.OWN:
            return environment.actions.default_tool or None
        async with self.refusing(environment, closes=False):
            about = await self._queries.about(patient(environment))
        return about.get("default_tool")

    async def has(self, owner: Owner, name: str, environment: Environment) -> bool:
        """Whether an episode is open under *name*. Raises ``FrameError`` if nobody can tell."""
        async with self.refusing(environment, closes=False):
            try:
                await self._sessions.find(owner, name)
            except (SessionNotFound, SessionClosed):
                return False
            return True

    async def knows(self, owner: Owner, name: str, environment: Environment) -> bool:
        """Return True if there is an episode under *name*, or was one that we ended.

        Raises:
            FrameError: nobody can tell.
        """
        async with self.refusing(environment, closes=False):
            with contextlib.suppress(SessionClosed):
                try:
                    await self._sessions.find(owner, name)
                except SessionNotFound:
                    return False
        return True

    async def end(self, owner: Owner, name: str) -> bool:
        """End the episode, if there is one; once begun it goes through, whatever becomes of who asked for it."""
        # Unshielded, an anyio scope that was cancelled would cancel each await of the cleanup again.
        with anyio.move_on_after(CLEANUP_S, shield=True):
            try:
                return await self._sessions.end(owner, name, CloseReason.DELETED, wait_s=TEARDOWN_WAIT_S)
            except StoreUnavailable:
                logger.warning("episode_not_ended name=%s", name)  # it expires
        return False

    async def _act(self, owner: Owner, name: str, environment: Environment, action: Action) -> StepResult:
        try:
            session = await self._sessions.find(owner, name)
            return await session.act(action, within_s=environment.openenv.step_s)
        except GatewayError as error:
            raise await self.failed(owner, name, environment, error) from error

    async def failed(self, owner: Owner, name: str, environment: Environment, error: GatewayError) -> FrameError:
        """What a client is told whose request in an episode ended with *error*; the episode ends where it broke."""
        if isinstance(error, UpstreamTimeout):
            await self._lose(owner, name, CloseReason.TIMEOUT)
            step_s = environment.openenv.step_s
            message = f"the step exceeded its deadline of {step_s:g} s: the episode has ended; send reset to go on"
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
        """End an episode that broke, or of which nobody knows what was done in it; its trainer hears so from now on."""
        with contextlib.suppress(StoreUnavailable):
            await self._sessions.end(owner, name, reason, wait_s=0)

    @contextlib.asynccontextmanager
    async def refusing(self, environment: Environment, *, closes: bool = True) -> AsyncIterator[None]:
        """Raise ``FrameError`` for whatever fails inside; with *closes* False the socket stays open in any case."""
        try:
            yield
        except GatewayError as error:
            refused = await refusal(error, environment, self._store)
            refused.closes = refused.closes and closes
            if refused.status >= 500:
                logger.warning("openenv_failed environment=%s error=%s", environment.name, error.detail)
            raise refused from error


def empty_state() -> Json:
    """The state before the first reset."""
    return {"episode_id": None, "step_count": 0}


def _left(deadline: float) -> float:
    return max(0.0, deadline - asyncio.get_running_loop().time())


def patient(environment: Environment) -> Environment:
    """The environment for questions: who asks first waits for a slot, and no longer than its client for an answer."""
    open_s = min(environment.timeouts.open_s, environment.openenv.reset_s)
    return replace(environment, timeouts=replace(environment.timeouts, open_s=open_s))


def _shown_task(task: TaskRef) -> Json:
    """What a trainer is shown of a task."""
    shown = {"task_id": task.label or None, "split": task.split or None, "index": task.index}
    return {name: value for name, value in shown.items() if value is not None}


def task_request(environment: Environment, reset: ResetRequest) -> TaskRequest:
    """Return what *reset* says of its task.

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
    """Raise ``FrameError`` if the index counts from the end, as ORS has it and OpenEnv has not."""
    if reset.index is not None and reset.index < 0:
        message = "Input should be greater than or equal to 0"
        entry = {"type": "greater_than_equal", "loc": ["data", "index"], "msg": message, "input": reset.index}
        raise invalid([entry], f"Invalid message: data.index: {message}")


def config_of(environment: Environment, reset: ResetRequest) -> Json:
    """Return what of *reset* the environment itself gets."""
    return {key: value for key, value in reset.config.items() if key not in environment.openenv.task_keys}


async def refuse_unknown_keys(environment: Environment, reset: ResetRequest, queries: TaskQueries) -> None:
    """Refuse keys that the environment would ignore.

    An OpenEnv image's own reset gets all of them, as from its own clients. Other servers report what they take.

    Raises:
        FrameError: There are such keys.
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
    """Return *id*, and *id* without the environment's name in front of it."""
    yield id
    prefix, slash, rest = id.partition("/")
    if slash and rest and prefix in (environment.name, *environment.env_types):
        yield rest
