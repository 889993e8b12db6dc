"""One replica's connection to Redis: scripts in, answers out, and the messages that other replicas publish.

A command runs to its end in a task of its own, whatever becomes of its caller: a cancelled command costs redis-py its
connection, may still run in Redis after what its caller did next, and on Python 3.11 can swallow the cancellation
(CPython gh-86296; redis-py sends through ``asyncio.wait_for``). So a caller only ever waits for the task, shielded.

Nothing is sent twice by itself: a command whose answer was lost may have run. The one exception is a script that Redis
says it does not have (NOSCRIPT, after a restart), since that did not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError, ResponseError

from gateway.core.errors import NotLeading, StoreUnavailable
from gateway.stores.redis.records import packed, text
from gateway.stores.redis.sentinel import Master, is_sentinel, read_url

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECTIONS = 32
"""Commands in flight at once; Redis runs one at a time, so more would only wait elsewhere."""
CONNECT_S = 2.0
ANSWER_S = 3.0
"""The longest that one command takes; a script of ours takes some milliseconds at most."""
CONNECTION_WAIT_S = 3.0
"""The longest wait for one of the connections."""
TURN_S = 10.0
"""The longest that a command waits for its turn: ten thousand take a few seconds, in the order in which they came."""
DRAIN_S = 5.0
"""How long `RedisClient.aclose` waits for commands in flight."""
LISTEN_S = 5.0
"""One wait for a message; only bounds a read, nothing happens when it ends."""
FOLLOW_S = 1.0
"""How often Sentinels, where there are any, are asked which server is the master."""
RECONNECT_S = 0.5
"""Pause before a lost subscription is opened again."""
AT_ONCE = 500
"""Notes, sessions or waiting claims in one script: some milliseconds of Redis' time."""

SHARED = ("base", "waiting", "admission", "slots", "groups", "serving", "sessions")
"""Files in ``lua/shared``, each of which uses what those before it define."""

_FOREIGN = (RedisError, OSError, TimeoutError)
"""What redis-py raises when Redis does not answer, or answers with an error."""


@dataclass(frozen=True, slots=True)
class Script:
    """An operation in Lua."""

    text: bytes
    sha: str


def scripts(family: str = "") -> dict[str, Script]:
    """Read the operations of a *family*, a folder in ``lua``, by their names; of none, those on sessions and workers.

    Each with what it shares with others before it: the files in ``lua/shared``, or of a family the first of them, and
    the family's own prelude.
    """
    lua = resources.files("gateway.stores.redis") / "lua"
    texts = {
        entry.name.removesuffix(".lua"): entry.read_bytes()
        for entry in (lua / family if family else lua).iterdir()
        if entry.name.endswith(".lua")
    }
    shared = [(lua / "shared" / f"{name}.lua").read_bytes() for name in (SHARED[:1] if family else SHARED)]
    shared += [texts.pop("prelude")] if family else []
    whole = {name: b"\n".join((*shared, text)) for name, text in texts.items()}
    return {name: Script(text, hashlib.sha1(text, usedforsecurity=False).hexdigest()) for name, text in whole.items()}


