"""Upstreams, which speak a server's protocol to a worker.

One contract suite runs on every implementation (``tests/contract``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.episode import Action, Block, StepResult, Summary
from gateway.core.ids import SessionId
from gateway.core.ports.transport import Exchange, Headers
from gateway.core.session import Session, SessionSetup
from gateway.core.worker import Worker, WorkerSession, WorkerTasks


class WorkerUpstream(Protocol):
    """Asks a worker about itself and about its tasks."""

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return when *worker* answers as *environment* should; tries until the caller's deadline cancels it.

        Returns the sessions that it can hold at once if that is to be learned (``pool.learns_slots``) and it told,
        else 0.

        Raises:
            UpstreamError: it answers, but is not what it should be: waiting longer would not help.
        """

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if *worker*, which has been ready once, still answers; takes no room, and disturbs no session.

        With *busy_counts* one that works on a request from here may count as alive without an answer: its environment
        may hold up all that its server does.

        Raises:
            UpstreamError: it does not, or is not what it should be.
        """

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """The environment's tool list as JSON in ORS' form (``ListToolsOutput``)."""

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """The tasks that the worker knows by itself, by id; none where its protocol has no word for them."""

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """The splits of tasks that the worker has by itself; none where it has no tasks, or they are the gateway's."""

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """How many tasks a split of the worker's has. Raises ``UnknownSplit``."""

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Tasks of a split of the worker's, from index *start* up to, not including, *stop*: ``0 <= start <= stop``.

        Those beyond the end are left out. What is returned can be a ``SessionSetup``'s spec. Raises ``UnknownSplit``.
        """

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """What the worker tells of itself in its own protocol's words, for a front of the same one; ``{}``: nothing.

        OpenEnv: ``{"schema": …, "metadata": …}``. AReaL: the answer to ``task/info``.
        """

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """The worker's own list of sessions; None if its protocol has none.

        With *ids* at least those of them that it has: of tens of thousands a few may be asked for.
        """


class SessionUpstream(Protocol):
    """Runs sessions in workers. A request is sent once, and never again where it may have run."""

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> str:
        """Open the session in its worker; returns the handle by which any replica finds it again.

        Raises:
            AuthorFault: the author's code failed.
            InvalidRequest: the worker refuses the task, or would drop a part of it silently; with the reason.
            WorkerFull: it holds fewer sessions than was thought; nothing was opened.
            UpstreamError: it failed.
        """

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Close the session in its worker, waiting for its teardown. None if the worker does not know it.

        With *keeps* a successor of the same id is about to be opened in the same slot, by this replica, and what the
        session ran in may be kept for it. Closing this session once more, or the successor, gives that back.

        Raises:
            UpstreamError: its slot can't be trusted: the worker did not take the end, or a step still runs in it.
        """

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """How many steps the session has seen; None if the worker does not know it."""

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """What the environment itself shows of the session's state; empty where it has no word for that."""

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """What the agent is told first; waits for the task's setup until the caller's deadline cancels it.

        Raises:
            SessionNotFound: the worker does not know the session.
            AuthorFault: the setup failed, with its reason.
            UpstreamError: the worker failed.
        """

    async def act(
        self, session: Session, environment: Environment, action: Action, *, key: str | None = None
    ) -> StepResult:
        """Run *action* once; the same *key* and action again get the outcome of the first run.

        Raises:
            SessionNotFound: the worker does not know the session; nothing ran.
            CallConflict: *key* stands for another action.
            InvalidRequest: the worker can't read the action at all.
            AuthorFault, SessionFailed: the session has failed, and is over.
            UpstreamError: the worker failed; only ``UpstreamGone`` with ``sent`` False is sure not to have run.
        """

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Pass an ORS operation (``call``, ``prompt``, ``task_tools``, ``messages``, ``score_group``) on.

        *body* and the answer are bytes in ORS' form; *headers* are those of the trainer's request that matter to
        a worker.

        Raises:
            AuthorFault: the session has failed.
            SessionNotFound: the worker does not know the session; nothing ran.
            UpstreamError: as `Transport.send`.
        """


class Upstream(WorkerUpstream, SessionUpstream, Protocol):
    """One protocol towards workers."""


class FrameUpstream(Protocol):
    """Passes frames of the workers' own protocol: OpenEnv's."""

    async def pass_frame(self, session: Session, environment: Environment, message: bytes) -> bytes:
        """Pass a message of the worker's own protocol on and return its answer, both bytes for bytes.

        One frame, and the one that replies to it. An empty message asks for the reply to the reset that opened the
        session. A reply that tells of faults is a ``FaultReply``.

        Raises:
            SessionNotFound: the worker does not know the session; nothing ran.
            UpstreamError: as `SessionUpstream.act`.
        """
