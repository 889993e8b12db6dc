"""Workers as local processes: the embedded default, which needs nothing installed.

NOT isolated, but for environments that open a sandbox for each session (below). A worker runs as the gateway's own
user: it can read what that user can read, use the network, and use as much memory and CPU as the machine has
(``Limits`` and ``Loosened`` mean nothing here; a limit on address space would kill Python programs that only map much,
and a limit on processes counts all of the user's). What is given: a process group and session of its own, no descriptor
and no variable of the gateway's, a limit on open files, no core dumps, a bounded log, and an end with the gateway. Run
agents' code in containers, or in sandboxes.

Sandboxes are the same here as in containers (bubblewrap, namespaces, limits); their root filesystem is a box of copies
of the machine's own programs. Where the machine can't have them, the worker refuses each session and says what to do.

A server of somebody else's (``[server] port``) runs on a port of loopback that is free when it starts; whoever is on
this machine can reach it there.

Differences to containers: a gateway that is started again finds none of its former workers, because they ended with
it: stdin of each is a pipe whose other end the gateway holds, and an environment server ends when it closes. One of
somebody else's looks at no pipe, so the kernel is asked to kill it (`ports`).
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
from gateway.backends.broadcast import DeathBroadcast
from gateway.backends.docker.container import NOFILE, custom_tasks, is_sandboxed, most_files, variables
from gateway.backends.folders import SOCKET_NAME, Claims, SocketFolders
from gateway.backends.launch import CancelToken, Launches
from gateway.backends.process_io import Tail
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.ports.backend import Backend
from gateway.core.session import CloseReason
from gateway.core.worker import BackendWorker, Death, Worker

logger = logging.getLogger(__name__)

KILL_S = 5.0
"""How long a process may take to be gone after SIGKILL: longer only if the kernel has it in an uninterruptible wait."""
OUTPUT_S = 1.0
"""How long the rest of a dead worker's output is read; a grandchild that outlived it may hold the pipe for ever."""
EDITS_S = 2.0
"""Between two looks at the code of a worker that runs."""
CUSTOM_TASKS_PACKAGE = "custom_tasks"
"""The name by which task modules are imported: ``custom_tasks.my_task``."""
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH")
"""What a worker gets of the gateway's own variables."""
_ID_LENGTH = 32
_PASSABLE = 0o755
"""Of folders on the way to a sandbox: its root is another user than the gateway."""


@dataclass(slots=True)
class _Running:
    """A worker's process."""

    worker: Worker
    address: str
    process: Process
    stdin: int
    """Our end of its stdin: never written to, and closed when the gateway ends, however it does."""
    tail: Tail = field(default_factory=Tail)
    watch: asyncio.Task[None] = field(init=False)
    """Ends when the process has ended, its output was read and its death was announced."""


