"""Serves each environment as a NeMo Gym resources server at ``/nemo/{environment}``.

An episode is a session. `seed_session` opens it and names it in a cookie, a POST to the name of a tool acts in it, and
`verify` ends it and returns its reward. ``docs/design/nemo-gym.md`` has the facts about NeMo Gym's clients, with their
sources.

Differences from a stock resources server:
* A tool's failure is an HTTP error: 404 for an unknown tool, 422 for bad arguments, 409 after the end of the episode,
  and 500 for a tool that failed. Agents show the body to the model, whatever the status is.
* The reward is the episode's, as for all trainers. The rest of the row and of the agent's response does not change it.
* `verify` gives the agent's final text to the environment's default tool, if the episode has not ended yet and the text
  can be an answer (``[nemo] final_text``).
* A close before the seed of the same session does not stop that seed. Such a session expires.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

import anyio
from starlette.types import Receive, Scope, Send

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.episode import (
    EPISODE_FINISHED,
    TOOL_FAILED,
    Action,
    Block,
    StepResult,
    Summary,
    TextBlock,
    without_lone_role,
)
from gateway.core.errors import (
    AuthorFault,
    GatewayError,
    InvalidRequest,
    SessionClosed,
    SessionExists,
    SessionNotFound,
    StoreUnavailable,
    UnknownTask,
    UpstreamError,
    UpstreamGone,
)
from gateway.core.ids import Owner
from gateway.core.json_text import dump
from gateway.core.outcomes import EARNED, EpisodeOutcome, kept_result, outcome_of, reward_of
from gateway.core.session import CloseReason, EpisodeRequest
from gateway.frontends.asgi import (
    Attended,
    FrontendParts,
    HungUp,
    Refusal,
    catalog_of,
    group_of,
    headers,
    policy_tag,
    read_body,
    respond_json,
)
from gateway.frontends.errors import NEMO_STATUS, headers_of, marks, status_of, why_ended, why_not_opened
from gateway.frontends.nemo.requests import (
    Object,
    Seed,
    cookies,
    place_of,
    read_object,
    read_rewards,
    read_seed,
    read_verify,
)
from gateway.frontends.session_ids import SessionIds
from gateway.sessions.last_replies import LastReply, LastRequest
from gateway.sessions.service import ActiveSession
from gateway.tasks.resolver import session_setup
from gateway.tasks.task_ref import TaskRef
from gateway.upstreams.ors_bodies import Unprocessable

logger = logging.getLogger(__name__)

TEARDOWN_WAIT_S: Final = 2.0
"""Seconds that a close waits for the teardown to free the slot. A longer teardown continues after the reply."""
CLEANUP_S: Final = 5.0
_NO_EPISODE: Final = (
    "there is no such episode: send seed_session first, and return the cookie of its response with each request. An "
    "episode ends with verify and with close_session"
)
_TOOL_STATUS: Final = {"not_found": 404, EPISODE_FINISHED: 409, TOOL_FAILED: 500}
"""Statuses of tool calls by the reason of their error. Any other error is 422: the agent's input was refused."""
_VERIFY_KEY: Final = "nemo-verify"
"""Idempotency key of the final text, which must not run twice. Clients repeat a verify whose connection broke."""
_Handler = Callable[["_Request"], Awaitable[Object]]


@dataclass(slots=True)
class _Request:
    """One request with its owner and environment."""

    scope: Scope
    receive: Receive
    owner: Owner
    environment: Environment
    tool: str
    session: str
    """Name of the session of the request's cookie. Empty: the request has no valid cookie."""
    raw: bytes = b""
    """The body as it was sent."""
    body: Object = field(default_factory=dict)

    @property
    def cookie(self) -> str:
        return f"nemo_{self.environment.name}"


