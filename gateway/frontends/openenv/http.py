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

from gateway.core.environment import Environment, Split, UpstreamKind
from gateway.core.errors import StoreUnavailable, UnknownSplit, UnknownTask
from gateway.core.ids import Owner
from gateway.frontends.asgi import Attended, HungUp, header, read_body, respond, respond_json
from gateway.frontends.openenv.episodes import Episodes, empty_state, patient
from gateway.frontends.openenv.frames import Json, ResetRequest
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


class _HttpReset(ResetRequest):
    seed: Annotated[StrictInt, Field(ge=0)] | None = None


class _HttpStep(BaseModel):
    model_config = ConfigDict(extra="allow")

    action: dict[str, Any]
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)


@dataclass(frozen=True, slots=True)
class _Request:
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
        self._routes: dict[str, tuple[str, Callable[[_Request], Awaitable[object]]]] = {
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
        self._task_routes: dict[str, tuple[str, Callable[[_Request], Awaitable[object]]]] = {
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
            HttpRefusal, FrameError, Unprocessable, BodyTooLarge, HungUp
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
            found = await handler(_Request(scope, receive, send, environment))
        except UnknownSplit as error:
            raise HttpRefusal(400, error.detail) from None
        except UnknownTask:
            raise HttpRefusal(400, "Invalid task index") from None
        if isinstance(found, bytes):
            await respond(send, 200, found)
        else:
            await respond_json(send, 200, found)

    # -- the environment ------------------------------------------------------------------------------------------

    async def _health(self, request: _Request) -> Json:
        return {"status": "healthy"}

    async def _metadata(self, request: _Request) -> Json:
        return await self._image_answer(request, "metadata") or metadata(request.environment)

    async def _schema(self, request: _Request) -> Json:
        answer = await self._image_answer(request, "schema")
        if answer is not None:
            return answer
        return await self._attended(request, self._schemas(request.environment))

    async def _schemas(self, environment: Environment) -> Json:
        tools = await self._episodes.tools(environment)
        return schemas(tools, await self._episodes.default_tool(environment))

    async def _image_answer(self, request: _Request, what: str) -> Json | None:
        """What an image that speaks the protocol tells of itself."""
        if request.environment.wire is not UpstreamKind.OPENENV:
            return None
        return await self._attended(request, self._relayed.about(request.environment, what))

    async def _openapi(self, request: _Request) -> Json:
        return openapi(request.environment)

    async def _environments(self, request: _Request) -> list[str]:
        return [request.environment.name]

    # -- tasks ----------------------------------------------------------------------------------------------------

    async def _splits(self, request: _Request) -> list[Json]:
        await self._refreshed()
        splits = await self._required(request, "list_splits")
        return [{"name": one.name, "type": one.type.value} for one in splits]

    async def _all_tasks(self, request: _Request) -> bytes:
        body = await self._of_tasks(request, OfSplit, "list_tasks")
        tasks = await self._some(request, body.split, None, None)
        return b'{"tasks":[' + tasks + b'],"env_name":"' + request.environment.name.encode() + b'"}'

    async def _num_tasks(self, request: _Request) -> Json:
        body = await self._of_tasks(request, OfSplit, "num_tasks")
        return {
            "num_tasks": await self._attended(request, self._lookup.count(patient(request.environment), body.split))
        }

    async def _task(self, request: _Request) -> bytes:
        body = await self._of_tasks(request, OfTask, "get_task")
        task = await self._attended(request, self._lookup.raw(patient(request.environment), body.split, body.index))
        return b'{"task":' + task + b"}"

    async def _task_range(self, request: _Request) -> bytes:
        body = await self._of_tasks(request, OfRange, "get_task_range")
        return b'{"tasks":[' + await self._some(request, body.split, body.start, body.stop) + b"]}"

    async def _of_tasks(self, request: _Request, model: type[Wish], method: str) -> Wish:
        body = await self._read(request, model)
        await self._refreshed()
        await self._required(request, method)
        return body

    async def _some(self, request: _Request, split: str, start: int | None, stop: int | None) -> bytes:
        some = await self._attended(request, self._lookup.range(patient(request.environment), split, start, stop))
        return b",".join(some)

    async def _required(self, request: _Request, method: str) -> list[Split]:
        """The environment's splits; there is no Task API where it has none."""
        splits = await self._attended(request, self._lookup.splits(patient(request.environment)))
        if not splits:
            raise HttpRefusal(501, f"{method} is not supported for this environment")
        return splits

    async def _refreshed(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # what is known here is still told
            await self._lookup.refresh()

    # -- episodes -------------------------------------------------------------------------------------------------

    async def _reset(self, request: _Request) -> Json:
        body = await self._read(request, _HttpReset, empty=b"{}")
        return await self._attended(request, self._reset_in(request, body))

    async def _reset_in(self, request: _Request, body: ResetRequest) -> Json:
        name = self._name(request)
        if name is not None:
            return _whole(await self._begin(request, name, body))
        return await self._thrown_away(request, body, None)

    async def _step(self, request: _Request) -> Json:
        body = await self._read(request, _HttpStep)
        return await self._attended(request, self._step_in(request, body.action))

    async def _step_in(self, request: _Request, action: Json) -> Json:
        name = self._name(request)
        if name is not None:
            return _whole(await self._act(request, name, action))
        return await self._thrown_away(request, ResetRequest(), action)

    async def _thrown_away(self, request: _Request, body: ResetRequest, action: Json | None) -> Json:
        name = self._ids.new(request.owner, request.environment.name)
        try:
            seen = await self._begin(request, name, body)
            if action is not None:
                seen = await self._act(request, name, action)
            return _whole(seen)
        finally:
            await self._episodes.end(request.owner, name)

    async def _begin(self, request: _Request, name: str, body: ResetRequest) -> Json:
        if request.environment.wire is UpstreamKind.OPENENV:
            return observed(await self._relayed.reset(request.owner, name, request.environment, body))
        return await self._episodes.reset(request.owner, name, request.environment, body)

    async def _act(self, request: _Request, name: str, action: Json) -> Json:
        if request.environment.wire is UpstreamKind.OPENENV:
            return observed(await self._relayed.step(request.owner, name, request.environment, action))
        return await self._episodes.step(request.owner, name, request.environment, action)

    async def _state(self, request: _Request) -> Json:
        name = self._name(request)
        if name is None:
            return empty_state()
        if request.environment.wire is UpstreamKind.OPENENV:
            return observed(
                await self._attended(request, self._relayed.state(request.owner, name, request.environment))
            )
        return await self._episodes.state(request.owner, name, request.environment)

    async def _rpc(self, request: _Request) -> Json:
        body = await read_body(request.scope, request.receive, self._max_body_bytes)
        return await self._attended(request, self._mcp.answer_bytes(request.owner, request.environment, body))

    def _name(self, request: _Request) -> str | None:
        """The name under which the client's episode is kept; None if it has said none."""
        id = header(request.scope, b"x-session-id")
        if not id:
            return None
        if len(id) > MAX_ID_CHARS:
            raise HttpRefusal(400, f"X-Session-ID is longer than {MAX_ID_CHARS} characters")
        return self._ids.name(id, request.owner, request.environment.name)

    async def _read(self, request: _Request, model: type[Wish], *, empty: bytes = b"") -> Wish:
        """The body as *model*; *empty* stands for an empty one. Raises ``Unprocessable``."""
        body = await read_body(request.scope, request.receive, self._max_body_bytes)
        content_type = header(request.scope, b"content-type") if body else "application/json"
        return validate(model, body or empty, content_type)

    async def _attended(self, request: _Request, work: Awaitable[T]) -> T:
        """Wait for *work*, which ends when the client hangs up."""
        async with Attended(request.scope, request.receive) as trainer:
            done = await work
            if not trainer.left:
                return done
        raise HungUp


def _whole(seen: Json) -> Json:
    """An observation as the HTTP routes answer it: with its metadata, or null."""
    return {**seen, "metadata": seen.get("metadata")}