class ProcessBackend(Backend):
    """Starts and stops local processes."""

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
        """Start nothing yet.

        Args:
            socket_dir: Where the workers' folders are; made with mode 0700 if it is missing.
            sandbox_dir: Where the box is, and where workers mount their sandboxes; made when an environment needs it.
            custom_tasks_dir: Where the folders of operators' task modules are; None gives workers none. They are the
                folders themselves: nothing but its rights keeps a worker, which is this user, from writing there.
            python: Runs commands whose first word is ``python`` or ``python3``.
            environ: The gateway's own variables, of which a worker gets what programs and libraries are found by.
            stop_grace_s: From SIGTERM to SIGKILL. Sessions have ended by then: what still runs is a step that overran,
                and the worker's successor may wait for its place.
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
        self._deaths = DeathBroadcast()
        self._running: dict[WorkerId, _Running] = {}
        self._ports: dict[WorkerId, int] = {}
        self._edits: dict[EnvironmentName, Mapping[str, int]] = {}
        """The sources of environments as they were when an edit of them was logged."""
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
        """Send SIGTERM to the worker's process group, SIGKILL after the grace; see ``Backend.stop``."""
        running = self._running.get(id)
        if running is not None:
            await self._end(running)
            self._running.pop(id, None)
        self._ports.pop(id, None)
        await asyncio.to_thread(self._remove_folders, id)

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """See ``Backend.logs``; kept until the worker is stopped."""
        running = self._running.get(id)
        return running.tail.lines(lines) if running is not None else ""

    async def found(self) -> list[BackendWorker]:
        """List the workers that were started here and not stopped yet."""
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
        """Stop the worker's process group as a terminal would; see ``Backend.pause``."""
        if lease is not None:
            lease.check()
        _signal_group(self._alive(id).process, signal.SIGSTOP)

    async def resume(self, id: WorkerId) -> None:
        """See ``Backend.resume``."""
        _signal_group(self._alive(id).process, signal.SIGCONT)

    async def prepare(self, environment: Environment) -> str:
        """There is nothing to prepare, and no image."""
        return ""

    def deaths(self) -> AsyncIterator[Death]:
        """See ``Backend.deaths``.

        A process that the kernel killed for want of memory looks like any that got SIGKILL: that is `WORKER_LOST`.
        """
        return self._deaths.follow()

    async def check(self) -> None:
        """Check socket folder and interpreter; remove what gateways left in the folder that were killed."""
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
        # Pipes of our own: with asyncio's, `Process.wait` of Python 3.11 waits for their ends as well, and a grandchild
        # that outlives the worker keeps these open.
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
                start_new_session=True,  # its own process group: SIGTERM reaches all it started, Ctrl-C of ours none
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
        """
        Raises:
            StartFailed: the folder can't be made.
        """
        try:
            self._work(id).mkdir(parents=True, exist_ok=True)
            for folder in (self._sandbox_dir, self._work(id).parent, self._work(id)):
                folder.chmod(_PASSABLE)
        except OSError as error:
            raise StartFailed(f"GATEWAY_SANDBOX_DIR={self._sandbox_dir}: {error}") from error

    def _link_custom_tasks(self, id: WorkerId, environment: Environment) -> None:
        """Make the folder, among the worker's own, in which its task modules are the package ``custom_tasks``.

        Raises:
            StartFailed: it can't be made, or there are no task modules.
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
        """Remove the folders of workers whose gateway is gone; they ended with it."""
        for id in self._claims.take_over():
            try:
                self._remove_folders(id)
            except BackendError as error:
                logger.error("worker_folder_left worker=%s error=%s", id, error)

    def _remove_folders(self, id: WorkerId) -> None:
        self._folders.remove(id)
        # Folders only, without a file: what was mounted there was seen by the worker alone, and has gone with it.
        shutil.rmtree(self._work(id), ignore_errors=True)
        self._claims.release(id)

    def _work(self, id: WorkerId) -> Path:
        return self._sandbox_dir / "work" / id

    def _command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        program, *arguments = words
        return (self._python if program in ("python", "python3") else program, *arguments)

    def _foreign_command(self, environment: Environment, port: int, variables: Mapping[str, str]) -> tuple[str, ...]:
        """
        Raises:
            StartFailed: there is no such program.
        """
        command = self._command(ports.with_port(environment.command, port))
        if not ports.is_program(command[0], environment.directory, variables.get("PATH", os.defpath)):
            raise StartFailed(f"{environment.name}: cannot run {command[0]}: there is no such program")
        return ports.tied(command, python=sys.executable)

    def _own_variables(self, worker: Worker) -> dict[str, str]:
        return {
            "HOME": str(self._folders.folder(worker.id)),  # and not the user's, where keys and histories are
            "PYTHONUNBUFFERED": "1",  # so that the last lines of a worker that is killed are in its log
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
                "PYTHONDONTWRITEBYTECODE": "1",  # into the operator's folder
            }
        return told

    async def _watch(self, running: _Running, output: int, environment: Environment) -> None:
        """Read the worker's *output* until it has ended, then say so."""
        process = running.process
        reading = asyncio.create_task(running.tail.read(output))
        try:
            await self._until_ended(process, environment)
            # What it started dies with it: nothing else would ever end it.
            _signal_group(process, signal.SIGKILL)
            await asyncio.wait({reading}, timeout=OUTPUT_S)
        finally:
            reading.cancel()
            os.close(running.stdin)
            self._deaths.add(Death(running.worker.id, CloseReason.WORKER_LOST, _how(process.returncode)))

    async def _until_ended(self, process: Process, environment: Environment) -> None:
        """Wait for the worker's end; log once if its code is edited meanwhile, as it keeps what it has read."""
        began = await asyncio.to_thread(_sources, environment.directory)
        ended = asyncio.create_task(process.wait())
        try:
            while not (await asyncio.wait((ended,), timeout=EDITS_S))[0]:
                now = await asyncio.to_thread(_sources, environment.directory)
                edited = sorted(name for name, changed_at in now.items() if began.get(name) != changed_at)
                if edited and now != self._edits.get(environment.name):
                    self._edits[environment.name] = now  # one line for all of its workers
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
            _signal_group(running.process, signal.SIGCONT)  # one that is paused would hear of it when it goes on
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
    """When each Python file of an environment's folder was changed last, by its name."""
    found = {}
    for path in directory.glob("*.py"):
        with suppress(OSError):  # it went just now
            found[path.name] = path.stat().st_mtime_ns
    return found


def _limit(pid: int, *, most_files: int) -> None:
    """Limit what is safe to limit; from outside, as Python code between fork and exec may deadlock."""
    if hasattr(resource, "prlimit"):  # Linux
        with suppress(ProcessLookupError, PermissionError, ValueError):
            hard = min(most_files, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1])
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (min(NOFILE, hard), hard))
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))


def _how(status: int | None) -> str:
    """Say how a process ended."""
    if status is None:
        return "it was given up"
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _signal_group(process: Process, number: signal.Signals) -> None:
    # The group's number stays taken while any member lives, so this reaches nobody else's processes; once all have
    # ended the number is free, but the kernel hands numbers out in turn and comes by again after tens of thousands.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