class NemoFrontend:
    """NeMo Gym's protocol of resources servers as an ASGI application."""

    def __init__(self, parts: FrontendParts, *, secret: bytes) -> None:
        """Create the frontend. *secret* is the key of the HMAC in cookies, which all replicas share."""
        self._sessions = parts.sessions
        self._resolver = parts.resolver
        self._catalog = parts.catalog
        self._max_body_bytes = parts.max_body_bytes
        self._ids = SessionIds(secret, "nemo")
        self._posts: dict[str, _Handler] = {
            "seed_session": self._seed,
            "verify": self._verify,
            "close_session": self._close,
            "aggregate_metrics": self._aggregate,
        }
        health = {"status": "ok"}
        self._gets: dict[str, Object | str] = {
            **dict.fromkeys(("", "health", "healthz", "livez", "readyz"), health),
            "reverify_mode": "unsupported",  # a reward needs the episode's worker
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request. Every error has FastAPI's form, ``{"detail": …}``."""
        status, body, extra = 200, None, []
        kept: list[_Request] = []
        try:
            body = await self._answer(scope, receive, kept)
        except HungUp:
            return
        except Refusal as refusal:
            status, body, extra = refusal.status, refusal.body, [*refusal.extra]
            if status == 404 and not kept:
                logger.info("nemo_not_found path=%r detail=%r", scope["path"][:200], str(refusal))
        except Unprocessable as error:
            status, body = 422, {"detail": list(error.entries)}
        except GatewayError as error:
            status, extra = status_of(error, NEMO_STATUS), headers_of(error)
            detail = _NO_EPISODE if isinstance(error, SessionNotFound) else error.detail
            body = {"detail": detail, **marks(error)}
            if isinstance(error, UnknownTask):
                logger.info("nemo_not_found path=%r detail=%r", scope["path"][:200], error.detail)
            if status >= 500:
                logger.warning("nemo_failed path=%s status=%d error=%s", scope["path"], status, error.detail)
        except Exception:  # the client gets a JSON body, and other episodes continue
            logger.exception("nemo_broken path=%s", scope["path"])
            status, body = 500, {"detail": "a fault of the gateway"}
        for request in kept:
            if request.session:  # stock servers set the cookie in each response, and some agents keep only the last
                extra.append((b"set-cookie", _set_cookie(request.cookie, request.session)))
        await respond_json(send, status, body, extra)

    async def _answer(self, scope: Scope, receive: Receive, kept: list[_Request]) -> Object | str:
        """Run the handler of the route. Put the request into *kept* once its environment and route are known."""
        catalog = catalog_of(scope, self._catalog)
        name, route = place_of(scope["path"])
        environment = catalog.offered.get(name)
        if environment is None:
            raise Refusal(404, catalog.unknown(name).detail)
        tool = "/".join(route)
        if scope["method"] in ("GET", "HEAD") and tool in self._gets:
            return self._gets[tool]
        if len(route) != 1:
            raise Refusal(404, f"there are {', '.join(self._posts)} and the names of the environment's tools")
        if scope["method"] != "POST" or tool in self._gets:
            raise Refusal(405, f"{tool} takes {'GET' if tool in self._gets else 'POST'}")
        request = _Request(scope, receive, scope["gateway.owner"], environment, tool, "")
        sent = cookies(headers(scope, b"cookie"), request.cookie)
        own = [id for id in sent if self._ids.holds(id, request.owner, environment.name)]
        request.session = own[-1] if own else ""
        kept.append(request)
        request.raw = await read_body(scope, receive, self._max_body_bytes)
        request.body = read_object(request.raw)
        async with Attended(scope, receive) as client:
            answer = await self._posts.get(tool, self._call)(request)
            if client.left and tool == "seed_session":
                await self._end(request, CloseReason.OPEN_FAILED)
            return answer
        raise HungUp

    # -- an episode -----------------------------------------------------------------------------------------------

    async def _seed(self, request: _Request) -> Object:
        owner, environment = request.owner, request.environment
        seed = read_seed(request.body, environment)
        policy, group = policy_tag(request.scope), group_of(request.scope)
        given = seed.resources_session_id
        name = self._ids.of(owner, environment.name, given) if given else self._ids.new(owner, environment.name)
        if given and await self._is_open(owner, name, seed):
            request.session = name
            return {"resources_session_id": given}
        task = await self._task(environment, seed)
        setup = session_setup(environment, task, seed=seed.seed, config=seed.config, policy=policy, group=group)
        async with self._resolver.admitted(environment, setup):
            if request.session and request.session != name:  # the client replaces the episode of its cookie
                await self._end(request, CloseReason.CANCELLED)
            request.session = ""  # no cookie for a session that does not open
            blocks = await self._opened(
                EpisodeRequest(
                    owner=owner,
                    name=name,
                    environment=environment,
                    setup=setup,
                    fingerprint=seed.fingerprint if given else name,
                    protocol="nemo",
                )
            )
        request.session = name
        return {"resources_session_id": given} if given else {"prompt": _text_of(blocks)}

    async def _task(self, environment: Environment, seed: Seed) -> TaskRef:
        """Return the task of a row: the one at its place, or if that has another id, the one with its id.

        The place may hold another task since the export. A worker's own tasks are found by their places only.
        """
        if seed.by_place is not None:
            with contextlib.suppress(*([] if seed.by_id is None else [UnknownTask])):
                task = await self._resolver.resolve(environment, seed.by_place)
                if seed.by_id is None or task.spec.get("id") in seed.by_id.ids:
                    return task
        assert seed.by_id is not None
        return await self._resolver.resolve(environment, seed.by_id)

    async def _is_open(self, owner: Owner, name: str, seed: Seed) -> bool:
        """Return True if this seed opened the session before. Raises ``SessionExists`` if another seed did."""
        try:
            found = await self._sessions.find(owner, name)
        except SessionNotFound:
            return False
        except SessionClosed as error:
            if error.reason != CloseReason.OPEN_FAILED:
                raise
            return False
        if found.session.fingerprint != seed.fingerprint:
            raise SessionExists(f"resources_session_id: another seed_session opened {seed.resources_session_id!r}")
        return True

    async def _opened(self, request: EpisodeRequest) -> list[Block]:
        """Open the session, and return its prompt after the task's setup. End the session if the setup fails."""
        session = await self._sessions.open(request)
        try:
            return await session.prompt(within_s=request.environment.timeouts.setup_s)
        except BaseException as error:  # includes the cancellation after the client disconnected
            with anyio.move_on_after(CLEANUP_S, shield=True), contextlib.suppress(StoreUnavailable):
                await self._sessions.end(request.owner, request.name, why_not_opened(error), wait_s=TEARDOWN_WAIT_S)
            raise

    async def _call(self, request: _Request) -> Object:
        session = await self._session(request)
        result = await self._act(request, session, Action(name=request.tool, arguments=request.body))
        if result.error is not None:
            raise Refusal(_TOOL_STATUS.get(result.reason, 422), result.error)
        shown = _text_of(result.blocks) if result.blocks or result.data is None else result.data
        return {"result": shown, **({"finished": True} if result.finished else {})}

    async def _verify(self, request: _Request) -> Object:
        text = read_verify(request.body)
        last = LastRequest(_VERIFY_KEY, request.raw)

        def reply(summary: Summary | None) -> bytes:
            with contextlib.suppress(UpstreamError):
                return last.written(dump(_verified(summary)))
            return b""

        try:
            session = await self._session(request)
        except SessionNotFound:
            return await self._repeated(request, last, reply)
        except SessionClosed as error:
            kept = kept_result(CloseReason(error.reason), None, error.result)
            if kept is None:
                raise
            return {**request.body, **_verified(kept)}  # the environment had ended the episode before
        # A resources server judges the episode only when it ends, also if the agent ended with a call of a tool.
        if (text or request.environment.wire is UpstreamKind.NEMO) and _can_be_answer(request.environment):
            with contextlib.suppress(InvalidRequest):  # the environment takes no text, so the text is no answer
                action = Action(text=text, is_final=not request.environment.nemo.final_text)
                await self._act(request, session, action, key=_VERIFY_KEY)
        summary = await self._sessions.close(request.owner, request.session, reply=reply)
        if summary is None:  # the worker is gone, or the same request has ended the episode
            with contextlib.suppress(SessionNotFound):
                return await self._repeated(request, last, reply)
        return {**request.body, **_verified(summary)}

    async def _repeated(self, request: _Request, last: LastRequest, reply: LastReply) -> Object:
        """Return the reply to the verify that ended the episode. Raises ``SessionNotFound``: this one is no repeat."""
        kept = None
        if request.session:
            kept = await self._sessions.repeated(request.owner, request.session, last, reply=reply)
        if kept is None:
            raise SessionNotFound(request.session)
        return {**request.body, **json.loads(kept)}

    async def _close(self, request: _Request) -> Object:
        given = request.body.get("resources_session_id")
        if isinstance(given, str) and given:
            request.session = self._ids.of(request.owner, request.environment.name, given)
        if request.session:
            await self._sessions.end(request.owner, request.session, CloseReason.CANCELLED, wait_s=TEARDOWN_WAIT_S)
        return {} if given is None else {"resources_session_id": given}

    async def _aggregate(self, request: _Request) -> Object:
        rewards = read_rewards(request.body)
        metrics = {"mean/reward": sum(rewards) / len(rewards)} if rewards else {}
        return {"agent_metrics": metrics, "key_metrics": metrics, "group_level_metrics": []}

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _session(self, request: _Request) -> ActiveSession:
        if not request.session:
            raise SessionNotFound("")
        return await self._sessions.find(request.owner, request.session)

    async def _act(
        self, request: _Request, session: ActiveSession, action: Action, *, key: str | None = None
    ) -> StepResult:
        """Run *action* once. If it fails in the worker, the episode ends, because the effect is unknown."""
        try:
            return await session.act(action, within_s=request.environment.timeouts.call_s, key=key)
        except UpstreamError as error:
            with contextlib.suppress(StoreUnavailable):
                await self._sessions.end(request.owner, request.session, why_ended(error), wait_s=0)
            raise

    async def _end(self, request: _Request, reason: CloseReason) -> None:
        with anyio.move_on_after(CLEANUP_S, shield=True), contextlib.suppress(StoreUnavailable, SessionClosed):
            await self._sessions.end(request.owner, request.session, reason, wait_s=TEARDOWN_WAIT_S)


def _can_be_answer(environment: Environment) -> bool:
    """Return False if the agent's final text is certainly no action. An ORS server decides it by its terminal tool."""
    given = environment.nemo.final_text
    if given is not None:
        return given
    return environment.wire in (UpstreamKind.OWN, UpstreamKind.ORS, UpstreamKind.NEMO)


def _verified(summary: Summary | None) -> Object:
    """Return the keys that a verify adds to its row. Raises ``UpstreamError``: the episode has no reward."""
    if summary is None:
        raise UpstreamGone("the worker did not report the result of the episode, so it has no reward", sent=True)
    outcome = outcome_of(CloseReason.DELETED, summary)
    reward = reward_of(outcome, summary)
    if outcome is EpisodeOutcome.UNPLAYED and summary.is_whole:
        reward = 0.0  # the agent did nothing, which earns nothing
    elif outcome not in EARNED or reward is None:
        failed = AuthorFault if outcome is EpisodeOutcome.AUTHOR_FAULT else UpstreamError
        raise failed("the episode failed in its environment or has no reward of its own, so there is no reward")
    return {"reward": reward, "mask_sample": False}


def _text_of(blocks: list[Block] | tuple[Block, ...]) -> str:
    """Return the blocks as one text, with a line for each image."""
    shown = without_lone_role(blocks)
    return "\n".join(one.text if isinstance(one, TextBlock) else f"[image: {one.mime_type}]" for one in shown)


def _set_cookie(name: str, value: str) -> bytes:
    # An agent returns the cookie through its own server to /verify. A narrower path or a domain would stop it there.
    return f"{name}={value}; Path=/; HttpOnly; SameSite=lax".encode()
