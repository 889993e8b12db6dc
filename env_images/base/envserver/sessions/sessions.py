"""Sessions: created once per id, set up in the background, and torn down by the first deletion or expiry.

Opening and teardown run in their own tasks. A client that disconnects neither stops nor repeats them.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any

from envserver.content import blocks_of, prompt_of, written_prompt
from envserver.environment import Environment, Task
from envserver.errors import AuthorCancelled, Refused, describe, message_of
from envserver.execution.runner import Runner
from envserver.http.bodies import Create, secrets_of
from envserver.http.json_text import encode
from envserver.sandboxing import Sandboxing
from envserver.schema.environment_types import Kind
from envserver.sessions.calls import Calls
from envserver.sessions.session import Session, deleted
from envserver.tasks.registered import Registered
from envserver.tasks.sets import TaskSets
from envserver.tools import task_tools_of

logger = logging.getLogger("envserver")
TEARDOWN_S = 30.0
"""Seconds that ``/delete`` waits for a teardown, and a teardown for code that cannot be cancelled."""
ENDED_KEPT = 4096
"""Maximum number of remembered leases that have ended. If a replica dies between the end of a session in its worker and
the record of its reward, another replica repeats the ``/delete`` up to a minute later. Also, the ``/create`` of a lease
can arrive after its ``/delete``, on another connection."""


class Sessions:
    """The sessions of a server. Used from the server's thread only."""

    def __init__(
        self,
        *,
        kinds: Mapping[str, Kind],
        tasks: Mapping[str, TaskSets],
        runner: Runner,
        calls: Calls,
        slots: int,
        clock: Callable[[], float],
        sandboxing: Mapping[str, Sandboxing],
        registered: Registered,
    ) -> None:
        """
        Args:
            kinds: Environment kinds by name. The first is the default. *tasks* has the same keys.
            sandboxing: Sandboxes of the kinds that need them.
            slots: Maximum number of sessions, including sessions in teardown. 0 means no limit.
        """
        self._kinds = kinds
        self._default = next(iter(kinds.values()))
        self._tasks = tasks
        self._runner = runner
        self._calls = calls
        self._slots = slots
        self._sandboxing = sandboxing
        self._registered = registered
        self._clock = clock
        self._open: dict[str, Session] = {}
        self._closing: dict[int, Session] = {}  # by serial number: a new session may reuse the id meanwhile
        self._ended: dict[str, dict[str, Any] | None] = {}  # by lease, the oldest first; None: never began
        self._serial = 0
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    # -- finding

    def get(self, sid: str) -> Session:
        """
        Raises:
            Refused: 404: There is no such session, or it has ended.
        """
        session = self._open.get(sid)
        if session is None:
            raise Refused(404, "Active environment not found")
        return session

    def rows(self, ids: Iterable[str] | None = None) -> list[dict[str, Any]]:
        """Describe the open sessions, the oldest first. With *ids*, describe only the open sessions among them."""
        now = self._clock()
        if ids is None:
            return [session.row(now) for session in self._open.values()]
        return [self._open[sid].row(now) for sid in ids if sid in self._open]

    async def check_sandboxes(self) -> None:
        """Wait until sandboxes are ready for every environment that needs them.

        Raises:
            Refused: 503: Sandboxes are unavailable. The detail states the reason and the remedy.
        """
        for sandboxing in self._sandboxing.values():
            if reason := await sandboxing.refusal():
                raise Refused(503, reason)

    # -- opening

    def create(self, sid: str, create: Create) -> Session:
        """Start a session, or return the existing session on a retry.

        Its ``opened`` is set when ``/create`` can be answered.

        Raises:
            Refused: 400, 404, 410 (this lease has already ended) or 429. No session was created.
        """
        if create.lease in self._ended:
            raise deleted()
        existing = self._open.get(sid)
        if existing is not None and _is_other(existing, create.lease):
            self._close(existing)
        elif existing is not None:
            if existing.create.digest != create.digest:
                raise Refused(400, "Session already exists")
            existing.note = create.note
            return existing
        kind = self._kind(create.env_name)
        if create.split is not None:
            self._tasks[kind.name].check_split(create.split)
        secrets = secrets_of(create.secrets_header, create.secrets)
        if create.toolset_name is not None:
            raise Refused(400, f"unknown toolset {create.toolset_name!r}; valid options are []")
        if self._slots and len(self._open) + len(self._closing) >= self._slots:
            raise Refused(429, "no free slot", {"Retry-After": "1"})
        self._serial += 1
        session = self._open[sid] = Session(
            sid=sid,
            kind=kind,
            create=replace(create, secrets=secrets, secrets_header=None),
            serial=self._serial,
            seed=int.from_bytes(os.urandom(4)) >> 1 if create.seed is None else create.seed,
            note=create.note,
            created_at=self._clock(),
        )
        self._begin(session)
        return session

    def _kind(self, name: str | None) -> Kind:
        if name is None:
            return self._default
        kind = self._kinds.get(name.lower())
        if kind is None:
            raise Refused(404, f"unknown environment {name!r}")
        return kind

    def _begin(self, session: Session) -> None:
        sandboxing = self._sandboxing.get(session.kind.name)
        spec = session.create.task_spec
        is_checked = session.kind.checks_tasks and session.create.is_inline
        has_wait = session.kind.has_init or is_checked or (sandboxing is not None and not sandboxing.is_ready)
        if spec is not None and not has_wait and not session.create.is_reference:  # /create answers immediately
            session.task = Task(spec)
            session.environment = self._prepared(session)
            session.opened.set()
            session.setup = self._spawn(self._set_up(session))
        else:
            session.setup = self._spawn(self._open_and_set_up(session))

    async def _open_and_set_up(self, session: Session) -> None:
        try:
            sandboxing = self._sandboxing.get(session.kind.name)
            if sandboxing is not None and (reason := await sandboxing.refusal()):
                raise Refused(500, reason)
            session.task = await self._task(session.kind, session.create)
            if session.kind.checks_tasks and session.create.is_inline:
                await self._check(session, session.task)
            environment = self._prepared(session)
            # Set before the constructor runs, so that ``close`` can undo a partial construction.
            session.environment = environment
            if session.kind.has_init:
                # mypy: a subclass's constructor may require arguments. The author then reads the TypeError.
                await self._runner.run(session.place, environment.__init__)  # type: ignore[misc]
        except Refused as refusal:
            self._discard(session, refusal)
        except Exception as error:  # the author's code: its failure is this session's answer
            logger.warning("open_failed environment=%s error=%s", session.kind.name, type(error).__name__)
            logger.debug("open_traceback", exc_info=error)
            session.note_fault(error, "constructor" if session.environment is not None else "get_task")
            session.failure = describe(error)
            self._discard(session, session.refusal())
        else:
            session.opened.set()
            await self._set_up(session)

    async def _check(self, session: Session, task: Task) -> None:
        try:
            await self._runner.run(session.place, session.kind.cls.check_task, task)
        except ValueError as error:
            raise Refused(400, message_of(error)) from error

    async def _task(self, kind: Kind, create: Create) -> Task:
        if create.task_spec is not None and create.is_reference:
            return Task(await self._registered.resolve(kind, create.task_spec))
        if create.task_spec is not None:
            return Task(create.task_spec)
        assert create.split is not None  # Create holds exactly one of the two
        assert create.index is not None
        spec = await self._tasks[kind.name].get(create.split, create.index)
        return Task(spec, task_id=f"{create.split}-{create.index}")

    def _prepared(self, session: Session) -> Environment:
        assert session.task is not None
        environment = session.kind.cls.__new__(session.kind.cls)
        environment.task = session.task
        environment.seed = session.seed
        environment.config = session.create.config or {}
        environment.secrets = dict(session.create.secrets or {})  # the author may change it
        return environment

    def _discard(self, session: Session, refusal: Refused) -> None:
        session.open_refusal = refusal
        if self._open.get(session.sid) is session:
            self._close(session)
        session.opened.set()

    async def _set_up(self, session: Session) -> None:
        environment, kind = session.environment, session.kind
        assert environment is not None
        place = "reset"
        try:
            prompt: Any = None
            if kind.has_reset:
                prompt = await self._run(session, environment.reset, session.task, seed=session.seed)
            await self._write_opening(session, environment, prompt)
            if kind.has_task_tools:
                place = "task_tools"
                further = await self._run(session, environment.task_tools, session.task)
                session.task_tools = task_tools_of(further)
                session.task_tools_json = kind.list_tools(list(session.task_tools.values()))
        except Exception as error:  # the author's code: its failure is this session's answer
            if session.state == "closed":
                return
            logger.warning("setup_failed environment=%s error=%s", kind.name, type(error).__name__)
            logger.debug("setup_traceback", exc_info=error)
            session.note_fault(error, place)
            session.failure = describe(error)
            session.settle("failed")
        else:
            if session.state == "closed":
                return
            session.settle("ready")
        session.used_at = self._clock()
        self._calls.settle(session)

    async def _write_opening(self, session: Session, environment: Environment, prompt: Any) -> None:
        if session.kind.has_messages:
            messages = list(await self._run(session, environment.messages))
            session.messages_json = encode([message.wire() for message in messages])
            blocks = prompt_of(messages) if prompt is None else blocks_of(prompt)
        elif prompt is None:
            raise TypeError("reset returned None; expected a text or blocks")
        else:
            blocks = blocks_of(prompt)
        written = written_prompt(blocks)
        session.prompt_json = encode(written)
        if not session.messages_json:
            session.messages_json = encode([{"role": "user", "blocks": written, "detail": None}])

    async def _run(self, session: Session, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if session.state == "closed":
            raise AuthorCancelled("session deleted")
        return await self._runner.run(session.place, hook, *args, **kwargs)

    # -- ending

    async def delete(self, sid: str, *, lease: str = "") -> dict[str, Any] | None:
        """End a session and wait for its teardown. Return its summary, or None if there is no such session.

        With *lease*, end only the session of this lease, because a newer session may use the same id. A repeated call
        returns the same summary. If the lease has no session yet, its later creation is refused. The client has given
        up that opening and would never end it.
        """
        session = self._open.get(sid)
        if session is not None and not _is_other(session, lease):
            self._close(session)
        else:
            ended = (one for one in reversed(self._closing.values()) if one.sid == sid and not _is_other(one, lease))
            session = next(ended, None)
        if session is None:
            self._remember(lease, self._ended.get(lease))
            return self._ended.get(lease)
        summary = self._ended.get(session.create.lease) or session.summary(self._clock())
        self._remember(session.create.lease, summary)
        assert session.teardown is not None
        await asyncio.wait((session.teardown,), timeout=TEARDOWN_S)
        if faults := session.tell_faults():
            summary["faults"] = [fault._asdict() for fault in faults]
        return summary

    def _remember(self, lease: str, summary: dict[str, Any] | None) -> None:
        if lease:
            self._ended[lease] = summary
            if len(self._ended) > ENDED_KEPT:
                del self._ended[next(iter(self._ended))]

    def reap(self, idle_s: float) -> int:
        """End the sessions that were idle for *idle_s* seconds. Return their number."""
        horizon = self._clock() - idle_s
        idle = [session for session in self._open.values() if not session.is_busy and session.used_at <= horizon]
        for session in idle:
            logger.info("session_idle environment=%s idle_s=%.0f", session.kind.name, idle_s)
            self._close(session)
        return len(idle)

    async def close_all(self, *, timeout_s: float) -> None:
        """End all sessions. Abort their running calls when the teardowns are done or *timeout_s* has passed."""
        ended = [*self._open.values(), *self._closing.values()]
        for session in list(self._open.values()):
            self._close(session)
        teardowns = [session.teardown for session in ended if session.teardown is not None]
        if teardowns:
            await asyncio.wait(teardowns, timeout=timeout_s)
        for session in ended:
            self._calls.abort(session, "the server is shutting down")

    def _close(self, session: Session) -> None:
        del self._open[session.sid]
        session.settle("closed")
        self._calls.settle(session)
        self._closing[session.serial] = session
        session.teardown = self._spawn(self._tear_down(session))

    async def _tear_down(self, session: Session) -> None:
        setup = session.setup
        if setup is not None and not setup.done():
            if session.place.cancel is not None:
                session.place.cancel()
            await asyncio.wait((setup,), timeout=TEARDOWN_S)
        if session.environment is not None and session.kind.has_close:
            try:
                await self._runner.run(session.place, session.environment.close)
            except Exception as error:  # noqa: BLE001  # the author's code: the session ends all the same
                logger.warning("close_failed environment=%s error=%s", session.kind.name, describe(error))
                session.note_fault(error, "close")
        session.is_torn_down = True
        if session.is_over:
            self._runner.leave(session.place)
        del self._closing[session.serial]

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


def _is_other(session: Session, lease: str) -> bool:
    """Return True if both leases are set and differ."""
    return bool(lease and session.create.lease and lease != session.create.lease)
