"""One process per sandbox: starts its programs, opens its files, watches its resource use, and ends it.

It has entered all the sandbox's namespaces, but lives in the PID namespace outside. The agent therefore can neither see
nor signal it. When it ends, for any reason, the kernel ends the sandbox.
"""

import contextlib
import errno
import fcntl
import os
import resource
import selectors
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from envserver.sandbox import bootstrap as birth
from envserver.sandbox import kernel, processes, watchdog
from envserver.sandbox import protocol as wire
from envserver.sandbox.users import Users

Request = dict[str, Any]
_FILE_FLAGS = os.O_NONBLOCK | os.O_NOCTTY
_MOST_WORDS = 4_096
"""Maximum length of a refusal's message in characters."""
_PF_EXITING = 0x4
"""Flag of an exiting process in /proc/PID/stat (linux/sched.h)."""
_START_S = 5.0
"""Seconds after which a fork that waits, instead of becoming its program, is the agent's doing. A fork that only lacks
CPU time is runnable."""
_END_S = 10.0
"""Seconds for the end of all processes inside. A process that is being killed ends immediately."""
_SEARCH_S = 5.0
"""Seconds for a search of the sandbox's processes. It takes milliseconds without a hundred busy processes beside it."""


@dataclass(frozen=True)
class Plan:
    """The spawner's parameters for a sandbox."""

    room: birth.Room
    is_mounted: bool
    """Whether the spawner has already mounted the room."""
    bubblewrap: str
    owner: int | None
    """Uid that owns the sandbox's user namespace. None if only one uid is available."""
    memory_bytes: int
    pids: int
    cpu_s: int
    calls: bytes


def live(plan: Plan, server: socket.socket, sync: int) -> None:
    """Create the sandbox and serve it until its server, its init or its watchdog ends it. Never return."""
    status = 1
    try:
        spawner = os.getppid()
        ranged = plan.owner is not None
        kernel.set_name("box")  # the sandbox sees this name of a fork that has not yet become its program
        if not plan.is_mounted:
            kernel.unshare(kernel.CLONE_NEWNS)
            plan.room.mount()
        root = f"{os.getcwd()}/{plan.room.root}"
        birth.enter_user_namespace(plan.owner, pids=plan.pids, sync=sync)
        # After the last change of user, which would reset it.
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != spawner:
            return
        os.close(sync)
        born = birth.start_init(root, program=plan.bubblewrap, memory_bytes=plan.memory_bytes, calls=plan.calls)
        birth.enter(born)
        _open_many_files()
        supervisor = Supervisor(plan, server, born, ranged=ranged)
        processes.take_bounds(plan.calls)
        wire.send(server, {"event": "ready"})
        supervisor.serve()
        status = 0
    except (birth.BirthError, OSError, ValueError) as error:
        with contextlib.suppress(OSError):
            wire.send(server, {"event": "failed", "error": str(error)})
    finally:
        os._exit(status)


