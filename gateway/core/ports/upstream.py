"""The interfaces of upstreams, each of which speaks a server's protocol to a worker.

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
    """Queries a worker about itself and its tasks."""

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return when *worker* answers as *environment* requires; retry until the caller's deadline cancels it.

        Returns:
            The sessions that the worker can hold concurrently, if ``pool.learns_slots`` is set and it reports them;
                else 0.

        Raises:
            UpstreamError: The worker's answer does not fit *environment*, so that waiting longer would not help.
        """

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if *worker*, which was ready before, still answers; take no slot and disturb no session.

        With *busy_counts* a worker that is processing a request from this replica may count as alive without an answer.
        Its environment may block its whole server.

        Raises:
            UpstreamError: The worker does not answer, or its answer does not fit *environment*.
        """

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """Return the environment's tool list as JSON in ORS format (``ListToolsOutput``)."""

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """Return the worker's own tasks by id; return no tasks if its protocol does not support them."""

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """Return the worker's own splits.

        Return an empty list if the worker has no tasks, or the gateway itself holds them.
        """

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """Return the number of tasks in a split of the worker. Raises ``UnknownSplit``."""

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Return tasks of a worker's split from *start* up to, but not including, *stop*: ``0 <= start <= stop``.

        Indices beyond the end are left out. Each task can be a ``SessionSetup``'s spec. Raises ``UnknownSplit``.
        """

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """Return the worker's description of itself, for a frontend of the same protocol; return {} if there is none.

        OpenEnv: ``{"schema": …, "metadata": …, "tools": …}``. AReaL: the answer to ``task/info``.
        """

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """Return the worker's own list of sessions; return None if its protocol has no list.

        *ids* limits the query, because a worker may have tens of thousands of sessions. The answer then contains at
        least the requested sessions that the worker has.
        """


class SessionUpstream(Protocol):
    """Runs sessions in workers. A request that may have run is never sent again."""

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """Open the session in its worker.

        Return it with the handle by which any replica finds it again, and with the version of its scorer, if the worker
        reports one.

        Raises:
            AuthorFault: The author's code failed.
            InvalidRequest: The worker refuses the task, or would silently drop a part of it; the message gives the
                reason.
            WorkerFull: The worker holds fewer sessions than assumed; nothing was opened.
            UpstreamError: The worker failed.
        """

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Close the session in its worker and wait for its teardown; return None if the worker does not know it.

        *keeps*: this replica is about to open a successor of the same id in the same slot. The session's resources may
        then be kept for it. A second close of this session, or a close of the successor, releases them.

        Raises:
            UpstreamError: The worker did not confirm the end, or a step still runs; the slot can't be trusted.
        """

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """Return the number of the session's steps; return None if the worker does not know the session."""

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """Return the session state that the environment itself shows; return {} if it shows none."""

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """Return the agent's first input; wait for the task's setup until the caller's deadline cancels it.

        Raises:
            SessionNotFound: The worker does not know the session.
            AuthorFault: The setup failed, for the given reason.
            UpstreamError: The worker failed.
        """

    async def act(
        self,
        session: Session,
        environment: Environment,
        action: Action,
        *,
        key: str | None = None,
        within_s: float | None = None,
    ) -> StepResult:
        """Run *action* once; a repeated *key* and action get the outcome of the first run.

        *within_s*: seconds that the caller waits; tools with a limit of their own end earlier.

        Raises:
            SessionNotFound: The worker does not know the session; nothing ran.
            CallConflict: *key* belongs to another action.
            InvalidRequest: The worker can't read the action at all.
            AuthorFault, SessionFailed: The session has failed, and is over.
            UpstreamError: The worker failed. Only ``UpstreamGone`` with ``sent`` False guarantees that nothing ran.
        """

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Forward an ORS operation (``call``, ``prompt``, ``task_tools``, ``messages``, ``score_group``).

        *body* and the response are bytes in ORS format. *headers* are the headers of the trainer's request that matter
        to a worker.

        Raises:
            AuthorFault: The session has failed.
            SessionNotFound: The worker does not know the session; nothing ran.
            UpstreamError: See `Transport.send`.
        """


class EpisodeResults(Protocol):
    """Keeps the results of episodes that their environments have ended, before the trainers get them."""

    async def keep(self, session: Session, summary: Summary) -> None:
        """Keep the *summary* of a finished episode; ignore any other. Returns soon, also without a store."""


class Upstream(WorkerUpstream, SessionUpstream, Protocol):
    """The client side of one protocol towards workers."""


class FrameUpstream(Protocol):
    """Forwards frames of the workers' own protocol, which is OpenEnv."""

    async def pass_frame(self, session: Session, environment: Environment, message: bytes) -> bytes:
        """Forward a message of the worker's own protocol unchanged and return the unchanged reply.

        A message is one frame, and so is the reply. An empty message requests the reply to the reset that opened the
        session.

        Raises:
            SessionNotFound: The worker does not know the session; nothing ran.
            UpstreamError: See `SessionUpstream.act`.
        """
