"""Connects one replica to Redis: runs scripts, returns their answers, and receives the messages of other replicas.

A command runs to its end in its own task, even if its caller is cancelled. A cancelled command would cost redis-py its
connection, and could run in Redis after the caller's next command. On Python 3.11 it can swallow the cancellation
(CPython gh-86296; redis-py sends through ``asyncio.wait_for``). So a caller waits for the task only with a shield.

The client does not retry a command, because a command whose answer was lost may have run. The one exception is a script
that Redis does not have (NOSCRIPT, after a restart): such a command did not run.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    NoPermissionError,
    NoScriptError,
    RedisError,
    ResponseError,
)

from gateway.core.errors import NotLeading, StoreUnavailable
from gateway.stores.redis.records import packed, text
from gateway.stores.redis.sentinel import Master, is_sentinel, read_url, unencoded

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECTIONS = 32
"""Maximum number of commands in flight. Redis runs one at a time, so more commands would only wait elsewhere."""
CONNECT_S = 2.0
ANSWER_S = 3.0
"""Maximum seconds for one command. A gateway script takes at most a few milliseconds."""
CONNECTION_WAIT_S = 3.0
"""Maximum seconds of wait for a connection of the pool."""
TURN_S = 10.0
"""Maximum seconds that a command waits for its turn. Ten thousand commands take a few seconds, in order of arrival."""
DRAIN_S = 5.0
"""Maximum seconds that `RedisClient.aclose` waits for commands in flight."""
LISTEN_S = 5.0
"""Maximum seconds of one wait for a message. It only bounds a read: the next wait follows."""
FOLLOW_S = 1.0
"""Seconds between two queries to the Sentinels, if there are any, for the current master."""
RECONNECT_S = 0.5
"""Seconds before a lost subscription is opened again."""
AT_ONCE = 500
"""Maximum number of notes, sessions or waiting claims in one script, which is a few milliseconds of Redis's time."""

SHOWN_CHARS = 200
FORM = "redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]"
SHARED = ("base", "waiting", "owners", "admission", "slots", "groups", "serving", "sessions")
"""Files in ``lua/shared``, in load order: each file uses definitions of the files before it."""

_FOREIGN = (RedisError, OSError, TimeoutError)
"""Exceptions that redis-py raises when Redis does not answer, or answers with an error."""
_REFUSALS = (AuthenticationError, AuthenticationWrongNumberOfArgsError, AuthorizationError, NoPermissionError)
"""Those of them that no wait mends. Their texts are Redis's own, without passwords."""


@dataclass(frozen=True, slots=True)
class Script:
    """An operation in Lua: its source text, and the SHA-1 digest by which Redis knows it."""

    text: bytes
    sha: str


def scripts(family: str = "") -> dict[str, Script]:
    """Read the operations of *family*, a folder in ``lua``, by name. Without a family: those on sessions and workers.

    Shared code precedes each operation: all files in ``lua/shared``, or, for a family, the first of these files and the
    family's prelude.
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
    """Return the readable place that *url* names: its server or Sentinels, and the database, without a password.

    No name is resolved, so two names of one host are two places.

    Raises:
        ValueError: *url* has an unknown form. The message contains no password.
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
        # redis-py's message may contain a part of the password.
        raise ValueError(f"must be {FORM}{unencoded(url)}") from None
    if not url.startswith("unix://") and unencoded(url):  # a path may have an @
        raise ValueError(f"must be {FORM}{unencoded(url)}")
    server = parts.get("path") or _address(parts.get("host", "localhost"), parts.get("port", 6379))
    return f"{server} database {parts.get('db', 0)}"


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisFacts:
    """What a Redis says of itself."""

    version: str
    answer_s: float
    """Seconds of one answer."""
    ahead_s: float
    """Seconds by which its clock is ahead of this machine's."""
    max_bytes: int
    """Its limit of memory; 0: none."""
    policy: str
    """What it does when it is full; empty: it does not say."""


async def facts(url: str) -> RedisFacts:
    """Return what the Redis at *url* says of itself. Raises ``StoreUnavailable``."""
    link = RedisClient(url, root="")
    try:
        await link.ask("PING")
        began_at = time.time()
        seconds, microseconds = await link.ask("TIME")
        answer_s = time.time() - began_at
        info = {**await link.ask("INFO", b"server"), **await link.ask("INFO", b"memory")}
    finally:
        await link.aclose()
    return RedisFacts(
        version=str(info.get("redis_version", "unknown")),
        answer_s=answer_s,
        ahead_s=int(seconds) + int(microseconds) / 1e6 - began_at - answer_s / 2,
        max_bytes=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "")),
    )


