"""OpenEnv over HTTP: discovery, the Task API, and reset, step and state for who can't keep a socket.

Differences from a stock server:
* With ``X-Session-ID`` reset, step and state are of one episode. The id is one of ``openenv/session/create``, or any
  name of the client's; ``openenv/session/close`` ends it. Without it each call has a throw-away episode, as there.
* ``GET /state`` without it is the empty state: to open an environment only to look at it would take somebody's slot.
* An unknown split is 400, and what fails in an episode has a JSON body; there both are 500 in plain text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt
from starlette.types import Receive, Scope, Send

from gateway.core.environment import Environment, Split
from gateway.core.errors import StoreUnavailable, UnknownSplit, UnknownTask
from gateway.core.ids import Owner
from gateway.frontends.asgi import Attended, HungUp, header, read_body, respond, respond_json
from gateway.frontends.openenv.episodes import Episodes, empty_state, patient
from gateway.frontends.openenv.frames import Json, ResetWish
from gateway.frontends.openenv.mcp import Mcp
from gateway.frontends.openenv.passthrough import Passthrough, observed
from gateway.frontends.openenv.schema import metadata, openapi, schemas
from gateway.frontends.openenv.session_ids import SessionIds
from gateway.tasks.lookup import TaskLookup
from gateway.upstreams.ors_bodies import OfRange, OfSplit, OfTask, validate

MAX_ID_CHARS: Final = 255

T = TypeVar("T")
Wish = TypeVar("Wish", bound=BaseModel)


class HttpRefusal(Exception):
    """Ends a request with a status and a ``detail``."""

    def __init__(self, status: int, detail: str, extra: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.extra = extra


class _HttpReset(ResetWish):
    seed: Annotated[StrictInt, Field(ge=0)] | None = None


class _HttpStep(BaseModel):
    model_config = ConfigDict(extra="allow")

    action: dict[str, Any]
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request: who asks what of which environment."""

    scope: Scope
    receive: Receive
    send: Send
    environment: Environment

    @property
    def owner(self) -> Owner:
        """Whose key it came with; the door lets only `health` through without one."""
        owner: Owner = self.scope["gateway.owner"]
        return owner


