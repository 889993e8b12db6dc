"""A process that keeps the right to map users, so that the server can give it up.

It starts spawners, and maps the users of spawners that it has started itself. No request names a user: the range is
part of its command line, and contains no user of the machine. Its capabilities protect it from the server, which has
the same user: a process without them can neither trace it nor read its files in /proc.
"""

import contextlib
import os
import selectors
import signal
import socket

from envserver.sandbox import boot, kernel
from envserver.sandbox import protocol as wire


class Launcher:
    """Answers its server's requests one at a time, until the server hangs up."""

    def __init__(self, server: socket.socket, *, first_uid: int, uids: int) -> None:
        self._server = server
        self._map = b"0 %d %d\n" % (first_uid, uids)
        self._children: dict[int, int] = {}
        """The pidfds of the spawners, by pid."""
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(int(key.data))
                elif not self._on_request():
                    return

    def _on_request(self) -> bool:
        received = wire.receive(self._server)
        if received is None:
            return False
        request, files = received
        try:
            if request["op"] == "start":
                pid = self._start(files[0])
                wire.send(self._server, {"pid": pid}, (self._children[pid],))
            else:
                self._map_users(int(str(request["pid"])))
                wire.send(self._server, {})
        except (OSError, KeyError, ValueError, IndexError) as error:
            wire.send(self._server, {"error": str(error)})
        finally:
            for fd in files:
                os.close(fd)
        return True

    def _start(self, connection: int) -> int:
        """Start a spawner at the other end of *connection*. It needs none of this process's capabilities."""
        pid = os.fork()
        if pid == 0:
            try:
                kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)
                os.setsid()
                os.set_inheritable(connection, True)
                argv = boot.command("spawner", connection)
                os.execve(argv[0], argv, {})
            finally:
                os._exit(127)
        self._children[pid] = os.pidfd_open(pid)
        self._selector.register(self._children[pid], selectors.EVENT_READ, pid)
        return pid

    def _map_users(self, pid: int) -> None:
        if pid not in self._children:
            raise ValueError(f"process {pid} is not a spawner of this launcher")
        kernel.write(f"/proc/{pid}/uid_map", self._map)
        kernel.write(f"/proc/{pid}/gid_map", self._map)

    def _reap(self, pid: int) -> None:
        pidfd = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(pid, 0)


def main(fd: int, first_uid: int, uids: int) -> None:
    """Serve the server at the other end of the inherited socket *fd* until it hangs up."""
    kernel.hide_command_line()
    kernel.set_name("launcher")
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    for number in (signal.SIGINT, signal.SIGTERM):  # the server ends it
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    with contextlib.suppress(ConnectionError):
        Launcher(socket.socket(fileno=fd), first_uid=first_uid, uids=uids).serve()
