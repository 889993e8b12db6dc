"""Make a box of a root filesystem: the same tree, with every owner shifted, and nothing of the machine that built it.

Runs while the image is built, as root: `python3 make_box.py SOURCE TARGET`. Files of one source that are hard links of
each other are so in the target.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

FIRST_UID = 100_000
"""What root inside a box is outside; `envserver.sandbox.Box` has the same number."""
MOST_UID = 65_535
"""The last user of a box: the range that the server maps has 65,536."""
MADE_ANEW = ("proc", "sys", "dev", "tmp", "run", "var/tmp")
"""Mounted by each sandbox, or empty at its start."""
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
"""A session of a shell begins with one of these: 2 ms instead of 5."""
FILES = {
    "etc/profile": PROFILE,
    "etc/hostname": "box\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 box\n::1 localhost ip6-localhost ip6-loopback\n",
    "etc/resolv.conf": "",
    "etc/machine-id": "",
}
"""What replaces the source's files; while an image is built, some of them are the building machine's own."""
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
"""Mirrors, proxies' certificates and access data of the building machine. A box has no network and trusts nobody."""


def copy(source: Path, target: Path) -> None:
    """Copy what is to be in the box, with numbers for owners: names are those of two different systems."""
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
    """Put our files in their places, and take away what is the building machine's."""
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
    """Give every file to the box's own users.

    Raises:
        SystemExit: a file belongs to a user beyond the range.
    """
    for path, found in tree(box):
        if max(found.st_uid, found.st_gid) > MOST_UID:
            if min(found.st_uid, found.st_gid) >= FIRST_UID:
                continue  # met before, under its other name
            raise SystemExit(f"make_box: {path} belongs to user {found.st_uid}, group {found.st_gid}")
        os.chown(path, found.st_uid + FIRST_UID, found.st_gid + FIRST_UID, follow_symlinks=False)
        if not stat.S_ISLNK(found.st_mode):
            path.chmod(stat.S_IMODE(found.st_mode))  # a change of owner drops the set-id bits


def check(box: Path) -> None:
    """Look at what was made.

    Raises:
        SystemExit: it is no box.
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
    """List *box* and all that is in it; links are not followed."""
    names = [Path(folder, name) for folder, folders, files in os.walk(box) for name in (*folders, *files)]
    return [(path, path.lstat()) for path in (box, *names)]


if __name__ == "__main__":
    made = Path(sys.argv[2])
    copy(Path(sys.argv[1]), made)
    clean(made)
    shift(made)
    check(made)
