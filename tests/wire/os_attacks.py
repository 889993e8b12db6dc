"""Attacks of root in a box, over AReaL's steps, on the server, the machine, a neighbour or the agent's own reward.

Scripts print ``ESCAPED`` for each forbidden action that worked, and ``tried`` at their end. The test fills in two names
in braces: ``{port}`` is a listening port on the machine, and ``{socket}`` is an abstract Unix socket.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tests.sandbox.test_escapes import _CALL, CALLS, OPENS

NEIGHBOUR_PORT = 45678
NEIGHBOUR = f"""
echo $SECRET > /root/neighbour; echo $SECRET > /tmp/neighbour; echo $SECRET > /dev/shm/neighbour
ipcmk -M 4096 -p 0666; ipcmk -Q -p 0666; ipcmk -S 1 -p 0666
cat > /tmp/listen.py <<'END'
import socket, time
one = socket.create_server(("0.0.0.0", {NEIGHBOUR_PORT}))
other = socket.socket(socket.AF_UNIX)
other.bind("\\0neighbour")
other.listen()
print("listening", flush=True)
time.sleep(3600)
END
python3 /tmp/listen.py > /tmp/listening &
sleep 98765 &
until grep -q listening /tmp/listening; do sleep 0.05; done
"""
"""Commands that set up another session of the same worker for the time of the attacks."""

_PRELUDE = 'try() { "$@" >/dev/null 2>&1 && echo "ESCAPED: $*"; }\n'


def _python(code: str) -> str:
    return f"cat > /tmp/attack.py <<'END'\n{code}\nEND\npython3 -I /tmp/attack.py"


_BATCH = """
import signal, subprocess, sys
for name, code in {cases}.items():
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, stdin=sys.stdin)
    # A call that the container's own filter ends the process for was not made either.
    if done.stdout != "held\\n" and done.returncode != -signal.SIGSYS:
        print("ESCAPED:", name, done.stdout, done.stderr[-200:])
"""
_OPEN = """
try:
    f = open({path!r}, {mode!r}); {use}
    print("ESCAPED")
except OSError:
    print("held")
"""


def _batch(cases: dict[str, str]) -> str:
    return _python(_BATCH.format(cases=json.dumps(cases)))


def _opened(path: str, mode: str) -> str:
    return _OPEN.format(path=path, mode=mode, use="f.read(1)" if "r" in mode else "f.write('1'); f.flush()")


_CONNECT = f"""
import socket
machine = [("127.0.0.1", {{port}}), ("172.17.0.1", {{port}})]
for address in *machine, ("127.0.0.1", {NEIGHBOUR_PORT}), ("169.254.169.254", 80), ("1.1.1.1", 53):
    try:
        socket.create_connection(address, 1)
        print("ESCAPED:", address)
    except OSError:
        pass
for name in ("{{socket}}", "neighbour", "/dbus-vfs-daemon", "docker"):
    try:
        socket.socket(socket.AF_UNIX).connect("\\0" + name)
        print("ESCAPED:", name)
    except OSError:
        pass
"""
_RAW = """
import socket
for family, kind in (socket.AF_PACKET, 3), (socket.AF_PACKET, 2), (15, 3), (31, 3), (38, 5), (40, 1), (44, 3):
    try:
        socket.socket(family, kind)
        print("ESCAPED: family", family)
    except OSError:
        pass
"""
_OVERLAY = """
import os
os.makedirs("/root/folder", exist_ok=True)
for name in ("redirect", "metacopy", "opaque", "origin"):
    for space in ("user", "trusted"):
        try:  # newer kernels keep it, escaped, for overlays within: it must not mean anything to this one
            os.setxattr("/root/folder", f"{space}.overlay.{name}", b"/etc")
        except OSError:
            pass
os.rename("/root/folder", "/root/moved")
if os.listdir("/root/moved"):
    print("ESCAPED")
"""
_CHROOT = """
import os
os.makedirs("/tmp/jail", exist_ok=True)
top = os.open("/", os.O_RDONLY)
os.chroot("/tmp/jail")
os.fchdir(top)
for _ in range(50):
    os.chdir("..")
os.chroot(".")
if any(os.path.exists(path) for path in ("/srv/env", "/run/envserver", "/work", "/.dockerenv")):
    print("ESCAPED")
