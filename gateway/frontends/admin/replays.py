"""Plays recorded episodes again and compares the results: ``POST /admin/v1/episodes/{id}/replay`` and ``…/replays``.

A replay opens a session with the recorded task, seed, configuration and image, and sends the recorded actions one by
one, in the form in which they came. Its owner is `REPLAYER`, so it counts in no statistics of tasks and rewards.

A report judges rewards and ends apart from texts (`comparison`). A replay that the infrastructure broke judges nothing:
it is an error.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import re
import secrets
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.episode import Action, Summary
from gateway.core.errors import (
    GatewayError,
    InvalidRequest,
    PoolExhausted,
    SessionError,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.core.ids import REPLAYER, EnvironmentName
from gateway.core.json_text import dump
from gateway.core.outcomes import EpisodeOutcome, outcome_of, reward_of
from gateway.core.ports.step_log import REFERENCE, StepLog, StepLogQueries
from gateway.core.ports.store import WorkerStore
from gateway.core.session import SECRET_MARK, CloseReason, EpisodeRequest, SessionSetup
from gateway.core.task_name import TaskName
from gateway.core.validation import reason_of
from gateway.frontends.admin.comparison import END, REWARD, TEXT, Difference, differences
from gateway.frontends.admin.episodes import recorded_episode
from gateway.frontends.admin.replies import as_json, flagged, object_of, operator_of, queried
from gateway.frontends.admin.steps import result_of
from gateway.frontends.asgi import Attended, HungUp
from gateway.frontends.ors.app import STARTING_PAUSE_S, is_starting
from gateway.metrics import call_outcome
from gateway.sessions.service import ActiveSession, Sessions
from gateway.stores.step_log.encoding import as_logged

logger = logging.getLogger(__name__)

REPLAY_S: Final = 1_800.0
"""Maximum seconds of one replay, including the wait for a slot."""
END_S: Final = 30.0
"""Seconds that a replay waits for the teardown of its session."""
MAX_BODY_BYTES: Final = 64 * 2**20
MAX_RESULT_BYTES: Final = 64 * 2**20
MAX_DIFFERENCES: Final = 20
"""Maximum number of differences in a report. Rewards and ends come first."""
_PLAYED: Final = frozenset(("ok", "author_fault"))
"""Outcomes of calls that a replay repeats. Later calls of the episode depend on what another outcome left behind."""
_JUDGED: Final = frozenset(("author_fault", "refused"))
"""Outcomes of failed calls of a replay that are results, because the environment's code decided them."""
_BLOB: Final = re.compile(re.escape(REFERENCE) + "([0-9a-f]{64})")


class _Begin(BaseModel):
    """How a recorded episode was opened."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    spec: dict[str, Any] = {}
    config: dict[str, Any] | None = None
    split: str = ""
    index: int | None = None
    toolset: str = ""
    episode: str = ""
    variant: str | None = None


class _Step(BaseModel):
    """A recorded call. Its result is in the extra fields."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    operation: Literal["prompt", "call", "score_group"]
    number: int
    outcome: str
    action: Any = None
    repeated: bool = False
    streamed: Any = None
    """True if the result came as a stream."""

    @property
    def only_asks(self) -> bool:
        """True if the call asked for the result of an earlier call."""
        return isinstance(self.action, dict) and self.action.keys() == {"task_id"}


class _End(BaseModel):
    model_config = ConfigDict(extra="ignore", defer_build=True)

    steps: int | None = None


