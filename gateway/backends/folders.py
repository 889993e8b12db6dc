"""A worker's socket folder: ``<root>/<worker id>``, which one worker shares with the gateway and with no other worker.

Whatever is in there was put there by the worker, so it may be hostile: a link instead of a socket, a tree that is
thousands of folders deep. Nothing here follows a link, and nothing here recurses.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from gateway.core.addresses import node_address
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import WorkerId
from gateway.core.placement import NodeId

SOCKET_NAME = "worker.sock"
PATH_MAX_BYTES = 107
"""A Unix socket's path has room for 108 bytes, the last of which is NUL (unix(7))."""
_SWEEPS = 3
"""How often a folder is gone through before it counts as one that cannot be emptied."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def is_safe_id(text: str) -> bool:
    """Whether *text* may be a worker's id: one path segment, a label value and a part of a container's name."""
    return _SAFE_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class RemoteFolders:
    """Folders on another machine, whose engine gate makes and removes them as it makes and removes containers."""

    root: Path
    node: NodeId

    def folder(self, id: WorkerId) -> Path:
        """Where the worker's folder is on its machine."""
        return self.root / id

    def address(self, id: WorkerId, name: str = SOCKET_NAME) -> str:
        """The worker's address, by which any gateway finds it through its node."""
        return node_address(self.node, id, name)

    def make(self, id: WorkerId) -> None:
        """Nothing is made here. Raises ``StartFailed`` for an id that is not safe."""
        _expect_safe(id)

    def check(self, id_length: int) -> None:
        """The gate over there has checked them."""

    def remove(self, id: WorkerId) -> None:
        """Nothing is removed here."""


def _expect_safe(id: WorkerId) -> None:
    if not is_safe_id(id):
        raise StartFailed(f"{id!r} cannot be a worker's id: letters, digits and _.- only, at most 64")


@dataclass(frozen=True, slots=True)
class SocketFolders:
    """The folders below *root*, one a worker."""

    root: Path
    mode: int
    """Of a worker's folder: 0o777 where the worker is another user, else 0o700."""
    _removing: Lock = field(default_factory=Lock, compare=False, repr=False)
    """Two that remove one folder at once, in threads, would each miss what the other has taken."""

    def folder(self, id: WorkerId) -> Path:
        """Where the worker's folder is."""
        return self.root / id

    def address(self, id: WorkerId, name: str = SOCKET_NAME) -> str:
        """The worker's address; *name* is that of the socket."""
        return f"unix:{self.folder(id) / name}"

    def make(self, id: WorkerId) -> None:
        """Make the folder of a new worker; and *root*, which others may pass through but not list.

        A *root* that somebody else owns is one whose folders the engine gate makes: then nothing is done.

        Raises:
            StartFailed: the id is not safe or taken, the path is too long for a socket, or *root* can't be written.
        """
        _expect_safe(id)
        self.check_length(len(id))
        folder = self.folder(id)
        try:
            self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
            if self.root.stat().st_uid != os.geteuid() and os.geteuid() != 0:
                return
            folder.mkdir(mode=0o700)
            folder.chmod(self.mode)  # mkdir's mode would be cut by the umask
        except FileExistsError as error:
            raise StartFailed(f"there is a worker {id} already, or it left {folder} behind") from error
        except OSError as error:
            raise StartFailed(f"cannot make the socket folder {folder}: {error.strerror}") from error

    def check_length(self, id_length: int) -> None:
        """Raise ``StartFailed`` if sockets of workers with ids of *id_length* characters would not fit."""
        socket_bytes = len(os.fsencode(self.root)) + id_length + len(SOCKET_NAME) + 2
        if socket_bytes > PATH_MAX_BYTES:
            raise StartFailed(
                f"socket paths below {self.root} would have {socket_bytes} bytes, and a Unix socket's has at most "
                f"{PATH_MAX_BYTES}: choose a shorter socket_dir"
            )

    def check(self, id_length: int) -> None:
        """Raise ``BackendError`` with what to do if workers' sockets cannot be kept safely below *root*."""
        self.check_length(id_length)
        try:
            self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
            found = self.root.stat()
        except OSError as error:
            raise BackendError(f"cannot make {self.root}: {error.strerror}; choose another socket_dir") from error
        if found.st_mode & 0o022:
            raise BackendError(f"others can write to {self.root} and so plant links in it: chmod 0711 {self.root}")

    def remove(self, id: WorkerId) -> None:
        """Remove the worker's folder and all that is in it; no error if it is gone or was never there.

        Raises:
            BackendError: something in it can't be removed.
        """
        if not is_safe_id(id):
            return
        folder = self.folder(id)
        with self._removing:
            try:
                remove_tree(folder)
            except OSError as error:
                raise BackendError(f"cannot remove {folder}: {error.strerror}") from error