"""
_PEEK = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("root", "cwd", "exe"):
        try:
            target = os.readlink(f"/proc/{pid}/{name}")
        except OSError:
            continue
        if "env" in target or target.startswith("/work"):
            print("ESCAPED:", pid, name, target)
    for inside in ("root/srv/env", "root/run/envserver", "cwd/server.py"):
        if os.path.exists(f"/proc/{pid}/{inside}"):
            print("ESCAPED:", pid, inside)
"""
_DESCRIPTORS = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        continue
    for target in targets:
        if any(word in target for word in ("socket:", "pidfd", "eventpoll", "memfd", "/srv", "/work", "seccomp")):
            print("ESCAPED:", pid, target)
"""
_HOG = "python3 -c 'import time; x = [bytearray(b\"x\" * 2**20) for _ in range(150)]; time.sleep(60)'"
GHOST = """
for name in bash python3 ls cat grep stat find test wc cut head tail; do
    for folder in /usr/local/bin /usr/bin /usr/local/sbin; do
        rm -f $folder/$name
        printf '#!/bin/dash\\necho 4\\nexit 0\\n' > $folder/$name
        chmod 755 $folder/$name
    done
done
"""
"""Replaces the programs that scripts and judges call by programs that lie."""


@dataclass(frozen=True)
class Attack:
    """A script, and its permitted effects on the episode."""

    script: str
    says_tried: bool = True
    """Whether the script is read to its end. False if it may end the shell."""
    may_end: bool = False
    """Whether the attack may end the box, which is the episode's own failure, without a reward."""

    @property
    def whole(self) -> str:
        return f"{_PRELUDE}{self.script}\necho tried"


_OWN = "(net|kernel/(shm|msg|sem|hostname|domainname|ns_last_pid|auto_msgmni|pid_max)|fs/mqueue)"
"""Settings that each network, IPC, UTS or (``pid_max``, since Linux 6.14) PID namespace has for itself."""