class HttpRoutes:
    """The routes below ``/openenv/{environment}`` that are no WebSockets."""

    def __init__(
        self,
        *,
        episodes: Episodes,
        relayed: Passthrough,
        mcp: Mcp,
        ids: SessionIds,
        lookup: TaskLookup,
        max_body_bytes: int,
    ) -> None:
        self._episodes = episodes
        self._relayed = relayed
        self._mcp = mcp
        self._ids = ids
        self._lookup = lookup
        self._max_body_bytes = max_body_bytes
        self._routes: dict[str, tuple[str, Callable[[_Asked], Awaitable[object]]]] = {
            "health": ("GET", self._health),
            "metadata": ("GET", self._metadata),
            "schema": ("GET", self._schema),
            "openapi.json": ("GET", self._openapi),
            "list_environments": ("GET", self._environments),
            "reset": ("POST", self._reset),
            "step": ("POST", self._step),
            "state": ("GET", self._state),
            "mcp": ("POST", self._rpc),
        }
        self._task_routes: dict[str, tuple[str, Callable[[_Asked], Awaitable[object]]]] = {
            "splits": ("GET", self._splits),
            "tasks": ("POST", self._all_tasks),
            "num_tasks": ("POST", self._num_tasks),
            "task": ("POST", self._task),
            "task_range": ("POST", self._task_range),
        }

    async def answer(
        self, scope: Scope, receive: Receive, send: Send, environment: Environment, rest: tuple[str, ...]
    ) -> None:
        """Answer one request.

        Raises:
            HttpRefusal, Refused, Unprocessable, BodyTooLarge, HungUp
        """
        match rest:
            case (name,) if name in self._routes:
                method, handler = self._routes[name]
            case (named, name) if name in self._task_routes:
                method, handler = self._task_routes[name]
                if named.lower() != environment.name.lower():
                    raise HttpRefusal(404, f"unknown environment {named[:64]!r}")
            case _:
                raise HttpRefusal(404, "Not Found")
        if scope["method"] != method:
            raise HttpRefusal(405, "Method Not Allowed", [(b"allow", method.encode())])
        try:
            found = await handler(_Asked(scope, receive, send, environment))
        except UnknownSplit as error:
            raise HttpRefusal(400, error.detail) from None
        except UnknownTask:
            raise HttpRefusal(400, "Invalid task index") from None
        if isinstance(found, bytes):
            await respond(send, 200, found)
        else:
            await respond_json(send, 200, found)

    # -- the environment ------------------------------------------------------------------------------------------

    async def _health(self, asked: _Asked) -> Json:
        return {"status": "healthy"}

    async def _metadata(self, asked: _Asked) -> Json:
        return await self._told(asked, "metadata") or metadata(asked.environment)

    async def _schema(self, asked: _Asked) -> Json:
        told = await self._told(asked, "schema")
        if told is not None:
            return told
        return await self._attended(asked, self._schemas(asked.environment))

    async def _schemas(self, environment: Environment) -> Json:
        tools = await self._episodes.tools(environment)
        return schemas(tools, await self._episodes.default_tool(environment))

    async def _told(self, asked: _Asked, what: str) -> Json | None:
        """What an image that speaks the protocol tells of itself."""
        if not self._relayed.serves(asked.environment):
            return None
        return await self._attended(asked, self._relayed.about(asked.environment, what))

    async def _openapi(self, asked: _Asked) -> Json:
        return openapi(asked.environment)

    async def _environments(self, asked: _Asked) -> list[str]:
        return [asked.environment.name]

    # -- tasks ----------------------------------------------------------------------------------------------------

    async def _splits(self, asked: _Asked) -> list[Json]:
        await self._refreshed()
        splits = await self._required(asked, "list_splits")
        return [{"name": one.name, "type": one.type.value} for one in splits]

    async def _all_tasks(self, asked: _Asked) -> bytes:
        wish = await self._of_tasks(asked, OfSplit, "list_tasks")
        tasks = await self._some(asked, wish.split, None, None)
        return b'{"tasks":[' + tasks + b'],"env_name":"' + asked.environment.name.encode() + b'"}'

    async def _num_tasks(self, asked: _Asked) -> Json:
        wish = await self._of_tasks(asked, OfSplit, "num_tasks")
        return {"num_tasks": await self._attended(asked, self._lookup.count(patient(asked.environment), wish.split))}

    async def _task(self, asked: _Asked) -> bytes:
        wish = await self._of_tasks(asked, OfTask, "get_task")
        task = await self._attended(asked, self._lookup.raw(patient(asked.environment), wish.split, wish.index))
        return b'{"task":' + task + b"}"

    async def _task_range(self, asked: _Asked) -> bytes:
        wish = await self._of_tasks(asked, OfRange, "get_task_range")
        return b'{"tasks":[' + await self._some(asked, wish.split, wish.start, wish.stop) + b"]}"

    async def _of_tasks(self, asked: _Asked, model: type[Wish], method: str) -> Wish:
        wish = await self._read(asked, model)
        await self._refreshed()
        await self._required(asked, method)
        return wish

    async def _some(self, asked: _Asked, split: str, start: int | None, stop: int | None) -> bytes:
        some = await self._attended(asked, self._lookup.range(patient(asked.environment), split, start, stop))
        return b",".join(some)

    async def _required(self, asked: _Asked, method: str) -> list[Split]:
        """The environment's splits; there is no Task API where it has none."""
        splits = await self._attended(asked, self._lookup.splits(patient(asked.environment)))
        if not splits:
            raise HttpRefusal(501, f"{method} is not supported for this environment")
        return splits

    async def _refreshed(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # what is known here is still told
            await self._lookup.refresh()

    # -- episodes -------------------------------------------------------------------------------------------------

    async def _reset(self, asked: _Asked) -> Json:
        wish = await self._read(asked, _HttpReset, empty=b"{}")
        return await self._attended(asked, self._reset_in(asked, wish))

    async def _reset_in(self, asked: _Asked, wish: ResetWish) -> Json:
        name = self._name(asked)
        if name is not None:
            return _whole(await self._begin(asked, name, wish))
        return await self._thrown_away(asked, wish, None)

    async def _step(self, asked: _Asked) -> Json:
        wish = await self._read(asked, _HttpStep)
        return await self._attended(asked, self._step_in(asked, wish.action))

    async def _step_in(self, asked: _Asked, action: Json) -> Json:
        name = self._name(asked)
        if name is not None:
            return _whole(await self._act(asked, name, action))
        return await self._thrown_away(asked, ResetWish(), action)

    async def _thrown_away(self, asked: _Asked, wish: ResetWish, action: Json | None) -> Json:
        name = self._ids.new(asked.owner, asked.environment.name)
        try:
            seen = await self._begin(asked, name, wish)
            if action is not None:
                seen = await self._act(asked, name, action)
            return _whole(seen)
        finally:
            await self._episodes.end(asked.owner, name)

    async def _begin(self, asked: _Asked, name: str, wish: ResetWish) -> Json:
        if self._relayed.serves(asked.environment):
            return observed(await self._relayed.reset(asked.owner, name, asked.environment, wish))
        return await self._episodes.reset(asked.owner, name, asked.environment, wish)

    async def _act(self, asked: _Asked, name: str, action: Json) -> Json:
        if self._relayed.serves(asked.environment):
            return observed(await self._relayed.step(asked.owner, name, asked.environment, action))
        return await self._episodes.step(asked.owner, name, asked.environment, action)

    async def _state(self, asked: _Asked) -> Json:
        name = self._name(asked)
        if name is None:
            return empty_state()
        if self._relayed.serves(asked.environment):
            return observed(await self._attended(asked, self._relayed.state(asked.owner, name, asked.environment)))
        return await self._episodes.state(asked.owner, name, asked.environment)

    async def _rpc(self, asked: _Asked) -> Json:
        body = await read_body(asked.scope, asked.receive, self._max_body_bytes)
        return await self._attended(asked, self._mcp.answer_bytes(asked.owner, asked.environment, body))

    def _name(self, asked: _Asked) -> str | None:
        """The name under which the client's episode is kept; None if it has said none."""
        id = header(asked.scope, b"x-session-id")
        if not id:
            return None
        if len(id) > MAX_ID_CHARS:
            raise HttpRefusal(400, f"X-Session-ID is longer than {MAX_ID_CHARS} characters")
        return self._ids.name(id, asked.owner, asked.environment.name)

    async def _read(self, asked: _Asked, model: type[Wish], *, empty: bytes = b"") -> Wish:
        """The body as *model*; *empty* stands for an empty one. Raises ``Unprocessable``."""
        body = await read_body(asked.scope, asked.receive, self._max_body_bytes)
        content_type = header(asked.scope, b"content-type") if body else "application/json"
        return validate(model, body or empty, content_type)

    async def _attended(self, asked: _Asked, work: Awaitable[T]) -> T:
        """Wait for *work*, which ends when the client hangs up."""
        async with Attended(asked.scope, asked.receive) as trainer:
            done = await work
            if not trainer.left:
                return done
        raise HungUp


def _whole(seen: Json) -> Json:
    """An observation as the HTTP routes answer it: with its metadata, or null."""
    return {**seen, "metadata": seen.get("metadata")}