Folders = SocketFolders | RemoteFolders
"""The workers' socket folders, on this machine or on another one."""


class Claims:
    """Tells other processes which workers' folders this one uses, by a locked file beside each: ``<worker id>.lock``.

    A lock ends with its process, so a file that nobody has locked says that its worker's gateway is gone.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: dict[WorkerId, int] = {}

    def take(self, id: WorkerId) -> None:
        """Claim the folder of a new worker, before it is made. Raises ``StartFailed``."""
        _expect_safe(id)
        draft = self._root / f".{id}.{secrets.token_hex(4)}"
        try:
            self._root.mkdir(mode=0o711, parents=True, exist_ok=True)
            held = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                draft.rename(self._path(id))  # only now others look at it
            except OSError:
                os.close(held)
                raise
        except OSError as error:
            raise StartFailed(f"cannot claim the socket folder of worker {id}: {error}") from error
        self._held[id] = held

    def release(self, id: WorkerId) -> None:
        """Give the claim up, once the folder is gone; none is no error."""
        if (held := self._held.pop(id, None)) is not None:
            self._path(id).unlink(missing_ok=True)
            os.close(held)

    def take_over(self) -> list[WorkerId]:
        """Claim the folders of workers whose process is gone; returns their ids."""
        taken = []
        for path in self._root.glob("*.lock"):
            id = WorkerId(path.name.removesuffix(".lock"))
            with suppress(OSError):  # it is gone by now, or another user's
                found = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
                if id not in self._held and is_safe_id(id) and _is_locked_now(found, path):
                    self._held[id] = found
                    taken.append(id)
                else:
                    os.close(found)
        return taken

    def _path(self, id: WorkerId) -> Path:
        return self._root / f"{id}.lock"


def _is_locked_now(file: int, path: Path) -> bool:
    """Lock *file*, if nobody has, and it is the one at *path* still."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def remove_tree(path: Path) -> None:
    """Remove *path*, a folder or whatever else stands in its place, without following a link.

    Each folder inside is moved to the top before it is emptied, so the depth of the tree costs neither stack nor open
    files nor long paths. ``shutil.rmtree`` of Python 3.11 recurses and gives up at about a thousand levels.
    """
    try:
        top = os.open(path, _FOLDER)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        path.unlink(missing_ok=True)
        return
    try:
        for attempt in range(1, _SWEEPS + 1):
            _empty(top)
            try:
                path.rmdir()
                break
            except OSError as error:
                # Something was put into it since, or was passed over while entries were removed as they were listed.
                if error.errno != errno.ENOTEMPTY or attempt == _SWEEPS:
                    raise
    finally:
        os.close(top)


def _empty(top: int) -> None:
    pending = _sweep(top, top)
    while pending:
        name = pending.pop()
        for attempt in range(1, _SWEEPS + 1):
            inner = _open_folder(top, name)
            try:
                pending += _sweep(top, inner)
            finally:
                os.close(inner)
            try:
                os.rmdir(name, dir_fd=top)
                break
            except OSError as error:
                # Entries that were being removed while they were listed may have been passed over.
                if error.errno != errno.ENOTEMPTY or attempt == _SWEEPS:
                    raise


def _sweep(top: int, folder: int) -> list[str]:
    """Unlink the files of *folder* and move its folders to *top*; returns the folders' names there."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            name = entry.name
            if folder != top:
                _permit(folder, name)  # a folder that changes its parent is written to: its ".." changes
                name = secrets.token_hex(16)
                os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=top)
            folders.append(name)
    return folders


def _open_folder(top: int, name: str) -> int:
    _permit(top, name)
    return os.open(name, _FOLDER, dir_fd=top)


def _permit(parent: int, name: str) -> None:
    """Give the owner all rights on a folder, if that is us; by way of a descriptor, as chmod itself follows a link."""
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with suppress(PermissionError):
            os.chmod(f"/proc/self/fd/{folder}", 0o700)
    finally:
        os.close(folder)
