"""Speaks AReaL's Task Server API to workers: third-party servers that do not know the gateway.

The server chooses an episode's id, and the session's handle contains it. Any replica can continue the episode, because
its state does not depend on a connection.

The server's own idle limit (300 s in the API) runs in parallel to the gateway's, and only a step restarts it. Without a
step in this time the server ends the episode, even if the trainer keeps the session alive in other ways.

Differences from the API's known clients:
* If a trainer leaves during a start and the response still arrives, the gateway cancels the episode.
* This replica refuses an action in a finished episode. Other replicas answer "not found", because the server forgets
  the episode.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from gateway.core.environment import Environment, Split, SplitType, TaskSpec
from gateway.core.episode import Action, Block, StepResult, Summary
from gateway.core.errors import (
    GatewayError,
    InvalidRequest,
    SessionFailed,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
    author_fault,
    unknown_split,
)
from gateway.core.ids import SessionId, WorkerId
from gateway.core.json_text import compact, dump
from gateway.core.ports.transport import Request, Transport
from gateway.core.ports.upstream import EpisodeResults
from gateway.core.session import Session, SessionSetup
from gateway.core.worker import Worker
from gateway.upstreams import ors_bodies as answers
from gateway.upstreams.areal import codec as wire
from gateway.upstreams.areal import observations
from gateway.upstreams.areal.codec import Begun, ServerInfo
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.json_replies import Json, finished, refusal
from gateway.upstreams.json_replies import read as read_json
from gateway.upstreams.ors.client import read
from gateway.upstreams.ors_facade import OrsFacade

logger = logging.getLogger(__name__)

ANSWER_S: Final = 10.0
"""Seconds that a server has for a request that it answers from memory."""
CANCEL_S: Final = 30.0
"""Seconds that a server has to cancel an episode. Some servers answer after the episode's environment is gone."""
READY_PAUSE_S: Final = 0.05
"""Seconds between two checks of a starting server."""
LATE_START_S: Final = 30.0
"""Seconds to wait for the response to a start after its caller left, to cancel the episode."""
SETTLE_S: Final = 5.0
"""Seconds that the end of a session waits for a start or a step in progress."""
MAX_HANDLE_BYTES: Final = 2**20
"""Largest handle, in bytes. The store keeps it, including the first observation."""
SERVERS_MAX: Final = 10_000
"""Largest number of servers whose description is cached."""
EPISODES_MAX: Final = 20_000
"""Largest number of cached episodes, including those of sessions that other replicas ended."""
_PREFIXES: Final = (b"/api", b"")
_HEADERS: Final = ((b"content-type", b"application/json"), (b"accept", b"application/json"))
_MALFORMED: Final = (400, 413, 422)
"""Statuses for an invalid body. The API defines 400, but FastAPI answers 422."""
_ABSENT: Final = (404, 405, 501)
_FULL: Final = (429, 503)
_LOST: Final = "environment_lost"
"""The API's ``status`` word for an environment that is gone."""

_Key = tuple[SessionId, str]


@dataclass(slots=True, eq=False)
class _Episode:
    """The state of an episode in this replica."""

    id: str
    is_finished: bool = False
    is_closed: bool = False
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """The lock that the running step holds, because a server may refuse a second step."""


class _NotYet(UpstreamError):
    """The server answers, but is not ready."""