def _open_many_files() -> None:
    """Raise the limit of open files. Files in flight count per user, and agents may have some too."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@dataclass
class _Running:
    pid: int
    inner_pid: int
    pidfd: int
    stopwatch: watchdog.Stopwatch | None = None
    """Stopwatch of a judged program."""


@dataclass
class _Starting:
    """A fork that has not yet become its program."""

    request: Request
    pid: int
    report: int
    """The pipe on which the fork reports."""
    files: tuple[int, ...]
    """The files of the answer."""
    deadline: float
    said: bytes = b""
    """The content of *report* so far."""


class Supervisor:
    """The loop of one sandbox. None of its steps waits for the agent without a deadline."""

    def __init__(self, plan: Plan, server: socket.socket, born: birth.Born, *, ranged: bool) -> None:
        self._plan = plan
        self._server = server
        self._born = born
        self._ranged = ranged
        self._bounds = processes.Bounds(memory_bytes=plan.memory_bytes, cpu_s=plan.cpu_s)
        self._running: dict[int, _Running] = {}
        self._starting: dict[int, _Starting] = {}
        self._lowering: tuple[int, float] | None = None
        """The fork that lowers priorities inside, and its deadline."""
        self._selector = selectors.DefaultSelector()
        self._users = Users()
        self._gauge = watchdog.Gauge()
        self._looks_full = 0
        self._look_at = 0.0
        self._look_every_s = watchdog.LOOK_S
        self._ended = False
        self._operations: dict[str, Callable[[Request], None]] = {
            "run": self._run,
            "terminal": self._terminal,
            "kill": self._kill,
            "kill_group": self._kill_group,
            "open": self._open,
            "freeze": self._freeze,
        }

    def serve(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ, self._on_request)
        self._selector.register(self._born.init, selectors.EVENT_READ, self._on_init_death)
        self._look_at = time.monotonic() + self._look_every_s
        while not self._ended:
            for key, _ in self._selector.select(max(0.0, self._look_at - time.monotonic())):
                key.data()
            if time.monotonic() >= self._look_at and not self._ended:
                self._look()
        self._end()

    def _end(self) -> None:
        """Kill the init, which ends every process of its namespace, and wait until they are gone."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._born.init, signal.SIGKILL)
        children = [child.pid for child in self._running.values()]
        children += [child.pid for child in self._starting.values()]
        children += [] if self._lowering is None else [self._lowering[0]]
        for pid in children:
            # An init ends only after all processes of its namespace are reaped, and this process must reap these.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            # The monitor dies with the init or by this kill. Waiting for the init's pidfd waits for all processes
            # inside.
            _is_readable(self._born.init, _END_S)
            os.kill(self._born.monitor, signal.SIGKILL)
            os.waitpid(self._born.monitor, 0)

    def _look(self) -> None:
        self._end_lowering()
        usage = self._gauge.look(memory_bytes=self._plan.memory_bytes)
        self._looks_full = self._looks_full + 1 if watchdog.is_full(usage, pids=self._plan.pids) else 0
        reason = watchdog.verdict(
            usage, memory_bytes=self._plan.memory_bytes, pids=self._plan.pids, looks_full=self._looks_full
        )
        if reason is None and any(self._is_held(starting) for starting in self._starting.values()):
            reason = "stuck"
        if reason is not None:
            self._say({"event": "killed", "reason": reason})
            self._ended = True
        for running in self._running.values():
            self._time(running)
        self._look_every_s = watchdog.LOOK_S if usage.pids else watchdog.QUIET_LOOK_S
        self._look_at = time.monotonic() + self._look_every_s

    def _time(self, running: _Running) -> None:
        """Measure a judged program's CPU time. Once its claim is used up, lower the priority of all threads inside."""
        if running.stopwatch is not None:
            running.stopwatch.add(self._gauge.cpu_times())
            if running.stopwatch.is_used_up:
                processes.lower_group(running.pid)
                if self._lowering is None and (looker := processes.lower_all()) is not None:
                    self._lowering = looker, time.monotonic() + _SEARCH_S

    def _is_held(self, starting: _Starting) -> bool:
        """Return True if a fork is late because something inside holds it: a signal stopped it, or it waits."""
        if time.monotonic() < starting.deadline:
            return False
        with contextlib.suppress(ValueError):
            if self._gauge.state(int(starting.said.split(b"\n")[0])) == "S":
                return True
        return processes.is_stopped(starting.pid)

    def _end_lowering(self) -> None:
        """Reap the fork that lowers priorities. Kill it if it is late or stopped: an agent can stop it."""
        if self._lowering is not None:
            looker, deadline = self._lowering
            if time.monotonic() > deadline or processes.is_stopped(looker):
                processes.kill(looker)
            if processes.has_ended(looker):
                self._lowering = None

    def _wait_for(self, looker: int) -> bool:
        """Wait for a fork that searches the sandbox, and go on checking. Kill it if it is late or stopped.

        Return True if it ended by itself with status 0.
        """
        deadline = time.monotonic() + _SEARCH_S
        pidfd = os.pidfd_open(looker)
        try:
            while not _is_readable(pidfd, watchdog.LOOK_S) and time.monotonic() < deadline:
                if processes.is_stopped(looker):
                    break
                if not self._ended:
                    self._look()
        finally:
            os.close(pidfd)
            status = processes.kill(looker)
        return status == 0

    def _look_soon(self) -> None:
        self._look_at = min(self._look_at, time.monotonic() + watchdog.LOOK_S)

    def _say(self, message: wire.Message, files: tuple[int, ...] = ()) -> None:
        try:
            wire.send(self._server, message, files)
        except OSError:
            self._ended = True  # the server is gone

    def _on_init_death(self) -> None:
        self._say({"event": "killed", "reason": "init"})
        self._ended = True

    def _on_request(self) -> None:
        try:
            received = wire.receive(self._server)
        except OSError:
            received = None
        if received is None:
            self._ended = True
            return
        request, files = received
        for fd in files:
            os.close(fd)
        with self._refusing(request):
            self._operations[str(request["op"])](request)

    @contextlib.contextmanager
    def _refusing(self, request: Request) -> Iterator[None]:
        """Answer *request* with the error of the block, if it has one."""
        try:
            yield
        except KeyError as error:
            self._refuse(request, f"no such user: {error.args[0]}")
        except OSError as error:
            if error.errno == errno.ENOMEM and _is_dying():
                self._on_init_death()  # a PID namespace whose init is ending accepts no more processes
            else:
                self._refuse(request, _told(error), full=error.errno in (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC))
        except ValueError as error:
            self._refuse(request, str(error))

    def _refuse(self, request: Request, message: str, *, full: bool = False) -> None:
        # Short enough to need no memory file: the filter also applies to the supervisor, and a message may contain a
        # path of any length.
        error = message[:_MOST_WORDS]
        self._say({"id": request.get("id"), "error": error, "code": "full" if full else "refused"})

    def _start(self, request: Request, inside: tuple[int, int, int], outside: tuple[int, ...]) -> None:
        """Fork a program with the files *inside*. When it has started, the answer brings the files *outside*."""
        user = self._users.find(str(request["user"]))
        env = {
            "PATH": processes.PATH,
            "HOME": user.home,
            "USER": user.name,
            "LOGNAME": user.name,
            "LANG": "C.UTF-8",
            **request["env"],
        }
        is_judged = request.get("judged_s") is not None
        program = processes.Program(list(request["argv"]), str(request["cwd"]), env, user, is_judged)
        pid, report = processes.fork(program, inside, bounds=self._bounds, ranged=self._ranged)
        number = int(request["id"])
        self._starting[number] = _Starting(request, pid, report, outside, time.monotonic() + _START_S)
        self._selector.register(report, selectors.EVENT_READ, lambda: self._on_report(number))
        self._look_soon()

    def _on_report(self, number: int) -> None:
        starting = self._starting[number]
        if part := os.read(starting.report, _MOST_WORDS):
            starting.said += part
            return
        del self._starting[number]
        self._selector.unregister(starting.report)
        os.close(starting.report)
        try:
            with self._refusing(starting.request):
                self._on_start(number, starting)
        finally:
            for fd in starting.files:
                os.close(fd)

    def _on_start(self, number: int, starting: _Starting) -> None:
        try:
            inner_pid = processes.inner_pid(starting.said)
        except OSError:
            processes.kill(starting.pid)
            raise
        running = _Running(starting.pid, inner_pid, os.pidfd_open(starting.pid))
        if (judged_s := starting.request.get("judged_s")) is not None:
            running.stopwatch = watchdog.Stopwatch(self._gauge.cpu_times(), claim_s=judged_s)
        self._running[number] = running
        self._selector.register(running.pidfd, selectors.EVENT_READ, lambda: self._on_exit(number))
        self._say({"id": number, "started": True}, starting.files)

    def _on_exit(self, number: int) -> None:
        running = self._running.pop(number)
        self._selector.unregister(running.pidfd)
        os.close(running.pidfd)
        self._time(running)  # before the process is reaped, which discards its times
        _, status = os.waitpid(running.pid, 0)
        times = {} if running.stopwatch is None else running.stopwatch.as_message()
        self._say({"id": number, "status": os.waitstatus_to_exitcode(status), **times})

    def _run(self, request: Request) -> None:
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        inside = (pipes[0][0], pipes[1][1], pipes[2][1])
        outside = (pipes[0][1], pipes[1][0], pipes[2][0])
        with _closing_each(inside, otherwise=outside):
            self._start(request, inside, outside)

    def _terminal(self, request: Request) -> None:
        master, slave = processes.open_terminal(int(request["rows"]), int(request["cols"]))
        with _closing_each((slave,), otherwise=(master,)):
            with contextlib.suppress(OSError):
                os.fchown(slave, self._users.find(str(request["user"])).uid, -1)
            self._start(request, (slave, slave, slave), (master,))

    def _kill(self, request: Request) -> None:
        number = int(request["target"])
        if (starting := self._starting.get(number)) is not None:
            os.kill(starting.pid, signal.SIGKILL)  # its report ends then
        if (running := self._running.get(number)) is None:
            return
        self._time(running)  # the init reaps the program's children
        if (looker := processes.kill_session(running.pid, running.inner_pid)) is not None:
            self._wait_for(looker)

    def _freeze(self, request: Request) -> None:
        """Stop all processes inside. Refuse if there is no room for the search, or if something inside prevents it."""
        looker = processes.stop_all()
        if looker is None or not self._wait_for(looker):
            raise OSError(errno.EAGAIN, "the processes inside cannot be stopped")
        self._say({"id": request["id"], "frozen": True})

    def _kill_group(self, request: Request) -> None:
        """Kill the foreground process group of a terminal. The kernel allows it only inside this user namespace."""
        group = int(request["group"])
        if group > 1 and os.getpgrp() != group:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def _open(self, request: Request) -> None:
        path, is_write = str(request["path"]), bool(request["write"])
        if is_write:
            _make_folders(path)
        is_kind = stat.S_ISDIR if request.get("folder") else stat.S_ISREG
        flags = os.O_WRONLY | os.O_CREAT if is_write else os.O_RDONLY
        fd = kernel.open_inside(path, flags | _FILE_FLAGS, int(request["mode"]) if is_write else 0)
        try:
            if not is_kind(os.fstat(fd).st_mode):
                raise ValueError(f"not a {'folder' if request.get('folder') else 'regular file'}: {path}")
            if is_write:
                os.ftruncate(fd, 0)
                os.fchmod(fd, int(request["mode"]))
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
            self._say({"id": request["id"], "opened": True}, (fd,))
        finally:
            os.close(fd)


