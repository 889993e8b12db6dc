"""Starts a process in the sandbox: the last steps between the supervisor's fork and the agent's program.

The code runs in the supervisor, which has entered the sandbox's namespaces. The fork is not dumpable and its memory
belongs to an outer user namespace. So even the sandbox's root cannot read it before it becomes the agent's program.

The supervisor applies the restrictions that all programs share once to itself (``take_bounds``), because it needs none
of the dropped rights. Each fork applies only the differences, and the restrictions that would hinder the supervisor.
"""

import contextlib
import errno
import fcntl
import os
import resource
import signal
import struct
import termios
import time
from dataclasses import dataclass

from envserver.sandbox import kernel
from envserver.sandbox.users import User

CAPABILITIES = {0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31}
"""CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, SYS_CHROOT, AUDIT_WRITE and
SETFCAP: the capabilities of root in a Docker container, without raw sockets and device nodes. All apply inside only."""
JUDGES_OWN = 35
"""WAKE_ALARM, which has no effect inside, and which only judged programs have. The kernel lets a process without
SYS_PTRACE look into another one (``/proc/PID/mem`` and ``/proc/PID/fd``) only if it has all capabilities of the other.
So an agent's process can neither change the memory of a judged program nor write to its pipes."""
_LAST_CAPABILITY = 63
"""Highest capability: they are 64 bits, of which the kernel knows about 41."""
_IGNORED = (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ)
"""Ignored signals that a program would inherit. Python ignores the last two from its start. It ignores the first if its
parent did, as a shell does for background processes. Otherwise the first has a handler, which an exec resets. The other
signals are default since ``default_signals``."""
_OF_THE_LIBRARY = (32, 33)
"""Signals that the C library reserves for threads (nptl(7)). Some machines start all processes with one ignored."""
OPEN_FILES = 4096
"""Open files of each process, if the server's own hard limit is higher. They use kernel memory, which no limit of the
sandbox counts."""
_SHARE_OF_FILES = 4
"""Fraction of the server's limit of open files that agents get. Files in flight count per user across sandboxes."""
AGENT_NICE = 19
"""Nice value of an agent's programs: a weight of 15. Server, supervisors and judged programs have nice 0 and weight
1024. Next to an agent at its limit of processes, a judged program gets a third of one CPU (1024 / (1024 + 128 x
15))."""
_STOP_PAUSE_S = 0.002
"""Seconds between two passes of `stop_all`, in which signals arrive."""
_TIOCSPTLCK, _TIOCGPTPEER = 0x40045431, 0x5441
_MOST_FD = 2**31 - 1
"""Highest file number. A single system call closes all files up to it (close_range)."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Bounds:
    """Limits that ``setrlimit`` applies to each process alone."""

    memory_bytes: int
    cpu_s: int


@dataclass(frozen=True)
class Program:
    argv: list[str]
    cwd: str
    env: dict[str, str]
    user: User
    is_judged: bool = False


def open_terminal(rows: int, cols: int) -> tuple[int, int]:
    """Open a pty of the sandbox and return (master, slave)."""
    master = os.open("/dev/pts/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(master, _TIOCSPTLCK, struct.pack("i", 0))
        # Through the master, not by name: the agent can change the name.
        slave = fcntl.ioctl(master, _TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
    except BaseException:
        os.close(master)
        raise
    return master, slave


def default_signals() -> None:
    """Reset signals that the spawner's parent ignored, for example ``nohup``'s. All forks inherit this."""
    kept = (*_IGNORED, signal.SIGKILL, signal.SIGSTOP)
    for number in range(1, signal.NSIG):
        if number in _OF_THE_LIBRARY:
            kernel.stop_ignoring(number)
        elif number not in kept:
            signal.signal(number, signal.SIG_DFL)


def take_bounds(calls: bytes) -> None:
    """Drop capabilities, new privileges and system calls for this process and its descendants.

    The supervisor calls this once it has entered. It creates no more namespaces or mounts, and uses none of the
    filtered calls. Its own capabilities stay. An exec reduces them to the bounding set.
    """
    for capability in range(_LAST_CAPABILITY + 1):
        if capability not in CAPABILITIES | {JUDGES_OWN}:
            try:
                kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
            except OSError as error:
                if error.errno == errno.EINVAL:  # beyond the kernel's highest capability
                    break
                raise
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.filter_system_calls(calls)


def fork(program: Program, files: tuple[int, int, int], *, bounds: Bounds, ranged: bool) -> tuple[int, int]:
    """Fork the process that becomes *program* with *files* as its first three. Return its pid outside and its report.

    The report is a pipe that ends when the program has started or failed. `inner_pid` reads its content. An agent can
    stop the fork, so the caller must not wait for it without a deadline.

    Raises:
        OSError: EAGAIN: the sandbox is at its limit of processes.
    """
    report, fault = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
        if pid == 0:
            _become(program, files, fault, bounds, ranged)
    except BaseException:
        os.close(report)
        raise
    finally:
        os.close(fault)
    return pid, report


def inner_pid(report: bytes) -> int:
    """Return the pid inside from the content of a fork's *report*. 0: it is unknown.

    Raises:
        OSError: The program did not start. ENOENT: a program or folder is missing.
    """
    words = report.split(b"\n")
    if len(words) > 2:
        raise OSError(int(words[1]), os.strerror(int(words[1])), words[2].decode(errors="replace"))
    return int(words[0] or b"0")


def _become(program: Program, files: tuple[int, int, int], fault: int, bounds: Bounds, ranged: bool) -> None:
    """Turn this fork into *program*. Never return."""
    subject = program.cwd
    try:
        os.write(fault, b"%d" % os.getpid())
        os.setsid()
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (*files, fault)]
        for target, fd in enumerate(high[:3]):
            os.dup2(fd, target)
        os.dup2(high[3], 3, inheritable=False)
        fault = 3
        os.closerange(4, _MOST_FD)
        if os.isatty(0):
            with contextlib.suppress(OSError):
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        _restrict(bounds)
        if not program.is_judged:
            os.nice(AGENT_NICE)
            kernel.prctl(kernel.PR_CAPBSET_DROP, JUDGES_OWN)
        _become_user(program.user, ranged=ranged)
        os.chdir(program.cwd)
        subject = program.argv[0]
        _execute(program)
    except OSError as error:
        os.write(fault, b"\n%d\n%s" % (error.errno or errno.EIO, os.fsencode(subject)))
    except BaseException as error:  # noqa: BLE001 - a fork must not run its parent's code
        os.write(fault, b"\n%d\n%s" % (errno.EINVAL, str(error).encode(errors="replace")))
    finally:
        os._exit(127)


def _execute(program: Program) -> None:
    """Replace this process by *program*, searched along the program's own PATH.

    ``os.execvpe`` would first import a module, at a time when the interpreter's folders belong to the agent.

    Raises:
        OSError: The reason why a found program did not start. If none was found: ENOENT or ENOTDIR of the last place.
    """
    name = program.argv[0]
    if "/" in name:
        os.execve(name, program.argv, program.env)
    fault: OSError | None = None
    last: OSError
    for folder in program.env.get("PATH", PATH).split(":"):
        try:
            os.execve(f"{folder or '.'}/{name}", program.argv, program.env)
        except (FileNotFoundError, NotADirectoryError) as error:
            last = error
        except OSError as error:  # it exists, but another may follow in PATH
            fault, last = fault or error, error
    raise fault or last


def _restrict(bounds: Bounds) -> None:
    files = min(OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // _SHARE_OF_FILES)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.umask(0o022)
    for which, soft, hard in (
        (resource.RLIMIT_NICE, 0, 0),  # a machine may let its users raise their priority
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, files, files),
        (resource.RLIMIT_DATA, bounds.memory_bytes, bounds.memory_bytes),
        (resource.RLIMIT_CPU, bounds.cpu_s, bounds.cpu_s + 1),
        (resource.RLIMIT_MEMLOCK, 65_536, 65_536),
    ):
        resource.setrlimit(which, (soft, hard))


def _become_user(user: User, *, ranged: bool) -> None:
    if ranged:
        os.setgroups([user.gid, *user.groups])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)


def lower_group(pid: int) -> None:
    """Lower the process group of *pid* to an agent's priority.

    This comes first and immediately, because a hundred busy processes would leave no CPU for `lower_all`.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PGRP, pid, AGENT_NICE)


