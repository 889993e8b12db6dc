"""A small box made of this machine's own programs, where there is no Debian tree: laptops and tests.

Copies, not binds: a bind of the host's /etc would show the host's secrets, and an overlay over a live tree is undefined
when the tree changes. Programs come with the libraries that the dynamic loader names. No network is needed.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from .errors import SandboxError
from .launch import may_map_range
from .values import FIRST_UID, Box

PROGRAMS = """
bash sh cat ls cp mv rm mkdir rmdir ln touch chmod chown chgrp echo printf head tail sort uniq wc tr cut tee dd df
du env id whoami sleep seq stat date true false test yes mktemp readlink realpath dirname basename expr timeout
nohup stty tty sync truncate mkfifo mknod comm paste od sha256sum md5sum base64 nproc uname hostname kill ps pgrep
pkill free grep egrep sed awk gawk mawk find xargs diff tar gzip gunzip su runuser useradd groupadd usermod passwd
chpasswd mount umount unshare nsenter setpriv setsid script mountpoint chroot ip bwrap python3 git
"""
_FOLDERS = (
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/lib64",
    "etc",
    "root",
    "home",
    "tmp",
    "var/tmp",
    "var/log",
    "var/mail",
    "run",
    "proc",
    "dev",
    "sys",
    "srv",
    "opt",
    "mnt",
)
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\ndaemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin\n"
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\ndaemon:x:1:\ntty:x:5:\nmail:x:8:\nusers:x:100:\nnogroup:x:65534:\n",
    "shadow": "root:*:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
    "gshadow": "root:*::\n",
    "hostname": "box\n",
    "hosts": "127.0.0.1 localhost\n127.0.0.1 box\n",
    "profile": 'PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"\nexport PATH\n',
    "login.defs": "UID_MIN 1000\nUID_MAX 59000\nGID_MIN 1000\nGID_MAX 59000\nENCRYPT_METHOD SHA512\nUMASK 022\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
}
_POLICY = """auth sufficient pam_rootok.so
account sufficient pam_permit.so
session required pam_permit.so
password required pam_unix.so
"""
_SEARCH = "/usr/bin:/bin:/usr/sbin:/sbin"
_STDLIB_LEFT_OUT = shutil.ignore_patterns("test", "tests", "idlelib", "tkinter", "dist-packages", "config-*")


def build(folder: Path, *, first_uid: int | None) -> Box:
    """Make the box in *folder* unless it is there; takes some seconds and 100 MB.

    Raises:
        SandboxError: a shell or one of its libraries is missing here.
    """
    ranged = may_map_range() and os.geteuid() == 0
    owner = (FIRST_UID if first_uid is None else first_uid) if ranged else os.geteuid()
    folder = folder.absolute()
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            _fill(draft)
            _shift(draft, owner if ranged else None)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Box(folder, first_uid=owner)


def _publish(draft: Path, folder: Path) -> None:
    try:
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another one was faster, and its box is as good
            raise


def _fill(root: Path) -> None:
    for name in _FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for link, target in (("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")):
        (root / link).symlink_to(target)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    (root / "root").chmod(0o700)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    for name in ("shadow", "gshadow"):
        (root / "etc" / name).chmod(0o640)
    programs = [path for name in PROGRAMS.split() if (path := shutil.which(name, path=_SEARCH)) is not None]
    if not {"bash", "cat"} <= {Path(path).name for path in programs}:
        raise SandboxError("this machine has no bash in /usr/bin to make a box of", code="unsupported")
    copied: list[Path] = []
    for program in programs:
        copied.append(root / "usr/bin" / Path(program).name)
        _copy(Path(program), copied[-1])
    extra = _python_parts(root) + _session_parts(root)
    for library in _libraries([*map(str, copied), *extra]):
        # As /lib/… and /lib64/…: both are links into /usr here, as on the machines that these come from.
        inside = root / "usr" / library.relative_to("/usr" if library.is_relative_to("/usr") else "/")
        _copy(library, inside)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(source.resolve(), target)


def _libraries(programs: list[str]) -> set[Path]:
    """Ask the loader what *programs* need; scripts need nothing."""
    done = subprocess.run(
        ["ldd", *programs],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": _SEARCH, "LC_ALL": "C"},
        timeout=60,
    )
    found = re.findall(r"(?:=> )?(/\S+) \(0x", done.stdout)
    return {Path(name) for name in found}


def _python_parts(root: Path) -> list[str]:
    """Copy the machine's own Python, not this process's, which may be a venv's; its extensions' paths."""
    program = shutil.which("python3", path=_SEARCH)
    if program is None:
        return []
    version = re.sub(r"\D*(\d+\.\d+).*", r"\1", Path(program).resolve().name)
    library = Path(f"/usr/lib/python{version}")
    if not library.is_dir():
        return []
    target = root / "usr/lib" / library.name
    shutil.copytree(library, target, symlinks=False, ignore=_STDLIB_LEFT_OUT, ignore_dangling_symlinks=True)
    return [str(path) for path in target.rglob("*.so")]


def _session_parts(root: Path) -> list[str]:
    """Copy what ``su`` needs besides its libraries: a policy that allows root, and the modules for it."""
    (root / "etc/pam.d").mkdir()
    for service in (
        "su",
        "runuser",
        "su-l",
        "runuser-l",
        "other",
        "useradd",
        "passwd",
        "chpasswd",
        "groupadd",
        "usermod",
    ):
        text = _POLICY
        (root / "etc/pam.d" / service).write_text(text)
    found = []
    for name in ("pam_rootok.so", "pam_permit.so", "pam_unix.so"):
        for path in Path("/usr/lib").glob(f"*/security/{name}"):
            copy = root / path.relative_to("/")
            _copy(path, copy)
            found.append(str(copy))
    return found


def _shift(root: Path, owner: int | None) -> None:
    """Give every file to root inside; a change of owner drops the set-id bits, so they are set again."""
    root.chmod(0o755)
    if owner is None:
        return
    for path in [root, *root.rglob("*")]:
        mode = path.lstat().st_mode
        os.chown(path, owner, owner, follow_symlinks=False)
        if not path.is_symlink():
            path.chmod(mode & 0o7777)