class ArealUpstream(OrsFacade):
    """Speaks AReaL's Task Server API to workers over *transport*."""

    def __init__(
        self, transport: Transport, *, recorder: Recorder | None = None, results: EpisodeResults | None = None
    ) -> None:
        super().__init__(recorder=recorder, results=results)
        self._transport = transport
        self._servers: dict[WorkerId, ServerInfo] = {}
        self._episodes: OrderedDict[_Key, _Episode] = OrderedDict()
        self._left: dict[_Key, asyncio.Task[None]] = {}
        """Tasks that cancel the episodes of starts whose caller left."""

    # -- the server -----------------------------------------------------------------------------------------------

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return 0 when the server describes its task and is healthy. The API does not report a capacity."""
        while True:
            try:
                await self._check(worker, environment)
            except (_NotYet, UpstreamGone, UpstreamTimeout):
                await asyncio.sleep(READY_PAUSE_S)
            else:
                return 0

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if the server is healthy and describes its task."""
        await self._check(worker, environment)

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """Return one tool, by default ``act``. Its input is the agent's text, or the action's object."""
        told = await self._told(worker.id, worker.address)
        return compact(wire.tool_list(environment, told))

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """Return one split with the name in ``areal.split``. Its tasks are the server's samples.

        The list is empty if their names are unknown, or if the server does not state its number of samples.
        """
        if not await self._samples(worker, environment):
            return []
        name = environment.areal.split
        return [Split(name, SplitType(name) if name in set(SplitType) else SplitType.TRAIN)]

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """Return the number of samples: those listed in ``areal.sample_ids``, or the number that the server states."""
        count = await self._samples(worker, environment)
        if not count or split != environment.areal.split:
            raise unknown_split(split, [environment.areal.split] if count else [])
        return count

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Return the samples from number *start* up to *stop*, exclusive."""
        numbers = range(start, min(stop, await self.count(worker, environment, split)))
        names = environment.areal.sample_ids
        if names == "{}":
            return [{"id": str(number), "sample_id": number} for number in numbers]
        named = [names.format(number) if isinstance(names, str) else names[number] for number in numbers]
        return [{"id": name, "sample_id": name} for name in named]

    async def _samples(self, worker: Worker, environment: Environment) -> int:
        names = environment.areal.sample_ids
        if not names or not isinstance(names, str):
            return len(names)
        return (await self._find(worker.id, worker.address)).samples

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """Return the server's response to ``task/info``."""
        return (await self._find(worker.id, worker.address)).info

    async def _check(self, worker: Worker, environment: Environment) -> None:
        """Check the server's readiness. Raises ``_NotYet`` if the server is not ready or healthy, else as `_find`."""
        own = environment.server.ready
        if own:
            path = own if own.startswith("/") else f"/{own}"
            status, _ = await self._get(worker.id, worker.address, path.encode())
            if status != 200:
                raise _NotYet(f"worker {worker.id} answered {status} to {path}")
        told = await self._find(worker.id, worker.address)
        if not own:
            status, body = await self._get(worker.id, worker.address, told.base + b"/health")
            if status != 200 and status not in _ABSENT:  # the documented API has no such path
                raise _NotYet(f"worker {worker.id} is not healthy: {refusal(status, body)[0]}")

    async def _told(self, worker: WorkerId, address: str) -> ServerInfo:
        """Return the server's description. It is requested once per worker."""
        return self._servers.get(worker) or await self._find(worker, address)

    async def _find(self, worker: WorkerId, address: str) -> ServerInfo:
        """Request the server's description, with and without the prefix ``/api``.

        Raises:
            _NotYet: The server fails, as a starting server does.
            UpstreamError: The server is not an AReaL task server.
        """
        for base in _PREFIXES:
            target = base + b"/task/info"
            status, body = await self._get(worker, address, target)
            if status in _ABSENT:
                continue
            reason, _ = refusal(status, body)
            if status >= 500 or status in _FULL:
                raise _NotYet(f"worker {worker} answered {status} to {target.decode()}: {reason}")
            if status != 200:
                raise UpstreamError(f"worker {worker} answered {status} to {target.decode()}: {reason}")
            info = read_json(body, target.decode())
            if not isinstance(info.get("name"), str) or not info["name"]:
                raise UpstreamError(f"worker {worker} answered {target.decode()} without a name: no AReaL task server")
            if len(self._servers) > SERVERS_MAX:
                self._servers.clear()
            told = self._servers[worker] = ServerInfo(base, info)
            return told
        raise UpstreamError(f"worker {worker} has neither /api/task/info nor /task/info: no AReaL task server")

    # -- an episode -----------------------------------------------------------------------------------------------

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """Start an episode. The handle contains its id and its first observation."""
        body = wire.start_body(setup)
        told = await self._told(session.worker, session.address)
        starting = asyncio.ensure_future(self._start(session, environment, told, body))
        try:
            await asyncio.wait({starting}, timeout=environment.timeouts.setup_s)
        except BaseException:  # a cancellation; the response with the episode's id may still arrive
            self._leave(session, starting)
            raise
        if not starting.done():
            self._leave(session, starting)
            raise UpstreamTimeout(f"the server did not begin the episode within {environment.timeouts.setup_s:g} s")
        begun = starting.result()
        self._remember(session, _Episode(begun.episode))
        self.tallies.begin(session)
        return replace(session, handle=begun.handle())

    async def _start(self, session: Session, environment: Environment, told: ServerInfo, body: Json) -> Begun:
        status, answer = await self._post(
            session, told, "episode/start", body, silence_s=environment.timeouts.setup_s + LATE_START_S
        )
        if status != 200:
            reason, word = refusal(status, answer)
            if status in _FULL or word == "capacity":
                raise WorkerFull(reason)
            if status == 404 or status in _MALFORMED:
                raise InvalidRequest(reason)
            raise _failure(status, word, reason, "reset")
        begun = wire.read_start(answer)
        try:
            observations.read_prompt(begun.observation)
            size = len(begun.handle())
            if size > MAX_HANDLE_BYTES:
                raise UpstreamError(f"the first observation has {size} bytes; {MAX_HANDLE_BYTES} can be kept")
        except UpstreamError:
            await self._cancel(session, told, begun.episode)
            raise
        return begun

    def _leave(self, session: Session, starting: asyncio.Future[Begun]) -> None:
        key = session.id, session.lease
        undoing = self._left[key] = asyncio.ensure_future(self._undo(session, starting))
        undoing.add_done_callback(lambda _: self._left.pop(key, None))

    async def _undo(self, session: Session, starting: asyncio.Future[Begun]) -> None:
        """Cancel the episode of a start whose caller left, if the response arrives within `LATE_START_S`."""
        try:
            await asyncio.wait({starting}, timeout=LATE_START_S)
            if not starting.done():
                raise UpstreamTimeout(f"no answer to the start within {LATE_START_S:g} s more")
            begun = starting.result()
            await self._cancel(session, await self._told(session.worker, session.address), begun.episode)
        except GatewayError as error:  # the episode did not start, or the server's own idle limit ends it
            logger.warning("start_not_undone session=%s worker=%s error=%s", session.id, session.worker, error.detail)
        finally:
            starting.cancel()

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Cancel the episode and return its summary over all replicas.

        The summary is None if the server no longer knows the episode and the episode did not finish.

        Raises:
            UpstreamError: The server did not cancel the episode, or a start or a step that may hold a slot still runs.
        """
        key = session.id, session.lease
        if (undoing := self._left.get(key)) is not None:
            await asyncio.wait({undoing}, timeout=SETTLE_S)
            if not undoing.done():
                raise UpstreamError("a start of this session is still under way: its episode could not be cancelled")
        if not session.handle:
            return None
        episode = self._episode(session)
        episode.is_closed = True
        try:
            told = await self._told(session.worker, session.address)
            was_known = await self._cancel(session, told, episode.id)
            if not await self.calls.settle(session, within_s=SETTLE_S):
                raise UpstreamError("a step is still under way, although its episode was cancelled")
            summary = await self.tallies.summary(session)
        finally:
            self.forget(session)
            self._episodes.pop(key, None)
        return summary if summary is not None and (was_known or summary.finished) else None

    async def _cancel(self, session: Session, told: ServerInfo, episode: str) -> bool:
        """Cancel an episode. Return False if the server does not know it. Raises ``UpstreamError`` if it refuses."""
        status, answer = await self._post(session, told, "episode/cancel", {"episode_id": episode}, silence_s=CANCEL_S)
        if status not in (200, 404):
            raise UpstreamError(f"the server did not cancel the episode: {refusal(status, answer)[0]}")
        return status == 200

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """Return the first observation as blocks."""
        return observations.read_prompt(_begun(session).observation)

    async def messages(self, session: Session, environment: Environment) -> bytes:
        """Return the first observation as ORS messages. An observation of type ``messages`` stays a conversation."""
        said = observations.read_messages(_begun(session).observation)
        return dump([{"role": role, "blocks": answers.blocks(blocks), "detail": None} for role, blocks in said])

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """Play one turn. The turns of one session run one after the other."""
        episode = self._episode(session)
        async with episode.turn:
            if episode.is_closed:
                raise SessionNotFound(session.name)
            if episode.is_finished:
                return finished(action.name or wire.ACT)
            told = await self._told(session.worker, session.address)
            wanted = wire.written(action, environment, told)
            if isinstance(wanted, StepResult):
                return wanted
            body = {"episode_id": episode.id, "action": wanted}
            status, answer = await self._post(
                session, told, "episode/step", body, silence_s=environment.timeouts.call_s
            )
            if status != 200:
                raise self._step_refused(session, status, answer)
            result = wire.read_step(answer)
            episode.is_finished = result.finished
            return result

    @staticmethod
    def _step_refused(session: Session, status: int, answer: bytes) -> GatewayError:
        reason, word = refusal(status, answer)
        if status == 404:
            return SessionNotFound(session.name)
        if status in _MALFORMED:
            return InvalidRequest(reason)
        return _failure(status, word, reason, "step")

    async def aclose(self) -> None:
        """Cancel starts and calls in progress."""
        left = list(self._left.values())
        for undoing in left:
            undoing.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self.calls.aclose()

    # -- inside ---------------------------------------------------------------------------------------------------

    def _episode(self, session: Session) -> _Episode:
        """Return the state of a session's episode. Raises ``SessionNotFound`` if it has no episode."""
        key = session.id, session.lease
        episode = self._episodes.get(key)
        if episode is None:
            episode = self._remember(session, _Episode(_begun(session).episode))
        self._episodes.move_to_end(key)
        return episode

    def _remember(self, session: Session, episode: _Episode) -> _Episode:
        self._episodes[session.id, session.lease] = episode
        if len(self._episodes) > EPISODES_MAX:
            self._episodes.popitem(last=False)
        return episode

    async def _get(self, worker: WorkerId, address: str, target: bytes) -> tuple[int, bytes]:
        request = Request(b"GET", target, ((b"accept", b"application/json"),))
        return await self._ask(worker, address, request, ANSWER_S)

    async def _post(
        self, session: Session, told: ServerInfo, operation: str, body: Json, *, silence_s: float
    ) -> tuple[int, bytes]:
        request = Request(b"POST", b"%s/%s" % (told.base, operation.encode()), _HEADERS, compact(body))
        return await self._ask(session.worker, session.address, request, silence_s)

    async def _ask(self, worker: WorkerId, address: str, request: Request, silence_s: float) -> tuple[int, bytes]:
        answer = await read(await self._transport.send(worker, address, request, silence_s=silence_s))
        return answer.status, answer.body


def _failure(status: int, word: str, reason: str, place: str) -> UpstreamError:
    """Return the error for a refusal. A 500 is the author's exception unless *word* is a loss or ``capacity``."""
    if word == _LOST:
        return SessionFailed(reason)
    if status == 500 and word != "capacity":
        return author_fault(reason, place)
    return SessionFailed(reason) if word and word != "capacity" else UpstreamError(reason)


def _begun(session: Session) -> Begun:
    try:
        return Begun.of(session.handle)
    except (ValueError, KeyError, TypeError) as error:
        raise SessionNotFound(session.name) from error