def _is_dying() -> bool:
    """Return True if the init is ending. Its pidfd shows the end only when all others inside are gone."""
    try:
        with open(kernel.open_inside("/proc/1/stat", os.O_RDONLY), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return True
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)


def _is_readable(fd: int, timeout_s: float) -> bool:
    """Wait at most *timeout_s* until *fd* is readable. A pidfd is readable when the process has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        return bool(selector.select(timeout_s))


@contextlib.contextmanager
def _closing_each(files: tuple[int, ...], *, otherwise: tuple[int, ...]) -> Iterator[None]:
    """Close *files* after the block. If the block fails, close the files *otherwise* too."""
    try:
        yield
    except BaseException:
        for fd in otherwise:
            os.close(fd)
        raise
    finally:
        for fd in files:
            os.close(fd)


def _make_folders(path: str) -> None:
    """Create the missing folders above *path*, each below a folder opened inside."""
    parts = [part for part in path.split("/") if part][:-1]
    for depth in range(1, len(parts) + 1):
        parent = kernel.open_inside("/" + "/".join(parts[: depth - 1]), os.O_PATH | os.O_DIRECTORY)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parts[depth - 1], 0o755, dir_fd=parent)
        finally:
            os.close(parent)


def _told(error: OSError) -> str:
    text = os.strerror(error.errno or 5)
    return f"{error.filename}: {text}" if error.filename else text