class RedisClient:
    """Sends commands to one Redis. Commands raise only ``StoreUnavailable``, and fenced operations ``NotLeading``."""

    def __init__(self, url: str, *, root: str, family: str = "") -> None:
        """Create a client without a connection.

        Args:
            url: URL of a Redis, or of Sentinels as in `sentinel`.
            root: Hash tag at the start of every key.
            family: Family of the operations that the client runs, as in `scripts`.
        """
        options: dict[str, Any] = {
            "socket_connect_timeout": CONNECT_S,
            "socket_timeout": ANSWER_S,
            # With RESP3, redis-py asks the server for maintenance notices, which only one vendor's server has.
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
        # The pool's own wait is short and unordered: of thousands of concurrent creates, many would get no connection.
        # The semaphore keeps some connections free for the subscription and urgent commands.
        self._turns = asyncio.Semaphore(CONNECTIONS - 4)
        self._answers = True

    async def load(self) -> None:
        """Load every script into Redis before the first requests, and start to follow the Sentinels' master."""
        if self._master is not None and self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow(self._master))
        await self.ask("PING")  # Redis answers a large command before a login with an error that names no login
        for script in self._scripts.values():
            await self.ask("SCRIPT LOAD", script.text)

    def begin(self, name: str, *arguments: str | float | bytes, urgent: bool = False) -> asyncio.Task[Any]:
        """Start an operation in a task, and return the task. Callers must wait for it with a shield and not cancel it.

        An *urgent* operation does not wait for earlier operations.
        """
        packs = [packed(value) for value in arguments]
        return self.detach(self._evaluate(self._scripts[name], packs, urgent=urgent))

    async def run(self, name: str, *arguments: str | float | bytes, urgent: bool = False) -> Any:
        """Run an operation and return its answer: bytes, integers, None and lists of these."""
        return await asyncio.shield(self.begin(name, *arguments, urgent=urgent))

    async def run_in_batches(
        self, name: str, *arguments: str | float, items: Sequence[Sequence[str | float]]
    ) -> list[Any]:
        """Run an operation on batches of `AT_ONCE` *items* in sequence, and return all answers in one list."""
        answers: list[Any] = []
        for start in range(0, len(items), AT_ONCE):
            values = [value for item in items[start : start + AT_ONCE] for value in item]
            answers += await self.run(name, *arguments, *values)
        return answers

    async def ask(self, command: str, *arguments: bytes) -> Any:
        """Send one built-in Redis command, and return its answer."""
        return await asyncio.shield(self.detach(self._guarded(command, arguments)))

    def detach(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that continues when its caller is cancelled. `aclose` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    async def aclose(self) -> None:
        """Wait for commands in flight, at most `DRAIN_S` seconds, then close the connections."""
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
        """Query the Sentinels until cancelled, and so leave a replaced master even if it still answers."""
        while True:
            await asyncio.sleep(FOLLOW_S)
            with contextlib.suppress(*_FOREIGN):
                await master.look()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Its caller may be gone, and asyncio logs exceptions that are never retrieved.
            task.exception()

    async def _evaluate(self, script: Script, arguments: Sequence[bytes], *, urgent: bool) -> Any:
        command = (script.sha.encode(), b"1", self._root, *arguments)
        try:
            return await self._guarded("EVALSHA", command, urgent=urgent)
        except _NotLoaded:
            await self._guarded("SCRIPT LOAD", (script.text,), urgent=urgent)
            return await self._guarded("EVALSHA", command, urgent=urgent)

    async def _guarded(self, command: str, arguments: Sequence[bytes], *, urgent: bool = False) -> Any:
        """Send a command when its turn comes, and raise gateway errors instead of redis-py's errors."""
        if urgent:
            return await self._sent(command, arguments)
        try:
            async with asyncio.timeout(TURN_S):  # the timeout covers no Redis command
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
            for told in (exc, exc.__cause__):  # redis-py wraps what it gets while it connects
                if isinstance(told, _REFUSALS):
                    raise _refusal(f"the store refuses this gateway: {told}") from exc
                if isinstance(told, ResponseError):
                    raise StoreUnavailable(f"the store answers with an error: {str(told)[:SHOWN_CHARS]}") from exc
            if isinstance(exc, MasterNotFoundError) and AuthenticationError.__name__ in str(exc):
                raise _refusal("the Sentinels refuse this gateway: sentinel_password is wrong or missing") from exc
            raise StoreUnavailable("the store does not answer") from exc
        if not self._answers:
            self._answers = True
            logger.info("store_back")
        return answer


def _refusal(message: str) -> StoreUnavailable:
    error = StoreUnavailable(message)
    error.is_refusal = True
    return error


def _raise_ours(answer: str) -> None:
    """Raise the gateway error for a script's refusal (names in ``lua/shared/base.lua``). Return for other errors."""
    if answer.startswith("NOTLEADING"):
        raise NotLeading("another replica leads the control loop by now")
    if answer.startswith("REBUILDING"):
        raise StoreUnavailable("the store is being rebuilt")
    if answer.startswith("OTHERS"):
        raise StoreUnavailable("a gateway with another GATEWAY_SECRET has taken over the store: restart this one")


class _NotLoaded(StoreUnavailable):
    """Redis does not have the script: the server was restarted, or its scripts were flushed."""


class Subscriber(Protocol):
    """Receives published messages."""

    def heard(self, channel: str, message: str) -> None:
        """Handle a *message* of *channel* without waiting."""


class Listener:
    """A subscription that is opened again when it is lost. Messages published in between are lost."""

    def __init__(self, client: Redis, channels: Sequence[str], subscriber: Subscriber) -> None:
        self._client = client
        self._channels = [packed(channel) for channel in channels]
        self._subscriber = subscriber
        self.is_subscribed = asyncio.Event()
        """Event that is set once all channels are subscribed."""
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to listen, in a separate task."""
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
                # Without this loop, the replica's waiting claims would be woken late.
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
    """Wait for *event*, at most *timeout_s* seconds. Return True if it is set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, timeout_s)):
            await event.wait()
    return event.is_set()


async def cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel *tasks* repeatedly, for at most `DRAIN_S`: on Python 3.11 redis-py may lose a cancellation."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DRAIN_S
    while (left := {task for task in tasks if not task.done()}) and loop.time() < deadline:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=0.05)
