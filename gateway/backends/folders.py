"""Create and remove workers' socket folders: ``<root>/<worker id>``, shared by one worker and the gateway only.

The worker writes the folder's content, so the content may be hostile: a link instead of a socket, or a tree thousands
of folders deep. No function here follows a link, and none recurses.
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
"""Bytes in the longest path of a Unix socket: the kernel reserves 108, with the final NUL (unix(7))."""
_SWEEPS = 3
"""Attempts to empty a folder before its removal fails."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def is_safe_id(text: str) -> bool:
    """Return True if *text* is a valid worker id: a path segment, a label value and part of a container's name."""
    return _SAFE_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class RemoteFolders:
    """Socket folders on another machine, whose engine gate creates and removes them together with the containers."""

    root: Path
    node: NodeId

    def folder(self, id: WorkerId) -> Path:
        """Return the path of the worker's folder on its machine."""
        return self.root / id

    def address(self, id: WorkerId, name: str = SOCKET_NAME) -> str:
        """Return the worker's address, through which any replica reaches it by its node."""
        return node_address(self.node, id, name)

    def make(self, id: WorkerId) -> None:
        """Check the id only: the node's engine gate creates the folder. Raises ``StartFailed`` for an unsafe id."""
        _expect_safe(id)

    def check(self, id_length: int) -> None:
        """Do nothing: the node's engine gate has checked the folders."""

    def remove(self, id: WorkerId) -> None:
        """Do nothing: the node's engine gate removes the folder."""


def _expect_safe(id: WorkerId) -> None:
    if not is_safe_id(id):
        raise StartFailed(f"{id!r} cannot be a worker's id: letters, digits and _.- only, at most 64")


@dataclass(frozen=True, slots=True)
class SocketFolders:
    """The folders below *root*, one per worker."""

    root: Path
    mode: int
    """Mode of a worker's folder: 0o777 if the worker runs as another user, else 0o700."""
    _removing: Lock = field(default_factory=Lock, compare=False, repr=False)
    """Lock for removals: two threads that remove one folder concurrently would miss entries that the other moved."""

    def folder(self, id: WorkerId) -> Path:
        """Return the path of the worker's folder."""
        return self.root / id

    def address(self, id: WorkerId, name: str = SOCKET_NAME) -> str:
        """Return the worker's address; *name* is the socket's file name."""
        return f"unix:{self.folder(id) / name}"

    def make(self, id: WorkerId) -> None:
        """Create the folder of a new worker, and *root*, which other users may traverse but not list.

        If another user owns *root*, the engine gate creates the folders, and this method creates none.

        Raises:
            StartFailed: The id is unsafe or taken, the path is too long for a socket, or *root* can't be written.
        """
        _expect_safe(id)
        self.check_length(len(id))
        folder = self.folder(id)
        try:
            self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
            if self.root.stat().st_uid != os.geteuid() and os.geteuid() != 0:
                return
            folder.mkdir(mode=0o700)
            folder.chmod(self.mode)  # the umask would reduce mkdir's mode
        except FileExistsError as error:
            raise StartFailed(f"there is a worker {id} already, or it left {folder} behind") from error
        except OSError as error:
            raise StartFailed(f"cannot make the socket folder {folder}: {error.strerror}") from error

    def check_length(self, id_length: int) -> None:
        """Raise ``StartFailed`` if the socket's path is too long for worker ids of *id_length* characters."""
        socket_bytes = len(os.fsencode(self.root)) + id_length + len(SOCKET_NAME) + 2
        if socket_bytes > PATH_MAX_BYTES:
            raise StartFailed(
                f"socket paths below {self.root} would have {socket_bytes} bytes, and a Unix socket's has at most "
                f"{PATH_MAX_BYTES}: choose a shorter socket_dir"
            )

    def check(self, id_length: int) -> None:
        """Raise ``BackendError`` with a remedy if *root* is not a safe place for workers' sockets."""
        self.check_length(id_length)
        try:
            self.root.mkdir(mode=0o711, parents=True, exist_ok=True)
            found = self.root.stat()
        except OSError as error:
            raise BackendError(f"cannot make {self.root}: {error.strerror}; choose another socket_dir") from error
        if found.st_mode & 0o022:
            raise BackendError(f"others can write to {self.root} and so plant links in it: chmod 0711 {self.root}")

    def remove(self, id: WorkerId) -> None:
        """Remove the worker's folder and its content; a missing folder is not an error.

        Raises:
            BackendError: An entry in the folder can't be removed.
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
    """Marks the folders that this process uses with a locked file next to each: ``<worker id>.lock``.

    The kernel releases a lock when its process ends. So an unlocked file means that the worker's gateway is gone.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: dict[WorkerId, int] = {}

    def take(self, id: WorkerId) -> None:
        """Claim the folder of a new worker before it is created. Raises ``StartFailed``."""
        _expect_safe(id)
        draft = self._root / f".{id}.{secrets.token_hex(4)}"
        try:
            self._root.mkdir(mode=0o711, parents=True, exist_ok=True)
            held = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                draft.rename(self._path(id))  # `take_over` of other processes finds it only now, when it is locked
            except OSError:
                os.close(held)
                raise
        except OSError as error:
            raise StartFailed(f"cannot claim the socket folder of worker {id}: {error}") from error
        self._held[id] = held

    def release(self, id: WorkerId) -> None:
        """Release the claim after the folder's removal; a missing claim is not an error."""
        if (held := self._held.pop(id, None)) is not None:
            self._path(id).unlink(missing_ok=True)
            os.close(held)

    def take_over(self) -> list[WorkerId]:
        """Claim the folders whose gateway process is gone, and return their workers' ids."""
        taken = []
        for path in self._root.glob("*.lock"):
            id = WorkerId(path.name.removesuffix(".lock"))
            with suppress(OSError):  # the file is gone by now, or belongs to another user
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
    """Lock *file*; return False if it is locked already, or is no longer the file at *path*."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def remove_tree(path: Path) -> None:
    """Remove *path*, whether it is a folder or another entry, without following a link.

    Each inner folder is moved to the top before it is emptied. So a deep tree needs no stack, no open files and no long
    paths. ``shutil.rmtree`` of Python 3.11 recurses and fails at about a thousand levels.
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
                # An entry was added meanwhile, or the listing skipped it because entries were removed during it.
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
                # The listing may skip entries when entries are removed during it.
                if error.errno != errno.ENOTEMPTY or attempt == _SWEEPS:
                    raise


def _sweep(top: int, folder: int) -> list[str]:
    """Unlink the files of *folder*, move its folders to *top*, and return the folders' names there."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
                continue
            name = entry.name
            if folder != top:
                _permit(folder, name)  # moving a folder needs write permission on it, because its ".." changes
                name = secrets.token_hex(16)
                os.rename(entry.name, name, src_dir_fd=folder, dst_dir_fd=top)
            folders.append(name)
    return folders


def _open_folder(top: int, name: str) -> int:
    _permit(top, name)
    return os.open(name, _FOLDER, dir_fd=top)


def _permit(parent: int, name: str) -> None:
    """Grant the owner all rights on a folder, if this process owns it.

    A descriptor is used because chmod itself would follow a link.
    """
    folder = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with suppress(PermissionError):
            os.chmod(f"/proc/self/fd/{folder}", 0o700)
    finally:
        os.close(folder)
