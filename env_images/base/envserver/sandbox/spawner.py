"""One process per worker that opens its sandboxes. It owns the user namespace and the layers' mounts.

It is a small separate interpreter that shares none of the server's memory, environment or files. All its mounts are in
its own mount namespace. When it ends, for any reason, the kernel removes every mount and sandbox. A sandbox whose files
are not kept mounts them in its own namespace, because every opening copies its parent's mounts.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envserver.sandbox import kernel, processes, supervisor
from envserver.sandbox import protocol as wire
from envserver.sandbox.bootstrap import WATCH_LIMITS, Dates, Room, set_limits

Request = dict[str, Any]
_ROOMS = "rooms"
_BOX, _FIRST_OWNER, _MOST_SANDBOXES = "0", 60_000, 4_096
"""The user namespaces of sandboxes belong to uids of the spawner's that no sandbox maps."""
_MAP = f"0 0 {_FIRST_OWNER}\n65534 65534 1\n".encode()
_SINGLE_MAP = b"0 0 1\n"
_PROGRAMS = ("usr", "bin", "sbin", "lib", "lib32", "lib64")
"""Folders of the root with programs, their libraries and their loader."""
_DEVICES = {**{name: name for name in ("null", "full", "random", "urandom", "tty")}, "zero": "full"}
"""The devices of sandboxes, by name inside. A shared mapping of /dev/zero is memory that no watchdog sees. /dev/full
reads as zeros and has no mappings."""
_LIBRARIES = "etc/ld.so.cache"
"""The loader's list of libraries."""
_MOST_FD = 2**31 - 1
"""Highest file number. A single system call closes all files up to it (close_range)."""


@dataclass
class _Tenant:
    """The user of a room: a sandbox, or (without a pid) the layer that it became."""

    room: Room
    owner: int | None
    is_build: bool
    """Whether it may become a layer. Its room is then mounted here."""
    pid: int = 0
    is_kept: bool = False
    dates: Dates | None = None
    """File times of the layer that it becomes."""


class Spawner:
    """Answers its server's requests one at a time. Each takes a few milliseconds and waits for no agent's program."""

    def __init__(self, server: socket.socket, config: Request) -> None:
        self._server = server
        self._bubblewrap = str(config["bubblewrap"])
        self._limits: dict[str, int] = config["limits"]
        self._calls = bytes.fromhex(str(config["calls"]))
        self._ranged = bool(config["ranged"])
        self._tenants: dict[int, _Tenant] = {}
        self._owners = list(range(_FIRST_OWNER, _FIRST_OWNER + _MOST_SANDBOXES))
        self._selector = selectors.DefaultSelector()

    def serve(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ, None)
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._on_end(int(key.data), key.fd)
                elif not self._on_request():
                    return

    def _on_request(self) -> bool:
        received = wire.receive(self._server)
        if received is None:
            return False
        request, _ = received
        try:
            if request["op"] == "open":
                self._open(request)
            elif request["op"] == "drop":
                self._drop(int(str(request["room"])))
                wire.send(self._server, {"id": request["id"]})
            elif request["op"] == "keep":
                self._keep(request)
                wire.send(self._server, {"id": request["id"]})
        except (OSError, KeyError, ValueError, IndexError) as error:
            wire.send(self._server, {"id": request["id"], "error": str(error)})
        return True

    def _open(self, request: Request) -> None:
        """Create a room and fork its supervisor, which mounts it. Send the supervisor's other end to the server."""
        number = int(request["id"])
        layers = [self._tenants[int(layer)].room.upper for layer in request["layers"]]
        if not self._owners:
            raise ValueError(f"{_MOST_SANDBOXES} sandboxes are open")
        room = Room(f"{number:x}", ":".join([*reversed(layers), _BOX]), self._limits["disk_bytes"])
        tenant = _Tenant(room, self._owners.pop() if self._ranged else None, bool(request["build"]))
        try:
            os.mkdir(room.name, 0o700)
            if tenant.is_build:
                room.mount()
            ours, theirs = wire.pair()
            try:
                tenant.pid = self._fork(tenant, theirs)
                self._tenants[number] = tenant
                self._selector.register(os.pidfd_open(tenant.pid), selectors.EVENT_READ, number)
                wire.send(self._server, {"id": number}, (ours.fileno(),))
            finally:
                ours.close()
                theirs.close()
        except BaseException:
            if number not in self._tenants:
                self._free(tenant)
            raise

    def _fork(self, tenant: _Tenant, theirs: socket.socket) -> int:
        mine, sync = socket.socketpair()
        plan = supervisor.Plan(
            room=tenant.room,
            is_mounted=tenant.is_build,
            bubblewrap=self._bubblewrap,
            owner=tenant.owner,
            memory_bytes=self._limits["memory_bytes"],
            pids=self._limits["pids"],
            cpu_s=self._limits["cpu_s"],
            calls=self._calls,
        )
        pid = os.fork()
        if pid == 0:
            try:
                _keep_only(theirs.fileno(), sync.fileno())
                supervisor.live(plan, theirs, sync.fileno())
            finally:
                os._exit(1)
        sync.close()
        try:
            with mine:
                mine.settimeout(10.0)
                if mine.recv(1) == b"u":
                    self._map(pid)
                    mine.sendall(b"m")
        except OSError:
            os.kill(pid, signal.SIGKILL)  # no other process knows it
            os.waitpid(pid, 0)
            raise
        return pid

    def _map(self, pid: int) -> None:
        if not self._ranged:
            kernel.write(f"/proc/{pid}/setgroups", b"deny")
        table = _MAP if self._ranged else _SINGLE_MAP
        kernel.write(f"/proc/{pid}/uid_map", table)
        kernel.write(f"/proc/{pid}/gid_map", table)

    def _keep(self, request: Mapping[str, Any]) -> None:
        number, dates = int(request["room"]), request.get("dates")
        tenant = self._tenants[number]
        if not tenant.is_build:
            raise ValueError(f"sandbox {number} was not opened to be kept")
        tenant.is_kept = True
        tenant.dates = None if dates is None else Dates(**dates)

    def _on_end(self, number: int, pidfd: int) -> None:
        """Free the room of a supervisor that has ended with all its processes, or keep the room's files as a layer."""
        tenant = self._tenants[number]
        self._selector.unregister(pidfd)
        os.close(pidfd)
        os.waitpid(tenant.pid, 0)
        kept_bytes = 0
        if tenant.is_kept:
            self._give_back(tenant)
            tenant.pid = 0
            tenant.room.freeze(tenant.dates)
            kept_bytes = tenant.room.used_bytes()
        else:
            del self._tenants[number]
            self._free(tenant)
        wire.send(self._server, {"ended": number, "kept_bytes": kept_bytes})

    def _drop(self, number: int) -> None:
        if self._tenants[number].pid:
            raise ValueError(f"sandbox {number} is open")
        self._free(self._tenants.pop(number))

    def _free(self, tenant: _Tenant) -> None:
        self._give_back(tenant)
        if tenant.is_build:
            tenant.room.unmount()
        with contextlib.suppress(OSError):
            os.rmdir(tenant.room.name)

    def _give_back(self, tenant: _Tenant) -> None:
        if tenant.owner is not None:
            self._owners.append(tenant.owner)
            tenant.owner = None