class _Recorded(BaseModel):
    """A recorded episode, as ``GET /admin/v1/episodes/{id}`` shows it."""

    model_config = ConfigDict(extra="ignore", defer_build=True)

    id: str = Field(min_length=1)
    environment: str
    split: str | None = None
    task: str | None = None
    task_digest: str | None = None
    image: str | None = None
    scorer: str | None = None
    seed: int | None = None
    protocol: str | None = None
    reason: str | None = None
    outcome: str | None = None
    reward: float | None = None
    unexpected_error: str | None = None
    begin: _Begin
    end: _End | None = None
    steps: list[_Step]

    @property
    def accept(self) -> bytes:
        """The form in which the trainer asked for results over ORS: a stream if any result came as one.

        The log keeps long results of streams without their form.
        """
        is_streamed = any(step.streamed is True for step in self.steps)
        return b"text/event-stream" if is_streamed else b"application/json"

    def calls(self) -> Iterator[_Step]:
        """Yield the calls that ran, each once. Of a call that a trainer repeated, it is the one with a result."""
        answered = {step.number: step for step in reversed(self.steps) if step.outcome in _PLAYED}
        for step in self.steps:
            if step.operation == "prompt":
                yield step
            elif not step.repeated and step.outcome != "refused" and not step.only_asks:
                yield answered.get(step.number, step)

    def is_frame(self, step: _Step) -> bool:
        """Return True if *step* was a frame of OpenEnv's protocol; an empty one asked for the first observation."""
        frame = isinstance(step.action, dict) and step.action.keys() == {"frame", "data"}
        return self.protocol == "openenv" and (frame or step.action == "")

    def is_whole(self, step: _Step) -> bool:
        """Return True if the action of *step* can be sent: a long one is recorded as text that was cut off."""
        action = step.action
        if step.operation == "prompt":
            return action in (None, "") or self.is_frame(step)
        if not isinstance(action, dict):
            return False
        if "tool" in action:
            return isinstance(action["tool"], str) and (self.protocol == "ors" or isinstance(action.get("input"), dict))
        is_known = isinstance(action.get("text"), str) or isinstance(action.get("fields"), dict)
        return self.protocol == "ors" or is_known or self.is_frame(step) or step.operation == "score_group"


