"""A small box made of this machine's own programs, where there is no Debian tree: laptops and tests.

Copies, not binds: a bind of the host's /etc would show the host's secrets, and an overlay over a live tree is undefined
when the tree changes. Programs come with the libraries that the dynamic loader names. No network is needed.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from envserver.sandbox.rights import may_map_range
from envserver.sandbox.values import FIRST_UID, Box, SandboxError

PROGRAMS = """
bash sh cat ls cp mv rm mkdir rmdir ln touch chmod chown chgrp chcon echo printf head tail sort uniq wc tr cut tee dd df
du env id whoami groups users who pinky logname sleep seq stat date true false test [ yes mktemp readlink realpath
dirname basename expr factor timeout nohup nice stty tty sync truncate mkfifo mknod comm join paste fold fmt nl od
split csplit shuf shred tac rev tsort pr expand unexpand column hexdump install link unlink dir vdir dircolors numfmt
pathchk printenv stdbuf arch nproc uname hostname hostid sha1sum sha224sum sha256sum sha384sum sha512sum b2sum md5sum
cksum sum base32 base64 basenc kill pkill pgrep pidof ps top free uptime w vmstat killall pstree grep egrep fgrep
sed awk gawk mawk find xargs diff cmp diff3 sdiff patch tar gzip gunzip zcat bzip2 bunzip2 xz unxz zip unzip bc dc jq
tree less more which whereis getopt flock logger getent su runuser useradd usermod userdel groupadd
groupmod groupdel gpasswd passwd chpasswd chage newgrp chroot mount umount mountpoint unshare nsenter setpriv setsid
script ip curl wget bwrap python3 git make
"""
"""Those of the image's box; what this machine does not have is left out."""
_FOLDERS = (
    *("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/games", "usr/include", "usr/share", "usr/src"),
    *(f"usr/local/{name}" for name in ("bin", "etc", "games", "include", "lib", "sbin", "share", "src")),
    *(f"var/{name}" for name in ("backups", "cache", "lib", "local", "log/apt", "mail", "opt", "spool", "tmp")),
    *("boot", "dev", "etc", "home", "media", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp"),
)
_NOLOGIN = "/usr/sbin/nologin"
_USERS = f"""root:x:0:0:root:/root:/bin/bash
daemon:x:1:1:daemon:/usr/sbin:{_NOLOGIN}
bin:x:2:2:bin:/bin:{_NOLOGIN}
sys:x:3:3:sys:/dev:{_NOLOGIN}
sync:x:4:65534:sync:/bin:/bin/sync
games:x:5:60:games:/usr/games:{_NOLOGIN}
man:x:6:12:man:/var/cache/man:{_NOLOGIN}
lp:x:7:7:lp:/var/spool/lpd:{_NOLOGIN}
mail:x:8:8:mail:/var/mail:{_NOLOGIN}
news:x:9:9:news:/var/spool/news:{_NOLOGIN}
uucp:x:10:10:uucp:/var/spool/uucp:{_NOLOGIN}
proxy:x:13:13:proxy:/bin:{_NOLOGIN}
www-data:x:33:33:www-data:/var/www:{_NOLOGIN}
backup:x:34:34:backup:/var/backups:{_NOLOGIN}
list:x:38:38:Mailing List Manager:/var/list:{_NOLOGIN}
irc:x:39:39:ircd:/run/ircd:{_NOLOGIN}
_apt:x:42:65534::/nonexistent:{_NOLOGIN}
nobody:x:65534:65534:nobody:/nonexistent:{_NOLOGIN}
"""
"""Of a fresh Debian."""
GROUPS = """
root:x:0: daemon:x:1: bin:x:2: sys:x:3: adm:x:4: tty:x:5: disk:x:6: lp:x:7: mail:x:8: news:x:9: uucp:x:10: man:x:12:
proxy:x:13: kmem:x:15: dialout:x:20: fax:x:21: voice:x:22: cdrom:x:24: floppy:x:25: tape:x:26: sudo:x:27: audio:x:29:
dip:x:30: www-data:x:33: backup:x:34: operator:x:37: list:x:38: irc:x:39: src:x:40: shadow:x:42: utmp:x:43: video:x:44:
sasl:x:45: plugdev:x:46: staff:x:50: games:x:60: users:x:100: nogroup:x:65534:
"""
"""Of a fresh Debian, separated by white space."""
_LOG = "2026-01-01 00:00:00 startup archives install\n" + "".join(
    f"2026-01-01 00:00:00 status installed {name}\n" for name in ("base-files", "base-passwd", "bash", "coreutils")
)
_ETC = {
    "passwd": _USERS,
    "group": "\n".join([*GROUPS.split(), ""]),
    "shadow": "".join(f"{line.partition(':')[0]}:*:19000:0:99999:7:::\n" for line in _USERS.splitlines()),
    "gshadow": "".join(f"{line.partition(':')[0]}:*::\n" for line in GROUPS.split()),
    "shells": "/bin/sh\n/bin/bash\n/usr/bin/bash\n",
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
_SERVICES = "su runuser su-l runuser-l other useradd passwd chpasswd groupadd usermod"
_SEARCH = "/usr/bin:/bin:/usr/sbin:/sbin"
_LDD_FILES = 16
"""Files that one run of ldd reads; it starts three processes for each."""
_LDD_S = 60
"""Seconds after which a run of ldd hangs. A run takes 0.1 s on an idle machine."""
_STAMP = "usr/share/env-gateway-box"
"""Holds the digest of the recipe, this file, by which a box was made."""
_STDLIB_LEFT_OUT = shutil.ignore_patterns("test", "tests", "idlelib", "tkinter", "dist-packages", "config-*")


def box_of_host(folder: str | Path, *, first_uid: int | None = None) -> Box:
    """Make a box of this machine's own programs in *folder*, unless it is there; takes some seconds and 100 MB.

    A box that another version of this module made there may be in use, and stays; the new one is beside it.

    Raises:
        SandboxError: a shell or one of its libraries is missing here.
    """
    ranged = may_map_range() and os.geteuid() == 0
    owner = (FIRST_UID if first_uid is None else first_uid) if ranged else os.geteuid()
    folder, recipe = Path(folder).absolute(), hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    if folder.exists() and not _is_made_by(recipe, folder):
        folder = folder.with_name(f"{folder.name}-{recipe}")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            _fill(draft)
            (draft / _STAMP).write_text(recipe)
            _shift(draft, owner if ranged else None)
            _publish(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return Box(folder, first_uid=owner)


def _is_made_by(recipe: str, box: Path) -> bool:
    try:
        return (box / _STAMP).read_text() == recipe
    except OSError:
        return False


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
    for name in ("dpkg.log", "alternatives.log"):
        (root / "var/log" / name).write_text(_LOG)
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
    found: set[Path] = set()
    for first in range(0, len(programs), _LDD_FILES):  # a busy machine needs minutes for all
        done = subprocess.run(
            ["ldd", *programs[first : first + _LDD_FILES]],
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": _SEARCH, "LC_ALL": "C"},
            timeout=_LDD_S,
        )
        found |= {Path(name) for name in re.findall(r"(?:=> )?(/\S+) \(0x", done.stdout)}
    return found


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
    for service in _SERVICES.split():
        (root / "etc/pam.d" / service).write_text(_POLICY)
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