def _keep_only(*kept: int) -> None:
    first = 3
    for fd in sorted(kept):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, _MOST_FD)


def _import_no_more() -> None:
    """Remove this interpreter's importers, so that imports fail. Inside a sandbox its folders belong to the agent."""
    for places in (sys.path, sys.meta_path, sys.path_hooks):
        places.clear()


def settle(server: socket.socket, config: Request) -> None:
    """Enter the user and mount namespaces that the server maps, and mount the work folder and the box."""
    kernel.prctl(kernel.PR_CAP_AMBIENT, kernel.PR_CAP_AMBIENT_CLEAR_ALL)  # bubblewrap refuses to start with any
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    box = os.open(str(config["box"]), os.O_PATH | os.O_DIRECTORY)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    wire.send(server, {"unshared": os.getpid()})
    if wire.receive(server) is None:
        raise OSError("the server hung up")
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if config["ranged"]:
        os.setgroups([])
        set_limits(WATCH_LIMITS)  # of each owner of a sandbox, whichever users its root becomes
    os.umask(0o022)
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    work = str(config["work"])
    kernel.mount("box", work, "tmpfs", kernel.MS_NODEV, "size=16m,mode=0711")
    os.chdir(work)
    os.mkdir(_ROOMS, 0o700)
    os.mkdir(f"{_ROOMS}/{_BOX}")
    kernel.mount(f"/proc/self/fd/{box}", f"{_ROOMS}/{_BOX}", "", kernel.MS_BIND)
    os.close(box)
    leave_root(str(config["bubblewrap"]))
    os.chdir(_ROOMS)


def leave_root(bubblewrap: str) -> None:
    """Make the work folder the root, and keep only the mounts and devices that sandboxes need.

    A worker has about 25 mounts. The mount namespaces of a sandbox begin as copies of its spawner's, and bubblewrap
    reads the whole table after each of its own mounts.
    """
    for name in {*_PROGRAMS, bubblewrap.split("/")[1]}:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), name)
        elif os.path.isdir(f"/{name}"):
            os.mkdir(name)
            kernel.mount(f"/{name}", name, "", kernel.MS_BIND | kernel.MS_REC)
    os.mkdir("proc")
    kernel.mount("/proc", "proc", "", kernel.MS_BIND | kernel.MS_REC)
    os.mkdir("dev")
    for name, device in _DEVICES.items():
        os.close(os.open(f"dev/{name}", os.O_CREAT, 0o600))
        kernel.mount(f"/dev/{device}", f"dev/{name}", "", kernel.MS_BIND)
    os.makedirs("tmp", exist_ok=True)  # bubblewrap prepares its roots there
    os.mkdir("etc")
    with contextlib.suppress(FileNotFoundError), open(f"/{_LIBRARIES}", "rb") as here, open(_LIBRARIES, "wb") as copy:
        copy.write(here.read())
    kernel.replace_root()


def main(fd: int) -> None:
    """Serve the server at the other end of the inherited socket *fd* until it hangs up."""
    kernel.hide_command_line()
    kernel.set_name("spawner")
    processes.default_signals()
    server = socket.socket(fileno=fd)
    # A collection would touch every page that the forks share, and these objects live as long as the process.
    _import_no_more()
    gc.disable()
    gc.freeze()
    received = wire.receive(server)
    if received is None:
        return
    config, _ = received
    try:
        settle(server, config)
        spawner = Spawner(server, config)
    except OSError as error:
        wire.send(server, {"failed": str(error)})
        return
    wire.send(server, {"settled": True})
    with contextlib.suppress(ConnectionError):
        spawner.serve()