class ReplayRoutes:
    """Handlers of the routes. The operators' frontend mounts `routes`."""

    def __init__(
        self, *, sessions: Sessions, catalog: Catalog, store: WorkerStore, log: StepLog, queries: StepLogQueries
    ) -> None:
        self._sessions = sessions
        self._catalog = catalog
        self._store = store
        self._log = log
        self._queries = queries

    def routes(self) -> list[Route]:
        """Return the routes."""
        return [
            Route("/admin/v1/episodes/{id}/replay", self._replay_logged, methods=["POST"]),
            Route("/admin/v1/replays", self._replay_sent, methods=["POST"]),
        ]

    async def _replay_logged(self, request: Request) -> Response:
        """Replay an episode of the step log."""
        query = queried(request, "idle", "other_image")
        document = await recorded_episode(self._log, self._queries, request.path_params["id"])
        return await self._reported(request, document, query)

    async def _replay_sent(self, request: Request) -> Response:
        """Replay the episode in the body, which is a line of an export, or what ``GET …/episodes/{id}`` returned."""
        query = queried(request, "idle", "other_image")
        document = await object_of(request, MAX_BODY_BYTES)
        signed = document.get("episode")
        return await self._reported(request, signed if isinstance(signed, dict) else document, query)

    async def _reported(self, request: Request, document: Mapping[str, Any], query: Mapping[str, str]) -> Response:
        recorded, other_image = _read(document), flagged(query, "other_image")
        environment = self._environment(recorded, other_image=other_image)
        if flagged(query, "idle"):
            await self._refuse_while_others_wait(environment)
        report: dict[str, Any] | None = None
        async with Attended(request.scope, request.receive) as operator:
            try:
                with anyio.fail_after(REPLAY_S):
                    report = await self._replayed(recorded, environment, other_image=other_image)
            except TimeoutError:
                raise UpstreamTimeout(
                    f"the replay of episode {recorded.id!r} took longer than {REPLAY_S:g} s"
                ) from None
        if operator.left or report is None:
            raise HungUp
        told = (recorded.id, report["replay"], report["is_same"], operator_of(request))
        logger.info("episode_replayed episode=%s replay=%s same=%s by=%s", *told)
        return as_json(report)

    # -- what is replayed -----------------------------------------------------------------------------------------

    def _environment(self, recorded: _Recorded, *, other_image: bool) -> Environment:
        """Return the environment, or the variant of it, in which the episode was played.

        Raises:
            UnknownEnvironment: There is no such environment any more.
            InvalidRequest: It has another image now, and *other_image* is False.
        """
        environment = self._catalog.wanted(recorded.environment)
        if recorded.begin.variant is not None:
            environment = self._catalog.known.get(EnvironmentName(recorded.begin.variant), environment)
        if recorded.image and recorded.image != environment.image_id and not other_image:
            raise InvalidRequest(
                f"episode {recorded.id!r} was played in the image {recorded.image}, and {environment.name!r} now has "
                f"{environment.image_id or 'none'}: start that image again, or replay with other_image=true"
            )
        return environment

    async def _refuse_while_others_wait(self, environment: Environment) -> None:
        load = (await self._store.load()).get(environment.name)
        if load is not None and load.waiting:
            raise PoolExhausted(f"{load.waiting} openings wait for a slot of {environment.name!r}", retry_after_s=2.0)

    # -- the replay -----------------------------------------------------------------------------------------------

    async def _replayed(self, recorded: _Recorded, environment: Environment, *, other_image: bool) -> dict[str, Any]:
        """Play the episode and return the report.

        Raises:
            InvalidRequest: Another version of the scorer would judge it, and *other_image* is False.
        """
        begin, name = recorded.begin, f"replay-{secrets.token_hex(8)}"
        setup = SessionSetup(
            spec=await self._restored(begin.spec),
            task=TaskName.of_label(recorded.task or "", recorded.task_digest or "").key,
            seed=recorded.seed,
            config=await self._restored(begin.config),
            split=begin.split,
            index=begin.index,
            episode=begin.episode,
            toolset=begin.toolset,
            of_split=recorded.split or "",
        )
        try:
            session = await self._sessions.open(
                EpisodeRequest(
                    owner=REPLAYER,
                    name=name,
                    environment=environment,
                    setup=setup,
                    fingerprint=name,
                    episode=begin.episode,
                    protocol="replay",
                )
            )
            scorer = session.session.scorer
            if recorded.scorer and recorded.scorer != scorer and not other_image:
                raise InvalidRequest(
                    f"episode {recorded.id!r} was judged by the scorer {recorded.scorer}, and {environment.name!r} now "
                    f"has {scorer or 'an unknown one'}: start that scorer again, or replay with other_image=true"
                )
            found, count, stopped = await self._compared(recorded, session)
            summary = await self._sessions.close(REPLAYER, name)
            reward, ends = _compared_ends(recorded, summary)
        finally:
            with anyio.move_on_after(END_S, shield=True):
                await self._sessions.end(REPLAYER, name, CloseReason.DELETED, wait_s=END_S)
        if stopped is None and recorded.reason == CloseReason.DELETED.value:
            found += [(None, one) for one in ends]
        kinds = {one.kind for _, one in found}
        found.sort(key=lambda each: each[1].kind == TEXT)
        return {
            "episode": recorded.id,
            "replay": session.session.lease,
            "environment": recorded.environment,
            "task": recorded.task,
            "task_digest": recorded.task_digest,
            "scorer": scorer,
            "is_same": not kinds & {REWARD, END},
            "differs_in": [kind for kind in (REWARD, END, TEXT) if kind in kinds],
            "steps": count,
            "stopped": stopped,
            "reward": {"recorded": recorded.reward, "replayed": reward},
            "differences": [{"number": number, **one._asdict()} for number, one in found[:MAX_DIFFERENCES]],
        }

    async def _compared(
        self, recorded: _Recorded, session: ActiveSession
    ) -> tuple[list[tuple[int | None, Difference]], int, dict[str, Any] | None]:
        """Play the calls.

        Return the differences, each with the number of its step, the number of steps, and the call at which the replay
        had to stop. Raises the errors of calls that the infrastructure broke.
        """
        found: list[tuple[int | None, Difference]] = []
        count = 0
        for step in recorded.calls():
            if step.outcome not in _PLAYED:
                known = step.model_extra or {}
                return found, count, {"number": step.number, "outcome": step.outcome, "error": known.get("error")}
            known, ended, action = step.model_extra or {}, None, await self._restored(step.action)
            try:
                result = await _played(recorded, session, step, action)
            except GatewayError as error:
                if call_outcome(error) not in _JUDGED:
                    raise _broken(recorded, f"step {step.number} failed with {error.code}: {error.detail}") from error
                result = {"error": f"{error.code}: {error.detail}"}
                ended = result["error"] if isinstance(error, SessionError) else None
            count += step.operation != "prompt"
            found += [(step.number, one) for one in differences(known, result)]
            if ended is not None:
                if known.get("error") != ended:
                    found.append((step.number, Difference(END, "error", known.get("error"), ended)))
                break
        return found, count, None

    async def _restored(self, value: Any) -> Any:
        """Return *value* with the data of blobs in place of the references to them. Raises ``InvalidRequest``."""
        if isinstance(value, dict):
            return {name: await self._restored(one) for name, one in value.items()}
        if isinstance(value, list):
            return [await self._restored(one) for one in value]
        if isinstance(value, str):
            for digest in set(_BLOB.findall(value)):
                data = await self._queries.blob(digest)
                if data is None:
                    raise InvalidRequest(f"the blob {digest}, which an action contains, is not stored any more")
                value = value.replace(REFERENCE + digest, base64.b64encode(data).decode())
        return value


