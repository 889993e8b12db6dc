"""Run workers as local processes: the embedded default, which needs no installation.

Workers are NOT isolated, except in environments that open a sandbox for each session. A worker runs as the gateway's
user. It can read that user's files, use the network, and use all memory and CPU of the machine. ``Limits`` and
``Relaxations`` have no effect. A limit on address space would kill Python programs that only map much memory. A limit
on processes would count all processes of the user. A worker has its own process group and session, a limit on open
files and a bounded log. It inherits no descriptor and no variable of the gateway (except `_PASSED_ON`), dumps no core,
and ends with the gateway. Run agents' code in containers, or in sandboxes.

Sandboxes are the same as in containers (bubblewrap, namespaces, limits). Their root filesystem is a box of copies of
the machine's own programs. If the machine does not support them, the worker refuses each session with a remedy.

A third-party server (``[server] port``) listens on a loopback port that is free when it starts. Every user of the
machine can reach it there.

Unlike containers, workers do not survive a restart of the gateway. The gateway holds the other end of each worker's
stdin, and an environment server ends when that pipe closes. A third-party server does not read the pipe, so the kernel
is asked to kill it (`ports`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gateway.backends import process_io as ports
from gateway.backends.docker.container import NOFILE, custom_tasks, is_sandboxed, most_files, variables
from gateway.backends.folders import SOCKET_NAME, Claims, SocketFolders
from gateway.backends.launch import CancelToken, Launches
from gateway.backends.process_io import Tail
from gateway.core.broadcast import Broadcast
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.session import CloseReason
from gateway.core.worker import BackendWorker, Death, Worker

logger = logging.getLogger(__name__)

KILL_S = 5.0
"""Seconds that a process may take to end after SIGKILL. Only an uninterruptible wait in the kernel takes longer."""
OUTPUT_S = 1.0
"""Seconds to read the rest of a dead worker's output: a grandchild that outlives it may hold the pipe forever."""
EDITS_S = 2.0
"""Seconds between two checks of a running worker's source files."""
CUSTOM_TASKS_PACKAGE = "custom_tasks"
"""Name of the package from which task modules are imported: ``custom_tasks.my_task``."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
"""Variables of the gateway that a worker inherits."""
_ID_LENGTH = 32
_PASSABLE = 0o755
"""Mode of the folders above a sandbox, whose root is another user than the gateway."""


@dataclass(slots=True)
class _Running:
    """A worker's process."""

    worker: Worker
    address: str
    process: Process
    stdin: int
    """The gateway's end of the worker's stdin: never written to, and closed whenever the gateway ends."""
    tail: Tail = field(default_factory=Tail)
    watch: asyncio.Task[None] = field(init=False)
    """Task that ends when the process has ended, its output was read and its death was announced."""


