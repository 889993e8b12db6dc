"""Makes a box from a root filesystem: the same tree with shifted owners and without traces of the building machine.

Runs as root while the image is built: `python3 make_box.py SOURCE TARGET`. Hard links within the source stay hard links
in the target.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

FIRST_UID = 100_000
"""The uid outside a box of the root user inside; `envserver.sandbox.Box` has the same number."""
MOST_UID = 65_535
"""The highest uid in a box: the range that the server maps has 65,536 uids."""
MADE_ANEW = ("proc", "sys", "dev", "tmp", "run", "var/tmp")
"""Folders that each sandbox mounts, or that are empty at its start."""
PROFILE = """# For login shells: as Debian's own, without the processes that it starts.
if [ "${EUID:-$(id -u)}" -eq 0 ]; then
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else
  PATH=/usr/local/bin:/usr/bin:/bin
fi
export PATH
if [ -n "${PS1-}" ] && [ -n "${BASH-}" ] && [ -f /etc/bash.bashrc ]; then
  . /etc/bash.bashrc
fi
for file in /etc/profile.d/*.sh; do
  if [ -r "$file" ]; then
    . "$file"
  fi
done
unset file
"""
"""The login profile of each shell session: it takes 2 ms, Debian's own takes 5 ms."""
FILES = {
    "etc/profile": PROFILE,
    "etc/hostname": "box\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 box\n::1 localhost ip6-localhost ip6-loopback\n",
    "etc/resolv.conf": "",
    "etc/machine-id": "",
}
"""The files that replace the source's files, some of which belong to the building machine during the build."""
OWN_NETWORK = (
    "etc/apt/sources.list",
    "etc/apt/sources.list.d",
    "etc/apt/auth.conf",
    "etc/apt/auth.conf.d",
    "etc/pip.conf",
    "etc/ssl/certs",
    "usr/local/share/ca-certificates",
    "root/.config",
    "root/.cache",
)
"""Mirrors, proxies' certificates and access data of the building machine. A box has no network and trusts no server."""


def copy(source: Path, target: Path) -> None:
    """Copy the box's files with numeric owners, because user names belong to two different systems."""
    target.mkdir(parents=True)
    left_out = [f"--exclude=./{name}/*" for name in (*MADE_ANEW, *OWN_NETWORK)]
    packing = subprocess.Popen(
        ["tar", "-C", source, "--one-file-system", "--numeric-owner", *left_out, "-cf", "-", "."],
        stdout=subprocess.PIPE,
    )
    subprocess.run(
        ["tar", "-C", target, "--numeric-owner", "--same-permissions", "-xf", "-"], stdin=packing.stdout, check=True
    )
    if packing.wait() != 0:
        raise SystemExit("make_box: the source could not be read")


def clean(box: Path) -> None:
    """Write the box's own files and remove the files of the building machine."""
    for name in OWN_NETWORK:
        path = box / name
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
    for name, text in FILES.items():
        path = box / name
        path.unlink(missing_ok=True)
        path.write_text(text)
        path.chmod(0o644)


def shift(box: Path) -> None:
    """Change the owner of every file to the box's own users.

    Raises:
        SystemExit: A file belongs to a user outside the range.
    """
    for path, found in tree(box):
        if max(found.st_uid, found.st_gid) > MOST_UID:
            if min(found.st_uid, found.st_gid) >= FIRST_UID:
                continue  # already changed under its other name
            raise SystemExit(f"make_box: {path} belongs to user {found.st_uid}, group {found.st_gid}")
        os.chown(path, found.st_uid + FIRST_UID, found.st_gid + FIRST_UID, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            path.chmod(stat.S_IMODE(found.st_mode))  # a change of owner drops the set-id bits


def check(box: Path) -> None:
    """Check the finished box.

    Raises:
        SystemExit: The tree is not a valid box.
    """
    for path, found in tree(box):
        if not FIRST_UID <= found.st_uid <= FIRST_UID + MOST_UID:
            raise SystemExit(f"make_box: {path} belongs to user {found.st_uid}")
        if stat.S_ISBLK(found.st_mode) or stat.S_ISCHR(found.st_mode):
            raise SystemExit(f"make_box: {path} is a device")
    if not (box / "usr/bin/su").stat().st_mode & stat.S_ISUID:
        raise SystemExit("make_box: su has lost its set-id bit")
    for words in (["python3", "-S", "-c", "import ssl, sqlite3, ctypes"], ["bash", "-c", "true"], ["id", "nobody"]):
        subprocess.run(["chroot", box, "/usr/bin/env", "-i", *words], check=True, stdout=subprocess.DEVNULL)


def tree(box: Path) -> list[tuple[Path, os.stat_result]]:
    """List *box* and all files in it, without following links."""
    names = [Path(folder, name) for folder, folders, files in os.walk(box) for name in (*folders, *files)]
    return [(path, path.lstat()) for path in (box, *names)]


if __name__ == "__main__":
    made = Path(sys.argv[2])
    copy(Path(sys.argv[1]), made)
    clean(made)
    shift(made)
    check(made)