def _read(document: Mapping[str, Any]) -> _Recorded:
    """Read a recorded episode.

    Raises:
        InvalidRequest: The document is not one, or its record is not complete enough for a replay.
    """
    try:
        recorded = _Recorded.model_validate(document)
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'episode'}: {reason_of(one, _Recorded)}" for one in error.errors()[:10]
        )
        raise InvalidRequest(f"not a recorded episode: {told}") from None
    if recorded.id.startswith(SECRET_MARK):
        raise InvalidRequest(f"episode {recorded.id!r} had secrets, which are not recorded: it cannot be replayed")
    count = len({step.number for step in recorded.steps if step.operation == "call"})
    ran = recorded.end.steps if recorded.end is not None else None
    if ran and count < ran:
        raise InvalidRequest(
            f"episode {recorded.id!r} had {ran} steps, of which {count} are recorded: it cannot be replayed. "
            '[step_log] mode = "full" in its environment.toml records all steps'
        )
    for step in recorded.steps:
        if step.outcome in _PLAYED and not recorded.is_whole(step):
            raise InvalidRequest(f"step {step.number} of episode {recorded.id!r}: the recorded action is not complete")
    return recorded


def _action(action: Mapping[str, Any]) -> Action:
    if "tool" in action:
        return Action(name=action["tool"], arguments=action["input"])
    return Action(text=action["text"]) if "text" in action else Action(fields=action["fields"])


def _compared_ends(recorded: _Recorded, summary: Summary | None) -> tuple[float | None, list[Difference]]:
    """Return the reward of a replay, and how its end differs from the recorded one.

    Raises:
        UpstreamError: The infrastructure ended the replay.
    """
    outcome = outcome_of(CloseReason.DELETED, summary)
    is_lost = summary is None and recorded.outcome not in (None, EpisodeOutcome.UNPLAYED.value)
    if outcome is EpisodeOutcome.INFRASTRUCTURE or is_lost:
        raise _broken(recorded, "its worker, or a resource of its session, was lost")
    reward, error = reward_of(outcome, summary), (summary and summary.unexpected_error) or None
    ends = []
    if recorded.reward != reward:
        ends.append(Difference(REWARD, "reward", recorded.reward, reward))
    if recorded.outcome not in (None, outcome.value):
        ends.append(Difference(END, "outcome", recorded.outcome, outcome.value))
    if bool(recorded.unexpected_error) != bool(error):  # only one of the rewards counts; the texts have paths and lines
        ends.append(Difference(END, "unexpected_error", recorded.unexpected_error, error))
    return reward, ends


def _broken(recorded: _Recorded, why: str) -> UpstreamError:
    return UpstreamError(f"the replay of episode {recorded.id!r} broke, which shows nothing about its task: {why}")


async def _played(recorded: _Recorded, session: ActiveSession, step: _Step, action: Any) -> dict[str, Any]:
    """Send the *action* of a recorded call, and return its result, in the form of ``steps.result_of``."""
    timeouts = session.environment.timeouts
    reply: Any
    if recorded.is_frame(step):
        frame = b"" if action == "" else dump({"type": action["frame"], "data": action["data"]})
        reply = await session.pass_frame(frame, within_s=timeouts.call_s)
    elif step.operation == "prompt":
        reply = await session.prompt(within_s=timeouts.setup_s)
    elif step.operation == "call" and recorded.protocol != "ors":
        reply = await session.act(_action(action), within_s=timeouts.call_s)
    else:
        body = {"name": action["tool"], "input": action.get("input")} if "tool" in action else action
        reply = await _forwarded(session, step.operation, dump(body), recorded.accept)
    found = result_of(as_logged(reply, _digest))
    found.pop("call_id", None)
    return found


async def _forwarded(session: ActiveSession, operation: str, body: bytes, accept: bytes) -> bytes:
    while True:  # until the setup of the session is done; the replay has a deadline
        headers = [(b"content-type", b"application/json"), (b"accept", accept)]
        exchange = await session.forward(operation, body=body, headers=headers)
        try:
            if not is_starting(exchange):
                return await exchange.read(MAX_RESULT_BYTES)
        finally:
            await exchange.aclose()
        await asyncio.sleep(STARTING_PAUSE_S)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
