"""Speaks the API of NeMo Gym's resources servers to workers: third-party servers that do not know the gateway.

The gateway acts as a stock agent does. It seeds an episode with a row of the server's data set, posts tool calls to
routes of their names, and gives the agent's calls and final text to ``/verify``, which returns the only reward. Servers
of the Gymnasium kind have ``/reset`` and ``/step`` instead, and a reward for each step.

The server knows an episode by its cookie, which the session's handle contains. The calls of an episode are notes in the
counts of its replicas (`SessionStats`), so that any replica can continue and verify it.

Differences from a stock agent:
* A verifier reads the calls and the final text, but not what the agent said before a call.
* An episode is verified once. A failed verification is a failure of the episode, and never a reward.
* The gateway reports the end of an episode to the server, so that it can release resources.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from http.cookies import SimpleCookie
from typing import Final
from urllib.parse import quote

from gateway.core.environment import Environment, Split, TaskSpec
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
from gateway.core.ids import WorkerId
from gateway.core.json_text import compact, dump, encode
from gateway.core.ports.transport import Exchange, Headers, Request, Transport
from gateway.core.ports.upstream import EpisodeResults
from gateway.core.session import Session, SessionSetup
from gateway.core.worker import Worker
from gateway.upstreams import ors_bodies as answers
from gateway.upstreams.areal import observations
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.json_replies import Json, finished, read, refusal
from gateway.upstreams.nemo import codec as wire
from gateway.upstreams.nemo.codec import Begun, ServerInfo
from gateway.upstreams.ors.client import Answer
from gateway.upstreams.ors.client import read as read_answer
from gateway.upstreams.ors_facade import OrsFacade

ANSWER_S: Final = 10.0
"""Seconds that a server has for a request that it answers from memory."""
CLOSE_S: Final = 30.0
"""Seconds that a server has to close an episode."""
READY_PAUSE_S: Final = 0.05
"""Seconds between two checks of a starting server."""
SETTLE_S: Final = 5.0
"""Seconds that the end of a session waits for a step in progress."""
MAX_HANDLE_BYTES: Final = 2**20
"""Largest handle, in bytes. The store keeps it, including the row."""
MAX_CALLS_BYTES: Final = 2**20
"""Largest size of the calls of an episode with their outputs, in bytes. The store keeps them."""
SERVERS_MAX: Final = 10_000
"""Largest number of servers whose description is cached."""
_VERIFY_KEY: Final = "nemo verify"
"""Key of the call of ``/verify``, which two texts at once must not make twice."""
_MALFORMED: Final = (400, 413, 422)
_FULL: Final = (429, 503)
_ABSENT: Final = (404, 405, 422, 501)
"""Statuses of a server that has nothing to close, or knows no such request."""


class _NotYet(UpstreamError):
    """The server answers, but is not ready."""


class NemoUpstream(OrsFacade):
    """Speaks NeMo Gym's API of resources servers to workers over *transport*."""

    def __init__(
        self, transport: Transport, *, recorder: Recorder | None = None, results: EpisodeResults | None = None
    ) -> None:
        super().__init__(recorder=recorder, results=results)
        self._transport = transport
        self._servers: dict[WorkerId, ServerInfo] = {}

    # -- the server -----------------------------------------------------------------------------------------------

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return 0 when the server describes its routes. The API does not report a capacity."""
        while True:
            try:
                await self.alive(worker, environment)
            except (_NotYet, UpstreamGone, UpstreamTimeout):
                await asyncio.sleep(READY_PAUSE_S)
            else:
                return 0

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if the server describes its routes, and answers 200 to ``[server] ready`` if that is set."""
        if own := environment.server.ready:
            answer = await self._get(worker.id, worker.address, "/" + own.lstrip("/"))
            if answer.status != 200:
                raise _NotYet(f"worker {worker.id} answered {answer.status} to {own}")
        await self._find(worker.id, worker.address)

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """Return the server's routes, and the tool for texts. Further tools may be in the task's row."""
        told = await self._told(worker.id, worker.address)
        return wire.tool_list((*told.tools, wire.reply_tool(told, environment)), told)

    async def task_tools(self, session: Session, environment: Environment) -> bytes:
        """Return the tools of the session's row, and the tool for texts."""
        told = await self._told(session.worker, session.address)
        return wire.tool_list(wire.tools_of(_begun(session).row, told, environment), told)

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """Return no splits: a server does not serve the rows of its data set."""
        return []

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        raise unknown_split(split, [])

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        raise unknown_split(split, [])

    async def _told(self, worker: WorkerId, address: str) -> ServerInfo:
        """Return the server's description. It is requested once per worker."""
        return self._servers.get(worker) or await self._find(worker, address)

    async def _find(self, worker: WorkerId, address: str) -> ServerInfo:
        """Request the server's description.

        Raises:
            _NotYet: The server fails, as a starting server does.
            UpstreamError: The server is no resources server.
        """
        answer = await self._get(worker, address, "/openapi.json")
        if answer.status >= 500 or answer.status in _FULL:
            raise _NotYet(f"worker {worker} answered {answer.status} to /openapi.json")
        if answer.status != 200:
            raise UpstreamError(f"worker {worker} answered {answer.status} to /openapi.json: no NeMo Gym server")
        if len(self._servers) > SERVERS_MAX:
            self._servers.clear()
        told = self._servers[worker] = wire.server_info(read(answer.body, "/openapi.json"))
        return told

    # -- an episode -----------------------------------------------------------------------------------------------

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """Seed an episode. The handle contains its row and its cookie."""
        row = wire.row_of(setup)
        told = await self._told(session.worker, session.address)
        operation = "reset" if told.is_gym else "seed_session"
        exchange = await self._send(session, operation, row, silence_s=environment.timeouts.setup_s)
        begun = Begun(_cookie_of(exchange.headers), row)
        answer = await read_answer(exchange)
        if answer.status != 200:
            raise _refused(answer)
        if told.is_gym:
            observation, closes = wire.read_reset(answer.body)
            begun = replace(begun, observation=observation, closes=closes)
        handle = begun.handle()
        if (size := len(handle.encode())) > MAX_HANDLE_BYTES:
            await self._end(session, begun, told)
            raise InvalidRequest(f"row: with {size} bytes it is larger than {MAX_HANDLE_BYTES} bytes")
        self.tallies.begin(session)
        return replace(session, handle=handle)

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """Return the input of the row as blocks."""
        return observations.read_prompt(wire.conversation(_begun(session)))

    async def messages(self, session: Session, environment: Environment) -> bytes:
        """Return the input of the row as ORS messages."""
        said = observations.read_messages(wire.conversation(_begun(session)))
        return dump([{"role": role, "blocks": answers.blocks(blocks), "detail": None} for role, blocks in said])

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """Call a tool, or end the episode with the agent's final text. A Gymnasium server takes each as a step."""
        begun = _begun(session)
        told = await self._told(session.worker, session.address)
        tools = wire.tools_of(begun.row, told, environment)
        wanted = wire.read_action(action, tools)
        tallies, is_complete = await self.tallies.of_all_replicas(session)
        if any(tally.finished for tally in tallies):
            return finished(action.name or tools[-1].name)
        if told.is_gym:
            number = 1 + sum(tally.steps for tally in tallies)
            output = wire.message_items(wanted) if isinstance(wanted, str) else wire.call_items(*wanted, number)
            return wire.read_step(await self._judged(session, environment, begun, "step", output))
        notes = [note for tally in tallies for note in tally.notes]
        if isinstance(wanted, str):
            if not is_complete:
                raise SessionFailed("the calls of the episode are not all known, so it cannot be verified")
            calls = sorted(map(json.loads, notes), key=lambda call: call[0])
            output = [*(item for _, items in calls for item in items), *wire.message_items(wanted)]
            return await self._verify_once(session, environment, begun, output) or finished(tools[-1].name)
        number = 1 + len(notes)
        name, arguments = wanted
        answer = await self._post(session, name, dict(arguments), begun, silence_s=environment.timeouts.call_s)
        result, text = wire.read_call(answer.status, answer.body)
        note = encode([number, [*wire.call_items(name, arguments, number), wire.output_item(number, text)]])
        if sum(map(len, (note, *notes))) > MAX_CALLS_BYTES:
            raise SessionFailed(
                f"the episode's calls and outputs have more than {MAX_CALLS_BYTES} bytes, so they cannot be verified"
            )
        self.tallies.note(session, note)
        return result

    async def _verify_once(
        self, session: Session, environment: Environment, begun: Begun, output: list[Json]
    ) -> StepResult | None:
        """Verify the episode; return None if it is verified already, here or by another replica."""
        is_first = False

        async def verify() -> StepResult:
            nonlocal is_first
            is_first = True
            return wire.read_verify(await self._judged(session, environment, begun, "verify", output), begun.row)

        result = await self.calls.run(session, "verify", verify, within_s=environment.timeouts.call_s, key=_VERIFY_KEY)
        return result if is_first else None

    async def _judged(
        self, session: Session, environment: Environment, begun: Begun, operation: str, output: list[Json]
    ) -> bytes:
        """Send the agent's *output* to be judged, and return the response.

        Raises:
            AuthorFault: The server refused it, although the agent has no part in the rest of the request.
        """
        body = wire.with_response(begun.row, output)
        answer = await self._post(session, operation, body, begun, silence_s=environment.timeouts.call_s)
        if answer.status != 200:
            raise author_fault(f"{operation}: {refusal(answer.status, answer.body)[0]}", "reward")
        return answer.body

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Tell the server that the episode has ended, and return its summary over all replicas.

        Raises:
            UpstreamError: A step that may change the server's state still runs.
        """
        if not session.handle:
            return None
        try:
            await self._end(session, _begun(session), await self._told(session.worker, session.address))
            if not await self.calls.settle(session, within_s=SETTLE_S):
                raise UpstreamError("a step is still under way, although its episode was closed")
            return await self.tallies.summary(session)
        finally:
            self.forget(session)

    async def _end(self, session: Session, begun: Begun, told: ServerInfo) -> None:
        """Release the server's resources, as far as it offers this. Raises ``UpstreamError`` if it refuses."""
        body: Json = {}
        if not told.is_gym:
            body = {"resources_session_id": session.lease, "episode_id": session.lease}
        elif not begun.closes:
            return
        operation = "close" if told.is_gym else "close_session"
        answer = await self._post(session, operation, body, begun, silence_s=CLOSE_S)
        if answer.status != 200 and answer.status not in _ABSENT:
            raise UpstreamError(f"the server did not close the episode: {refusal(answer.status, answer.body)[0]}")

    async def aclose(self) -> None:
        """Cancel calls in progress."""
        await self.calls.aclose()

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _get(self, worker: WorkerId, address: str, target: str) -> Answer:
        request = Request(b"GET", target.encode(), ((b"accept", b"application/json"),))
        return await read_answer(await self._transport.send(worker, address, request, silence_s=ANSWER_S))

    async def _post(self, session: Session, operation: str, body: Json, begun: Begun, *, silence_s: float) -> Answer:
        return await read_answer(await self._send(session, operation, body, begun, silence_s=silence_s))

    async def _send(
        self, session: Session, operation: str, body: Json, begun: Begun | None = None, *, silence_s: float
    ) -> Exchange:
        headers = [(b"content-type", b"application/json"), (b"accept", b"application/json")]
        if begun is not None and begun.cookie:
            headers.append((b"cookie", begun.cookie.encode()))
        request = Request(b"POST", b"/" + quote(operation, safe="").encode(), tuple(headers), compact(body))
        return await self._transport.send(session.worker, session.address, request, silence_s=silence_s)


def _refused(answer: Answer) -> GatewayError:
    reason, _ = refusal(answer.status, answer.body)
    if answer.status in _FULL:
        return WorkerFull(reason)
    if answer.status in _MALFORMED:
        return InvalidRequest(f"the server refuses the row: {reason}")
    return author_fault(reason, "reset") if answer.status == 500 else UpstreamError(reason)


def _cookie_of(headers: Headers) -> str:
    """Return the cookies that a response sets, as the value of a ``Cookie`` header."""
    jar: SimpleCookie = SimpleCookie()
    for name, value in headers:
        if name.lower() == b"set-cookie":
            jar.load(value.decode("latin-1"))
    return "; ".join(f"{name}={one.coded_value}" for name, one in jar.items())


def _begun(session: Session) -> Begun:
    try:
        return Begun.of(session.handle)
    except (ValueError, KeyError, TypeError) as error:
        raise SessionNotFound(session.name) from error
