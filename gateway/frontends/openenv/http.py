"""Serves OpenEnv over HTTP: discovery, the Task API, and reset, step and state for clients that can't keep a socket.

Differences from a stock server:
* With ``X-Session-ID``, reset, step and state share one episode. The id comes from ``openenv/session/create``, or is
  any name that the client chooses. ``openenv/session/close`` ends the episode. Without the header, each reset or step
  runs in a temporary episode, as in a stock server.
* ``GET /state`` without the header returns the empty state: an episode for a mere read would occupy a slot.
* An unknown split gets 400, and a failure in an episode has a JSON body. In a stock server both are 500 in plain text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt
from starlette.types import Receive, Scope, Send

from gateway.core.environment import Environment, Split, UpstreamKind
from gateway.core.errors import StoreUnavailable, UnknownSplit, UnknownTask
from gateway.core.ids import Owner
from gateway.frontends.asgi import Attended, HungUp, Refusal, header, read_body, respond, respond_json
from gateway.frontends.openenv.episodes import Episodes, empty_state, patient
from gateway.frontends.openenv.frames import Json, ResetRequest
from gateway.frontends.openenv.mcp import Mcp
from gateway.frontends.openenv.passthrough import Passthrough, observed
from gateway.frontends.openenv.schema import metadata, openapi, schemas
from gateway.frontends.session_ids import SessionIds
from gateway.tasks.lookup import TaskLookup
from gateway.upstreams.ors_bodies import OfRange, OfSplit, OfTask, validate

MAX_ID_CHARS: Final = 255

logger = logging.getLogger(__name__)

T = TypeVar("T")
Wish = TypeVar("Wish", bound=BaseModel)


class HttpReset(ResetRequest):
    seed: Annotated[StrictInt, Field(ge=0)] | None = None


class HttpStep(BaseModel):
    model_config = ConfigDict(extra="allow")

    action: dict[str, Any]
    timeout_s: float | None = Field(default=None, gt=0)
    request_id: str | None = Field(default=None, max_length=255)


@dataclass(frozen=True, slots=True)
class _Request:
    """One request with its environment."""

    scope: Scope
    receive: Receive
    send: Send
    environment: Environment

    @property
    def owner(self) -> Owner:
        """Owner of the request's key. Only `health` is admitted without a key, and it does not read the owner."""
        owner: Owner = self.scope["gateway.owner"]
        return owner


class HttpRoutes:
    """The HTTP routes below ``/openenv/{environment}``."""

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
        """Respond to one request.

        Raises:
            Refusal: The route, method, environment or task is wrong.
            FrameError: An episode operation or a query to a worker failed.
            Unprocessable: The body does not fit the route's model.
            BodyTooLarge: The body exceeds its limit.
            HungUp: The client disconnected.
        """
        match rest:
            case (name,) if name in self._routes:
                method, handler = self._routes[name]
            case (named, name) if name in self._task_routes:
                method, handler = self._task_routes[name]
                if named.lower() != environment.name.lower():
                    raise Refusal(404, f"unknown environment {named[:64]!r}")
            case _:
                raise Refusal(404, "Not Found")
        if scope["method"] != method:
            raise Refusal(405, "Method Not Allowed", [(b"allow", method.encode())])
        try:
            found = await handler(_Request(scope, receive, send, environment))
        except UnknownTask as error:
            logger.info("openenv_not_found environment=%s detail=%r", environment.name, error.detail)
            detail = error.detail if isinstance(error, UnknownSplit) else "Invalid task index"
            raise Refusal(400, detail) from None
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
        """Return the image's own ``schema`` or ``metadata``. None: it has none or does not speak OpenEnv."""
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
        """Return the environment's splits. Raises ``Refusal`` if there are none: the Task API needs splits."""
        splits = await self._attended(request, self._lookup.splits(patient(request.environment)))
        if not splits:
            raise Refusal(501, f"{method} is not supported for this environment")
        return splits

    async def _refreshed(self) -> None:
        with contextlib.suppress(StoreUnavailable):  # the response then contains the known tasks
            await self._lookup.refresh()

    # -- episodes -------------------------------------------------------------------------------------------------

    async def _reset(self, request: _Request) -> Json:
        body = await self._read(request, HttpReset, empty=b"{}")
        return await self._attended(request, self._reset_in(request, body))

    async def _reset_in(self, request: _Request, body: ResetRequest) -> Json:
        name = self._name(request)
        if name is not None:
            return _whole(await self._begin(request, name, body))
        return await self._thrown_away(request, body, None)

    async def _step(self, request: _Request) -> Json:
        body = await self._read(request, HttpStep)
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
        """Return the session name of the client's episode. None: the client sent no ``X-Session-ID``."""
        id = header(request.scope, b"x-session-id")
        if not id:
            return None
        if len(id) > MAX_ID_CHARS:
            raise Refusal(400, f"X-Session-ID is longer than {MAX_ID_CHARS} characters")
        return self._ids.name(id, request.owner, request.environment.name)

    async def _read(self, request: _Request, model: type[Wish], *, empty: bytes = b"") -> Wish:
        """Return the body as *model*. *empty* replaces an empty body. Raises ``Unprocessable``."""
        body = await read_body(request.scope, request.receive, self._max_body_bytes)
        content_type = header(request.scope, b"content-type") if body else "application/json"
        return validate(model, body or empty, content_type)

    async def _attended(self, request: _Request, work: Awaitable[T]) -> T:
        """Return the result of *work*. Cancel it and raise ``HungUp`` if the client disconnects."""
        async with Attended(request.scope, request.receive) as trainer:
            done = await work
            if not trainer.left:
                return done
        raise HungUp


def _whole(seen: Json) -> Json:
    """Return an observation in the format of the HTTP routes, where ``metadata`` is always present and may be null."""
    return {**seen, "metadata": seen.get("metadata")}