def place_of(url: str) -> str:
    """Return the place that *url* names, for people: its server or Sentinels, and the database, without a password.

    Two names of one host are two places: no name is looked up.

    Raises:
        ValueError: *url* has no known form; the message holds none of its passwords.
    """
    if is_sentinel(url):
        read = read_url(url)
        sentinels = ",".join(sorted(_address(host, port) for host, port in read.sentinels))
        return f"sentinels {sentinels} master {read.service} database {read.master['db']}"
    if not url.startswith(("redis://", "rediss://", "unix://")):
        schemes = "redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://"
        raise ValueError(f"'memory', or a URL of Redis ({schemes})")
    try:
        parts = parse_url(url)
    except ValueError:
        # redis-py's message may quote a part of the password.
        raise ValueError("redis://[[USER]:PASSWORD@]HOST[:PORT][/DB] is wanted") from None
    server = parts.get("path") or _address(parts.get("host", "localhost"), parts.get("port", 6379))
    return f"{server} database {parts.get('db', 0)}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class RedisClient:
    """Commands to one Redis; all raise ``StoreUnavailable``, fenced operations ``NotLeading``, and nothing else."""

    def __init__(self, url: str, *, root: str, family: str = "") -> None:
        """*root* is the hash tag that heads every key; *url* one of Redis, or as in `sentinel`.

        *family*: of the operations that it runs, as in `scripts`.
        """
        options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_S,
            "socket_timeout": ANSWER_S,
            # RESP3 would ask the server for maintenance notices, which only one vendor's has.
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        self._master: Master | None = None
        self._following: asyncio.Task[None] | None = None
        self.client: Redis
        if is_sentinel(url):
            self._master = Master(url, max_connections=2 * CONNECTIONS, options=options)
            self.client = self._master.client
        else:
            pool = BlockingConnectionPool.from_url(
                url, max_connections=CONNECTIONS, timeout=CONNECTION_WAIT_S, **options
            )
            self.client = Redis.from_pool(pool)
        self._root = packed(root)
        self._scripts = scripts(family)
        self._running: set[asyncio.Task[Any]] = set()
        # The pool's own wait is short and in no order: thousands of creates in one moment would fail for want of a
        # connection. Some are left to the subscription, and to what is urgent.
        self._turns = asyncio.Semaphore(CONNECTIONS - 4)
        self._answers = True

    async def load(self) -> None:
        """Load every script, so that the first requests need not."""
        if self._master is not None and self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow(self._master))
        for script in self._scripts.values():
            await self.ask("SCRIPT LOAD", script.text)

    def begin(self, name: str, *arguments: str | float | bytes, urgent: bool = False) -> asyncio.Task[Any]:
        """Run an operation to its end, in a task that nobody should cancel; wait for it shielded.

        An *urgent* one does not wait for those that came before it.
        """
        packs = [packed(value) for value in arguments]
        return self.detach(self._evaluate(self._scripts[name], packs, urgent=urgent))

    async def run(self, name: str, *arguments: str | float | bytes, urgent: bool = False) -> Any:
        """Run an operation and return its answer: bytes, integers, None and lists of these."""
        return await asyncio.shield(self.begin(name, *arguments, urgent=urgent))

    async def run_in_batches(
        self, name: str, *arguments: str | float, items: Sequence[Sequence[str | float]]
    ) -> list[Any]:
        """Run an operation on `AT_ONCE` of *items* after the other, and return its answers as one list."""
        answers: list[Any] = []
        for start in range(0, len(items), AT_ONCE):
            values = [value for item in items[start : start + AT_ONCE] for value in item]
            answers += await self.run(name, *arguments, *values)
        return answers

    async def ask(self, command: str, *arguments: bytes) -> Any:
        """Send one command of Redis' own."""
        return await asyncio.shield(self.detach(self._guarded(command, arguments)))

    def detach(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that outlives its caller; `aclose` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def aclose(self) -> None:
        """Wait for commands in flight, then close the connections."""
        if self._running:
            await asyncio.wait(self._running, timeout=DRAIN_S)
        await cancelled([*self._running, *([self._following] if self._following is not None else [])])
        try:
            await self.client.aclose()
            if self._master is not None:
                await self._master.aclose()
        except _FOREIGN as exc:
            logger.warning("store_close_failed error=%s", exc)

    async def _follow(self, master: Master) -> None:
        """Leave a master that another one followed, though it still answers, until cancelled."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            with contextlib.suppress(*_FOREIGN):
                await master.look()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Its caller may be gone, and asyncio complains about errors that nobody looked at.
            task.exception()

    async def _evaluate(self, script: Script, arguments: Sequence[bytes], *, urgent: bool) -> Any:
        command = (script.sha.encode(), b"1", self._root, *arguments)
        try:
            return await self._guarded("EVALSHA", command, urgent=urgent)
        except _NotLoaded:
            await self._guarded("SCRIPT LOAD", (script.text,), urgent=urgent)
            return await self._guarded("EVALSHA", command, urgent=urgent)

    async def _guarded(self, command: str, arguments: Sequence[bytes], *, urgent: bool = False) -> Any:
        """The one place where errors of Redis become ours."""
        if urgent:
            return await self._sent(command, arguments)
        try:
            async with asyncio.timeout(TURN_S):  # no Redis in here
                await self._turns.acquire()
        except TimeoutError:
            raise StoreUnavailable("too many requests wait for the store") from None
        try:
            return await self._sent(command, arguments)
        finally:
            self._turns.release()

    async def _sent(self, command: str, arguments: Sequence[bytes]) -> Any:
        try:
            answer = await self.client.execute_command(command, *arguments)  # type: ignore[no-untyped-call]  # redis-py's own gap
        except NoScriptError as exc:
            raise _NotLoaded("the store has no such script") from exc
        except _FOREIGN as exc:
            if isinstance(exc, ResponseError):
                _raise_ours(str(exc))
            if self._answers:
                self._answers = False
                logger.warning("store_lost error=%s", exc)
            raise StoreUnavailable("the store does not answer") from exc
        if not self._answers:
            self._answers = True
            logger.info("store_back")
        return answer


def _raise_ours(answer: str) -> None:
    """Raise what one of our scripts answered that changed nothing; the names are in ``lua/shared/base.lua``."""
    if answer.startswith("NOTLEADING"):
        raise NotLeading("another replica leads the control loop by now")
    if answer.startswith("REBUILDING"):
        raise StoreUnavailable("the store is being rebuilt")
    if answer.startswith("OTHERS"):
        raise StoreUnavailable("a gateway with another GATEWAY_SECRET took the store over: restart this one")


class _NotLoaded(StoreUnavailable):
    """Redis was restarted, or its scripts were flushed."""


class Subscriber(Protocol):
    """Gets what is published."""

    def heard(self, channel: str, message: str) -> None:
        """Take a *message*. Returns at once."""


class Listener:
    """A subscription that comes back when it is lost; what was published meanwhile is lost."""

    def __init__(self, client: Redis, channels: Sequence[str], subscriber: Subscriber) -> None:
        self._client = client
        self._channels = [packed(channel) for channel in channels]
        self._subscriber = subscriber
        self.is_subscribed = asyncio.Event()
        """Set once all channels were subscribed to."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to listen, in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def aclose(self) -> None:
        """Stop listening."""
        self._stopping.set()
        if self._task is not None:
            await cancelled([self._task])

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                await self._listen()
            except _FOREIGN as exc:
                logger.warning("store_subscription_lost error=%s", exc)
            except Exception:
                # Without this loop no waiting claim of the replica would be woken in time.
                logger.exception("store_subscription_failed")
            await happened(self._stopping, timeout_s=RECONNECT_S)

    async def _listen(self) -> None:
        pubsub = self._client.pubsub()
        try:
            await pubsub.subscribe(*self._channels)
            missing = len(self._channels)
            while not self._stopping.is_set():
                message = await pubsub.get_message(timeout=LISTEN_S)
                if message is None:
                    continue
                if message["type"] == "subscribe":
                    missing -= 1
                    if missing == 0:
                        self.is_subscribed.set()
                elif message["type"] == "message":
                    self._subscriber.heard(text(message["channel"]), text(message["data"]))
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]  # redis-py leaves it without annotations


async def happened(event: asyncio.Event, *, timeout_s: float) -> bool:
    """Wait for *event*, at most *timeout_s* seconds; whether it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    return event.is_set()


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel *tasks* until they are done: on Python 3.11 one cancellation may get lost in redis-py."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DRAIN_S
    while (left := {task for task in tasks if not task.done()}) and loop.time() < deadline:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.05)
