"""The composition root ``serve``: reads the settings, builds the server, and runs it until a signal stops it."""

import asyncio
import gc
import logging
import os
import resource
import signal
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import uvloop
from envserver.environment import Environment
from envserver.errors import ConfigError
from envserver.execution.loop_threads import Lanes
from envserver.execution.runner import Runner, Threads
from envserver.http.connection import Connection
from envserver.http.responses import Delivery
from envserver.http.routes import Routes
from envserver.sandboxing import Sandboxing
from envserver.schema.environment_types import Kind, kinds_of
from envserver.scorer import scorer_version, server_folder
from envserver.sessions.calls import Calls
from envserver.sessions.outcomes import Outcomes
from envserver.sessions.sessions import Sessions
from envserver.settings import Settings, unknown_variables
from envserver.tasks.registered import Registered, TaskModules
from envserver.tasks.sets import TaskSets

logger = logging.getLogger("envserver")
KEEP_ALIVE_S = 75.0
"""Idle seconds of a TCP connection. They exceed the 60 s of the reference servers, so that clients close idle
connections first."""
TEARDOWN_S = 4.0
"""Seconds for the teardowns, out of the five seconds that a stop may take."""
SWEEP_S = 5.0
"""Seconds between two checks for idle sessions, as in the reference."""
BACKLOG = 2048


class Server:
    """A server and all its parts."""

    def __init__(self, settings: Settings, kinds: dict[str, Kind]) -> None:
        """Build the parts. Must be called on the loop that the server will run on."""
        clock = asyncio.get_running_loop().time
        self._settings = settings
        self._threads = Threads(settings.threads)
        self._lanes = Lanes(settings.lanes)
        self._runner = Runner(threads=self._threads, lanes=self._lanes)
        self._outcomes = Outcomes(max_bytes=settings.kept_max_bytes, clock=clock)
        self._sandboxing = {
            name: Sandboxing(kind, kind.cls.sandbox_limits, settings=settings.sandbox, runner=self._runner)
            for name, kind in kinds.items()
            if kind.cls.sandbox_limits is not None
        }
        self._modules = TaskModules(settings.task_modules, folder=settings.custom_tasks_dir)
        tasks = {name: TaskSets(kind, runner=self._runner) for name, kind in kinds.items()}
        registered = Registered(modules=self._modules, tasks=tasks)
        calls = Calls(runner=self._runner, outcomes=self._outcomes, clock=clock, unexpected=settings.unexpected)
        self.sessions = Sessions(
            kinds=kinds,
            tasks=tasks,
            runner=self._runner,
            calls=calls,
            slots=settings.slots,
            clock=clock,
            sandboxing=self._sandboxing,
            registered=registered,
        )
        self._routes = Routes(
            kinds=kinds,
            tasks=tasks,
            registered=registered,
            sessions=self.sessions,
            delivery=Delivery(calls=calls, clock=clock),
            is_claimable=settings.socket is not None,
            clock=clock,
            strict_paths=settings.strict_paths,
        )
        self._connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def is_running_code(self) -> bool:
        """Whether authors' code may still run in a thread."""
        return self._runner.busy

    async def start(self) -> str:
        """Import the task modules, then listen. Return the address: a path, or ``host:port``.

        Raises:
            ConfigError: A file or package of the scorer is missing.
            OSError: The server cannot listen on the address.
        """
        loop = asyncio.get_running_loop()
        settings = self._settings
        await self._modules.load()
        modules = settings.custom_tasks_dir
        self._routes.scorer = scorer_version(settings.scorer, folder=server_folder(), modules=modules)
        if settings.socket is not None:
            _remove_stale(settings.socket)
            self._listener = await loop.create_unix_server(self._connect, settings.socket, backlog=BACKLOG)
            os.chmod(settings.socket, 0o666)
            address = settings.socket
        else:
            self._listener = await loop.create_server(self._connect, settings.host, settings.port, backlog=BACKLOG)
            host, port = self._listener.sockets[0].getsockname()[:2]
            address = f"{host}:{port}"
        self._sweep = loop.call_later(self._sweep_s, self._clean)
        for sandboxing in self._sandboxing.values():
            sandboxing.start()
        return address

    async def stop(self) -> None:
        """Accept no more connections, end the sessions, and let their last answers leave."""
        if self._sweep is not None:
            self._sweep.cancel()
        if self._listener is not None:
            self._listener.close()
        for sandboxing in self._sandboxing.values():
            sandboxing.give_up()
        await self.sessions.close_all(timeout_s=TEARDOWN_S)
        await asyncio.gather(*(sandboxing.close() for sandboxing in self._sandboxing.values()))
        await asyncio.sleep(0)  # the answers of calls that just ended are written in the loop's next iteration
        for connection in list(self._connections):
            connection.shutdown()
        self._runner.close()
        if self._settings.socket is not None:
            with suppress(FileNotFoundError):
                os.unlink(self._settings.socket)

    def _connect(self) -> Connection:
        return Connection(
            application=self._routes,
            connections=self._connections,
            body_max_bytes=self._settings.body_max_bytes,
            # A gateway's pool keeps connections to a Unix socket open. It must never lose a connection as it sends.
            keep_alive_s=0.0 if self._settings.socket is not None else KEEP_ALIVE_S,
        )

    @property
    def _sweep_s(self) -> float:
        return min(SWEEP_S, max(self._settings.idle_s / 4, 0.05)) if self._settings.idle_s else SWEEP_S

    def _clean(self) -> None:
        self._outcomes.sweep()
        if self._settings.idle_s:
            self.sessions.reap(self._settings.idle_s)
        self._sweep = asyncio.get_running_loop().call_later(self._sweep_s, self._clean)