def lower_all() -> int | None:
    """Lower every thread inside to an agent's priority. Their children inherit it. Return the fork that does it.

    It is a fork inside, because pids inside mean nothing outside. The next call covers processes forked meanwhile. It
    also covers all of them if no process is left for the fork (None).
    """
    try:
        looker = os.fork()
    except OSError:
        return None
    if looker == 0:
        try:
            for name in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    for thread in os.listdir(f"/proc/{name}/task"):
                        os.setpriority(os.PRIO_PROCESS, int(thread), AGENT_NICE)
        finally:
            os._exit(0)
    return looker


def session_members(session: int) -> list[int]:
    """Return the pids inside whose session is *session*. Call it in a fork that lives inside."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
                if int(stat.read().rpartition(b")")[2].split()[3]) == session:
                    found.append(int(name))
    return found


def kill_session(pid: int, inner_pid: int) -> int | None:
    """Kill all processes of the session that the process *pid* (inside: *inner_pid*) leads.

    The process group comes first and immediately, because a hundred busy processes would leave no CPU for the rest. The
    rest are processes that ``timeout`` and job control put into their own groups. If no process is left for the search
    (None), killing the group must suffice. Else return the fork that searches.
    """
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    try:
        looker = os.fork()
    except OSError:
        return None
    if looker == 0:
        for _ in range(3):  # the next pass finds a process forked between search and kill
            for member in session_members(inner_pid):
                with contextlib.suppress(OSError):
                    os.kill(member, signal.SIGKILL)
        os._exit(0)
    return looker


def stop_all() -> int | None:
    """Stop every process inside but the init, until someone continues it. Return the fork that does it, or None.

    The fork ends with status 0 when it has found all of them stopped twice in a row, and none of them was new. Until
    then one that runs may continue others, or fork. A process in state D stops before its next step.
    """
    try:
        looker = os.fork()
    except OSError:
        return None
    if looker == 0:
        status = 1
        try:
            _stop_others()
            status = 0
        finally:
            os._exit(status)  # a fork must not run its parent's code
    return looker


def _stop_others() -> None:
    quiet_passes, known = 0, set[str]()
    while quiet_passes < 2:
        found = {name for name in os.listdir("/proc") if name.isdigit()} - {"1", str(os.getpid())}
        states = {_state(name) for name in found}
        for name in found:
            with contextlib.suppress(OSError):
                os.kill(int(name), signal.SIGSTOP)
        is_quiet = found <= known and states <= set("TtZXD")
        quiet_passes, known = quiet_passes + 1 if is_quiet else 0, found
        time.sleep(_STOP_PAUSE_S)


def _state(name: str) -> str:
    """Return the state of a process inside, as in proc(5); X if it has ended."""
    try:
        with open(f"/proc/{name}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "X"


def is_stopped(pid: int) -> bool:
    """Return True if the child *pid* is stopped by a signal."""
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def has_ended(pid: int) -> bool:
    """Reap the child *pid* if it has ended. Return whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def kill(pid: int) -> int:
    """Kill and reap the child *pid*, also if it is stopped. Return its exit status, which is 0 if it ended before."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return -signal.SIGKILL