class ProcessBackend(Backend):
    """Starts and stops workers as local processes."""

    def __init__(
        self,
        *,
        socket_dir: Path,
        sandbox_dir: Path,
        custom_tasks_dir: Path | None = None,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
        stop_grace_s: float = 2.0,
    ) -> None:
        """Create the backend without starting anything.

        Args:
            socket_dir: Folder of the workers' socket folders; created if it is missing.
            sandbox_dir: Folder of the box and of workers' sandbox mounts; created when an environment needs it.
            custom_tasks_dir: Folder of operators' task modules; None if there are none. Workers get the folder itself.
                They run as the gateway's user, so only file permissions keep them from writing to it.
            python: Interpreter for commands whose first word is ``python`` or ``python3``.
            environ: The gateway's variables. A worker inherits only the variables that locate programs and libraries.
            stop_grace_s: Seconds from SIGTERM to SIGKILL. Sessions have ended by then: only a step that overran still
                runs, and the worker's successor may wait for its place.
        """
        self._folders = SocketFolders(socket_dir.absolute(), mode=0o700)
        self._claims = Claims(socket_dir.absolute())
        self._sandbox_dir = sandbox_dir.absolute()
        self._custom_tasks_dir = custom_tasks_dir.absolute() if custom_tasks_dir is not None else None
        self._python = python
        passed_on = {name: value for name, value in (environ or {}).items() if name in _PASSED_ON}
        self._environ = {"PATH": os.defpath, "LANG": "C.UTF-8"} | passed_on
        self._grace_s = stop_grace_s
        self._launches = Launches()
        self._deaths: Broadcast[Death] = Broadcast()
        self._running: dict[WorkerId, _Running] = {}
        self._ports: dict[WorkerId, int] = {}
        self._edits: dict[EnvironmentName, Mapping[str, int]] = {}
        """Modification times of each environment's source files when an edit was last logged."""
        self._closed = False

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """Start the environment's command in its own folder; see ``Backend.start``."""
        if self._closed:
            raise StartFailed("the backend is closed")
        made: list[WorkerId] = []
        return await self._launches.run(
            partial(self._launch, worker, environment, made), partial(self._undo, worker.id, made), lease
        )

    async def stop(self, id: WorkerId) -> None:
        """Send SIGTERM to the worker's process group, then SIGKILL after the grace period; see ``Backend.stop``."""
        running = self._running.get(id)
        if running is not None:
            await self._end(running)
            self._running.pop(id, None)
        self._ports.pop(id, None)
        await asyncio.to_thread(self._remove_folders, id)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """Return the worker's output, which is kept until the worker is stopped; see ``Backend.logs``."""
        running = self._running.get(id)
        return running.tail.lines(lines) if running is not None else ""

    async def found(self) -> list[BackendWorker]:
        """Return the workers that this process started and has not stopped."""
        return [
            BackendWorker(
                id=id,
                environment=running.worker.environment,
                digest=running.worker.digest,
                address=running.address,
                running=running.process.returncode is None,
            )
            for id, running in self._running.items()
        ]

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """Send SIGSTOP to the worker's process group; see ``Backend.pause``."""
        if lease is not None:
            lease.check()
        _signal_group(self._alive(id).process, signal.SIGSTOP)

    async def resume(self, id: WorkerId) -> None:
        """Send SIGCONT to the worker's process group; see ``Backend.resume``."""
        _signal_group(self._alive(id).process, signal.SIGCONT)

    async def prepare(self, environment: Environment) -> str:
        """Return an empty string: a local process needs no preparation and has no image."""
        return ""

    def deaths(self) -> AsyncIterator[Death]:
        """Yield the deaths of workers; see ``Backend.deaths``.

        The reason is always `WORKER_LOST`: a kill by the kernel for lack of memory looks like any other SIGKILL.
        """
        return self._deaths.follow()

    async def check(self) -> None:
        """Check the socket folder and the interpreter; remove worker folders that killed gateways left."""
        await asyncio.to_thread(self._folders.check, _ID_LENGTH)
        await asyncio.to_thread(self._remove_left)
        if not os.access(self._python, os.X_OK):
            raise BackendError(f"{self._python} is not an interpreter that can be run")

    async def aclose(self) -> None:
        """Stop all workers."""
        if self._closed:
            return
        self._closed = True
        await self._launches.drain(self._grace_s + KILL_S)
        await asyncio.gather(*[self._stopped(id) for id in list(self._running)])
        self._deaths.close()

    async def _launch(self, worker: Worker, environment: Environment, made: list[WorkerId], wanted: CancelToken) -> str:
        wanted.check()
        await asyncio.to_thread(self._make_folder, worker.id)
        made.append(worker.id)
        if is_sandboxed(environment):
            await asyncio.to_thread(self._make_work, worker.id)
        if custom_tasks(environment) is not None:
            await asyncio.to_thread(self._link_custom_tasks, worker.id, environment)
        wanted.check()
        self._running[worker.id] = running = await self._spawn(worker, environment)
        return running.address

    async def _spawn(self, worker: Worker, environment: Environment) -> _Running:
        if environment.server.is_foreign:
            port = self._ports[worker.id] = ports.free_port(but=self._ports.values())
            address = f"tcp:127.0.0.1:{port}"
            told = {**self._own_variables(worker), **environment.variables, "PORT": str(port)}
            command = self._foreign_command(environment, port, told)
        else:
            address, told = self._folders.address(worker.id), self._variables(worker, environment)
            command = self._command(environment.command)
        # With asyncio's pipes, `Process.wait` of Python 3.11 also waits until they close, and a grandchild that
        # outlives the worker keeps them open. So the backend creates the pipes itself.
        stdin, held = os.pipe()
        output, stdout = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
                stdout=stdout,
                stderr=stdout,
                cwd=environment.directory,
                env=told,
                start_new_session=True,  # SIGTERM reaches all its processes, and the gateway's Ctrl-C reaches none
                close_fds=True,
            )
        except BaseException as error:
            os.close(held)
            os.close(output)
            if not isinstance(error, OSError | ValueError):
                raise
            raise StartFailed(f"{environment.name}: cannot run {environment.command[0]}: {error}") from error
        finally:
            os.close(stdin)
            os.close(stdout)
        _limit(process.pid, most_files=most_files(environment))
        running = _Running(worker, address, process, held)
        running.watch = asyncio.create_task(self._watch(running, output, environment))
        return running

    def _make_work(self, id: WorkerId) -> None:
        """Create the worker's sandbox folder.

        Raises:
            StartFailed: The folder can't be created.
        """
        try:
            self._work(id).mkdir(parents=True, exist_ok=True)
            for folder in (self._sandbox_dir, self._work(id).parent, self._work(id)):
                folder.chmod(_PASSABLE)
        except OSError as error:
            raise StartFailed(f"GATEWAY_SANDBOX_DIR={self._sandbox_dir}: {error}") from error

    def _link_custom_tasks(self, id: WorkerId, environment: Environment) -> None:
        """Link the environment's task modules into the worker's folder as the package ``custom_tasks``.

        Raises:
            StartFailed: The link can't be created, or there are no task modules.
        """
        tasks = custom_tasks(environment)
        if self._custom_tasks_dir is None or tasks is None:
            raise StartFailed(f"environment {environment.name} has custom tasks, but custom_tasks_dir is not set")
        folder = self._custom_tasks_dir / tasks.folder
        try:
            if not folder.is_dir():
                raise StartFailed(f"custom tasks of {environment.name}: there is no folder {folder}")
            self._packages(id).mkdir()
            (self._packages(id) / CUSTOM_TASKS_PACKAGE).symlink_to(folder)
        except OSError as error:
            raise StartFailed(f"custom tasks of {environment.name}: {error}") from error

    def _packages(self, id: WorkerId) -> Path:
        return self._folders.folder(id) / "packages"

    def _make_folder(self, id: WorkerId) -> None:
        self._claims.take(id)
        try:
            self._folders.make(id)
        except StartFailed:
            self._claims.release(id)
            raise

    def _remove_left(self) -> None:
        """Remove the folders of workers whose gateway is gone: the workers ended with it."""
        for id in self._claims.take_over():
            try:
                self._remove_folders(id)
            except BackendError as error:
                logger.error("worker_folder_left worker=%s error=%s", id, error)

    def _remove_folders(self, id: WorkerId) -> None:
        self._folders.remove(id)
        # Only empty folders remain: the mounts were visible to the worker alone, and ended with it.
        shutil.rmtree(self._work(id), ignore_errors=True)
        self._claims.release(id)

    def _work(self, id: WorkerId) -> Path:
        return self._sandbox_dir / "work" / id

    def _command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        program, *arguments = words
        return (self._python if program in ("python", "python3") else program, *arguments)

    def _foreign_command(self, environment: Environment, port: int, variables: Mapping[str, str]) -> tuple[str, ...]:
        """Return the command of a third-party server on *port*.

        Raises:
            StartFailed: The program does not exist.
        """
        command = self._command(ports.with_port(environment.command, port))
        if not ports.is_program(command[0], environment.directory, variables.get("PATH", os.defpath)):
            raise StartFailed(f"{environment.name}: cannot run {command[0]}: there is no such program")
        return ports.tied(command, python=sys.executable)

    def _own_variables(self, worker: Worker) -> dict[str, str]:
        return {
            "HOME": str(self._folders.folder(worker.id)),  # the user's own home has keys and histories
            "PYTHONUNBUFFERED": "1",  # keeps the last lines of a killed worker in its log
            **self._environ,
        }

    def _variables(self, worker: Worker, environment: Environment) -> dict[str, str]:
        socket = str(self._folders.folder(worker.id) / SOCKET_NAME)
        told = {
            **self._own_variables(worker),
            **variables(environment, socket=socket, slots=worker.slots),
            "ENVSERVER_EXIT_ON_EOF": "1",
        }
        if is_sandboxed(environment):
            told |= {
                "ENVSERVER_SANDBOX_HOST": "1",
                "ENVSERVER_SANDBOX_BOX": str(self._sandbox_dir / "box"),
                "ENVSERVER_SANDBOX_WORK": str(self._work(worker.id)),
            }
        if custom_tasks(environment) is not None:
            told |= {
                "ENVSERVER_CUSTOM_TASKS_DIR": str(self._packages(worker.id)),
                "PYTHONDONTWRITEBYTECODE": "1",  # the folder is the operator's
            }
        return told

    async def _watch(self, running: _Running, output: int, environment: Environment) -> None:
        """Read the worker's *output* until the worker has ended, then announce its death."""
        process = running.process
        reading = asyncio.create_task(running.tail.read(output))
        try:
            await self._until_ended(process, environment)
            # Kill the worker's remaining descendants: nothing else would ever end them.
            _signal_group(process, signal.SIGKILL)
            await asyncio.wait({reading}, timeout=OUTPUT_S)
        finally:
            reading.cancel()
            os.close(running.stdin)
            self._deaths.publish(Death(running.worker.id, CloseReason.WORKER_LOST, _how(process.returncode)))

    async def _until_ended(self, process: Process, environment: Environment) -> None:
        """Wait for the worker's end; log once if its source is edited, because the worker keeps the old code."""
        began = await asyncio.to_thread(_sources, environment.directory)
        ended = asyncio.create_task(process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=EDITS_S))[0]:
                now = await asyncio.to_thread(_sources, environment.directory)
                edited = sorted(name for name, changed_at in now.items() if began.get(name) != changed_at)
                if edited and now != self._edits.get(environment.name):
                    self._edits[environment.name] = now  # one log line for all workers of the environment
                    logger.warning(
                        "environment_code_changed environment=%s files=%s hint='workers that run keep the code that "
                        "they have read; gateway restart %s replaces them'",
                        environment.name,
                        ",".join(edited),
                        environment.name,
                    )
                    break
            await ended
        finally:
            ended.cancel()

    async def _end(self, running: _Running) -> None:
        if running.process.returncode is None:
            _signal_group(running.process, signal.SIGTERM)
            _signal_group(running.process, signal.SIGCONT)  # a paused worker handles SIGTERM only when it continues
            await asyncio.wait({running.watch}, timeout=self._grace_s)
        if running.process.returncode is None:
            logger.info("worker_killed worker=%s grace_s=%.1f", running.worker.id, self._grace_s)
            _signal_group(running.process, signal.SIGKILL)
        await asyncio.wait({running.watch}, timeout=KILL_S + OUTPUT_S)
        if running.process.returncode is None:
            raise BackendError(f"worker {running.worker.id} (process {running.process.pid}) does not die of SIGKILL")

    def _alive(self, id: WorkerId) -> _Running:
        running = self._running.get(id)
        if running is None or running.process.returncode is not None:
            raise BackendError(f"there is no worker {id}, or it has ended")
        return running

    async def _undo(self, id: WorkerId, made: list[WorkerId]) -> None:
        if made:
            await self.stop(id)

    async def _stopped(self, id: WorkerId) -> None:
        try:
            await self.stop(id)
        except BackendError as error:
            logger.error("worker_left worker=%s error=%s", id, error)


def _sources(directory: Path) -> dict[str, int]:
    """Return the modification time (ns) of each Python file in an environment's folder, by file name."""
    found = {}
    for path in directory.glob("*.py"):
        with suppress(OSError):  # the file was just removed
            found[path.name] = path.stat().st_mtime_ns
    return found


def _limit(pid: int, *, most_files: int) -> None:
    """Limit open files and core dumps from outside, because Python code between fork and exec may deadlock."""
    if hasattr(resource, "prlimit"):  # Linux
        with suppress(ProcessLookupError, PermissionError, ValueError):
            hard = min(most_files, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1])
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(NOFILE, hard), hard))
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def _how(status: int | None) -> str:
    """Describe how a process ended."""
    if status is None:
        return "it was given up"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _signal_group(process: Process, number: signal.Signals) -> None:
    # While a member of the group lives, its number is in use, so the signal reaches no other process. After that the
    # number is free, but the kernel assigns numbers in turn and reuses it only after tens of thousands.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