def serve(*environments: type[Environment]) -> None:
    """Serve *environments* until SIGTERM or SIGINT. The first is the default.

    ``ENVSERVER_*`` variables hold the settings. If a setting or a class is wrong, the process prints a message and ends
    with status 1.
    """
    try:
        settings = Settings.from_environ(os.environ)
        logging.basicConfig(level=settings.log.upper(), format="%(asctime)s %(levelname)s %(message)s")
        for name in unknown_variables(os.environ):
            logger.warning("setting_unknown name=%s", name)
        kinds = kinds_of(environments, tasks=settings.tasks)
        _give_up_rights(kinds)
    except ConfigError as error:
        sys.exit(f"envserver: {error}")
    _raise_file_limit()
    loop = uvloop.new_event_loop()
    try:
        is_running_code = loop.run_until_complete(run(settings, kinds))
    except ConfigError as error:
        sys.exit(f"envserver: {error}")
    except OSError as error:
        sys.exit(f"envserver: cannot listen: {error}")
    # Blocking code ends only with the process. Finalizing the interpreter while threads run, such as those of a
    # browser's driver, can crash it.
    if is_running_code or threading.active_count() > 1:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    loop.close()


def _give_up_rights(kinds: dict[str, Kind]) -> None:
    """Give up the capabilities that a server of sandboxes starts with, before any thread or task module."""
    if any(kind.cls.sandbox_limits is not None for kind in kinds.values()):
        from envserver.sandbox import rights  # a bare server does not import the package

        rights.give_up()


async def run(settings: Settings, kinds: dict[str, Kind], *, stopping: asyncio.Event | None = None) -> bool:
    """Run a server until *stopping* is set or a signal arrives. Return True if authors' code still runs."""
    stop = stopping or asyncio.Event()
    server = Server(settings, kinds)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    address = await server.start()
    if settings.exit_on_eof:
        _stop_at_eof(loop, stop.set)
    # Objects from the start live as long as the server, so collections need not scan them again. Collections are rarer
    # than by default, because results are bytes and most objects die with their request.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)
    logger.info("server_ready address=%s environments=%s", address, ",".join(kinds))
    await stop.wait()
    logger.info("server_stopping sessions=%d", len(server.sessions))
    await server.stop()
    return server.is_running_code


def _stop_at_eof(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> None:
    """Call *stop* when standard input ends."""
    fd = sys.stdin.fileno()
    mode = os.fstat(fd).st_mode
    if stat.S_ISREG(mode) or os.fstat(fd).st_rdev == os.makedev(1, 3):  # a file or /dev/null: there is no parent
        stop()
        return

    def read() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            stop()

    loop.add_reader(fd, read)


def _remove_stale(path: str) -> None:
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)


def _raise_file_limit() -> None:
    """Raise the soft limit of open files, often 1,024, to the container's hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