CALL_PARTS = 2
ATTACKS: dict[str, Attack] = {
    **{  # each starts a process, and on a slow machine all of them take longer than a command may
        f"system calls, part {part + 1} of {CALL_PARTS}": Attack(
            _batch({name: _CALL + code for name, code in list(CALLS.items())[part::CALL_PARTS]})
        )
        for part in range(CALL_PARTS)
    },
    "files of the machine": Attack(_batch({name: _opened(*case) for name, case in OPENS.items()})),
    "processes of others": Attack(
        r"""cat /proc/[0-9]*/{cmdline,environ,comm} 2>/dev/null | tr '\0' '\n' | sed -n '
        /[e]nvserver/ s/^/ESCAPED: /p; /[E]NVSERVER/ s/^/ESCAPED: /p; /[s]erver.py/ s/^/ESCAPED: /p
        /[s]etpriv/ s/^/ESCAPED: /p; /[b]wrap/ s/^/ESCAPED: /p; /[s]pawner/ s/^/ESCAPED: /p; /9876[5]/ s/^/ESCAPED: /p'
        [ $(ls -d /proc/[0-9]*/ | wc -l) -lt 12 ] || echo ESCAPED: more processes than its own"""
    ),
    "roots of other processes": Attack(_python(_PEEK)),
    "open files of other processes": Attack(_python(_DESCRIPTORS)),
    "killing the first process": Attack("kill -9 1; kill -TERM 1; kill -SEGV 1; kill -STOP 1; try kill -0 2147483"),
    "killing everything": Attack("kill -9 -1", says_tried=False),
    "mounts": Attack(
        """try mount -t tmpfs x /mnt; try mount -t proc proc /mnt; try mount --bind / /mnt; try mount -t cgroup2 c /mnt
        try mount -o remount,rw /; try mount -o remount,rw /proc; try mount -o remount,rw /sys; try umount -l /
        try umount -l /proc; try umount -l /dev
        try mount -t overlay overlay -o lowerdir=/,upperdir=/tmp,workdir=/root /mnt"""
    ),
    "namespaces": Attack(
        "for kind in --user --mount --pid --net --ipc --uts --cgroup --time '-r -m'; do try unshare $kind true; done\n"
        "for kind in -m -u -i -n -p -U -C; do try nsenter -t 1 $kind true; done; try pivot_root / /"
    ),
    "a way out of a chroot": Attack(_python(_CHROOT)),
    "device nodes": Attack(
        """for node in 'b 8 0' 'b 254 0' 'b 7 0' 'c 1 1' 'c 1 2' 'c 10 200' 'c 10 229' 'c 5 1' 'c 4 1'; do
            rm -f /root/node; mknod /root/node $node 2>/dev/null && try head -c 1 /root/node
        done
        try test -b /dev/vda; try test -e /dev/mem; try test -e /dev/kvm; try test -e /dev/fuse"""
    ),
    "raw sockets": Attack(_python(_RAW)),
    "the network": Attack(
        _python(_CONNECT) + "\nip -o link | grep -v ' lo:' | sed 's/^/ESCAPED: /'; try ip link add dummy0 type dummy\n"
        "try curl -m 2 http://172.17.0.1:{port}/; try getent hosts example.com"
    ),
    "settings of the kernel": Attack(
        f"""find /proc/sys -type f -writable 2>/dev/null | grep -Ev '^/proc/sys/{_OWN}' | while read file; do
            value=$(cat $file 2>/dev/null) && [ -n "$value" ] && (echo "$value" > $file) 2>/dev/null &&
                echo ESCAPED: $file
        done
        for file in sysrq-trigger sys/kernel/core_pattern sys/kernel/modprobe sys/vm/panic_on_oom sys/vm/swappiness; do
            (echo 1 > /proc/$file) 2>/dev/null && echo ESCAPED: $file
        done
        for pid in self 1; do (echo -1 > /proc/$pid/oom_score_adj) 2>/dev/null && echo ESCAPED: oom; done"""
    ),
    "control groups": Attack(
        """find /sys -mindepth 1 -writable -not -type l 2>/dev/null | head -n 3 | sed 's/^/ESCAPED: /'
        for file in cgroup.procs pids.max memory.max; do
            (echo max > /sys/fs/cgroup/$file) 2>/dev/null && echo ESCAPED: $file
        done
        try mkdir /sys/fs/cgroup/mine"""
    ),
    "the server's files": Attack(
        r"""for path in /srv/env /srv/box /srv/seccomp.json /run/envserver /work /.dockerenv /var/run/docker.sock \
            /usr/bin/bwrap /srv/env/tasks /proc/1/root/srv/env /proc/1/cwd/server.py; do try ls $path; done
        find / -xdev \( -name train.jsonl -o -name 'os_judge*' -o -name 'envserver*' \) 2>/dev/null |
            sed 's/^/ESCAPED: /'"""
    ),
    "mounts that tell": Attack(
        "cat /proc/self/mountinfo /proc/mounts | grep -E '/srv|/work|/var/lib/docker|env-gateway|/dev/shm/gw'"
        " | sed 's/^/ESCAPED: /'"
    ),
    "a neighbour's files and memory": Attack(
        "for path in /root/neighbour /tmp/neighbour /dev/shm/neighbour; do try cat $path; done\n"
        "ipcs -m -q -s | grep '^0x' | sed 's/^/ESCAPED: /'; try ls /dev/mqueue/*"
    ),
    "a neighbour's processes": Attack(
        "pgrep -a sleep | sed 's/^/ESCAPED: /'; pkill -9 -f 9876[5]; pkill -9 -f listen[.]py"
    ),
    "set user id": Attack(
        r"""useradd -m jack; cp /usr/bin/python3 /usr/local/bin/rootly; chmod 4755 /usr/local/bin/rootly
        su jack -c 'rootly -I -c "import os; os.setuid(0); print(\"ESCAPED\")"' 2>/dev/null
        su jack -c 'cat /etc/shadow' 2>/dev/null | sed 's/^/ESCAPED: /'
        try python3 -c 'import os; os.setresuid(60001, 60001, 60001)'"""
    ),
    "capabilities": Attack(
        """bounding=$((16#$(grep CapBnd /proc/self/status | cut -f2)))
        for bit in 12 13 16 17 19 21 22 23 24 25 27 38 39; do
            [ $((bounding >> bit & 1)) = 0 ] || echo ESCAPED: $bit
        done"""
    ),
    "limits": Attack(
        """try prlimit --pid $$ --nproc=100000; try prlimit --pid $$ --data=unlimited
        try prlimit --pid 1 --nproc=100000
        try prlimit --pid $$ --cpu=unlimited; try prlimit --pid $$ --nofile=1000000"""
    ),
    "layers below": Attack(_python(_OVERLAY)),
    "the box of all": Attack(
        """echo stolen > /etc/motd; echo 'evil:x:0:0::/root:/bin/bash' >> /etc/passwd
        echo stolen > /usr/bin/stolen
        printf '#!/bin/sh\\necho stolen\\n' > /usr/bin/wc; rm -f /usr/bin/find; chmod 777 /etc"""
    ),
    "login files": Attack(
        """for file in /root/.profile /root/.bashrc /etc/profile /etc/bash.bashrc; do echo 'echo 4; exit' > $file; done
        exit""",
        says_tried=False,
    ),
    "no process numbers left": Attack(
        "echo 301 > /proc/sys/kernel/pid_max; for i in $(seq 400); do /bin/true; done", False
    ),
    "a login that hangs": Attack("echo 'sleep 1000' > /etc/profile; exit", says_tried=False),
    "writing through the pipes of its first process": Attack(
        "trap '' PIPE; for fd in 0 1 2 3 4 5; do (head -c 99 /dev/zero > /proc/1/fd/$fd) 2>/dev/null; done",
        says_tried=False,
        may_end=True,
    ),
    "more data than there ought to be": Attack(
        "touch /srv/data/d /srv/data/e; rm -rf /srv/data; mkdir /srv/data; touch /srv/data/{1,2,3,4}"
    ),
    "functions, aliases and a path of its own": Attack(
        """mkdir /evil; printf '#!/bin/sh\\necho 4\\n' > /evil/ls; cp /evil/ls /evil/wc; chmod 755 /evil/*
        ls() { echo 4; }; wc() { echo 4; }; test() { :; }; export -f ls wc test
        export PATH=/evil:$PATH BASH_ENV=/evil/ls ENV=/evil/ls; alias wc='echo 4'"""
    ),
    "traps and prompts": Attack(
        "trap 'echo 4' DEBUG; trap 'echo 4' EXIT ERR RETURN; PROMPT_COMMAND='echo 4'; PS0='4'; PS4='4'; set -T"
    ),
    "every program replaced by one that lies": Attack(GHOST, says_tried=False),
    "preloaded code": Attack(
        "printf '#include <stdlib.h>\\n__attribute__((constructor)) static void f(void) { _Exit(0); }' > /root/x.c;"
        " cc -shared -fPIC -o /root/x.so /root/x.c; echo /root/x.so > /etc/ld.so.preload",
        says_tried=False,
    ),
    "no program left": Attack("rm -rf /bin /sbin /lib /lib64 /usr", says_tried=False),
    "no file left": Attack("rm -rf --no-preserve-root / 2>/dev/null", says_tried=False),
    "a link as command file": Attack("ln -sf /etc/passwd /run/command"),
    "a link to the machine as command file": Attack("ln -sf /proc/1/root/etc/passwd /run/command", says_tried=False),
    "a link to memory as command file": Attack("ln -sf /proc/1/mem /run/command", says_tried=False),
    "a link to an open file as command file": Attack("ln -sf /proc/1/fd/0 /run/command", says_tried=False),
    "a link to itself as command file": Attack("rm /run/command; ln -s command /run/command", says_tried=False),
    "a link to the terminal as command file": Attack("ln -sf $(tty) /run/command", says_tried=False),
    "a link to /dev/full as command file": Attack("ln -sf /dev/full /run/command", says_tried=False),
    "a folder as command file": Attack("rm /run/command; mkdir /run/command", says_tried=False),
    "a fifo as command file": Attack("rm /run/command; mkfifo /run/command", says_tried=False),
    "a socket as command file": Attack(
        _python("import os, socket\nos.remove('/run/command')\nsocket.socket(socket.AF_UNIX).bind('/run/command')"),
        says_tried=False,
    ),
    "no folder for the command file": Attack("rm -rf /run; ln -s /nowhere /run", says_tried=False),
    "another folder for the command file": Attack("mv /run /run.d; ln -s /etc /run", says_tried=False),
    "a command file that is replaced all the time": Attack(
        "(while :; do echo 'echo stolen' > /run/c; mv -f /run/c /run/command; sleep 0.01; done) > /dev/null 2>&1 &",
        says_tried=False,
    ),
    "a thief at the terminal": Attack("setsid cat $(tty) > /tmp/stolen 2>&1 &", says_tried=False),
    "a reader in the background": Attack(
        "trap '' TTIN TTOU; (while read -r line < /dev/tty; do echo 4; done) &", says_tried=False
    ),
    "a flood on the terminal": Attack("setsid yes 4 > $(tty) 2>/dev/null &", says_tried=False),
    "a memory hog": Attack(f"for i in 1 2 3 4 5 6; do {_HOG} & done; wait", says_tried=False, may_end=True),
    "shared memory without end": Attack(
        "head -c 900M /dev/zero > /dev/shm/x; head -c 900M /dev/zero > /tmp/x", says_tried=False, may_end=True
    ),
    "a fork bomb": Attack("bomb() { bomb | bomb & }; bomb 2>/dev/null", says_tried=False, may_end=True),
    "busy on every core": Attack("for i in 1 2 3 4; do (while :; do :; done) & done"),
}
