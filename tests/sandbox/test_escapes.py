"""Attempts of root in a sandbox to reach the server, the machine or another sandbox; all must fail.

Each attempt prints ``held`` when it was refused. Any other output, also a crash of the attempt, fails the test.
"""

import asyncio
import ctypes
import os
import platform
import signal
import socket
import struct
import sys
import sysconfig
from pathlib import Path

import pytest
from envserver.sandbox import Judged, Sandbox, SandboxError, Sandboxes

from tests.sandbox.inside import bash, python, said

_CALL = """
import ctypes, errno, fcntl, mmap, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def held(result, *numbers):
    number = ctypes.get_errno()
    print('held' if result < 0 and number in numbers else f'ESCAPED {result} {number}')
"""
_IS_X86 = platform.machine() == "x86_64"
_PTRACE, _BPF, _KEYCTL, _IO_URING, _USERFAULTFD, _PERF, _VM_READ, _KEXEC, _HANDLE = (
    (101, 321, 250, 425, 323, 298, 310, 246, 304) if _IS_X86 else (117, 280, 219, 425, 282, 241, 270, 104, 265)
)

CALLS = {
    "ptrace of its init": f"held(libc.syscall({_PTRACE}, 16, 1, 0, 0), errno.EPERM)",
    "memory of its init": f"held(libc.syscall({_VM_READ}, 1, 0, 0, 0, 0, 0), errno.EPERM)",
    "mount a tmpfs": "held(libc.mount(b'x', b'/mnt', b'tmpfs', 0, None), errno.EPERM)",
    "mount another proc": "held(libc.mount(b'proc', b'/mnt', b'proc', 0, None), errno.EPERM)",
    "bind the root elsewhere": "held(libc.mount(b'/', b'/mnt', None, 4096, None), errno.EPERM)",
    "make /dev writable": "held(libc.mount(None, b'/dev', None, 4096 | 32, None), errno.EPERM)",
    "unmount /proc": "held(libc.umount2(b'/proc', 2), errno.EPERM)",
    "new mount interface": "held(libc.syscall(430, b'tmpfs', 0), errno.EPERM)",
    "open the tree": "held(libc.syscall(428, -100, b'/', 1), errno.EPERM)",
    "pivot the root": f"held(libc.syscall({155 if _IS_X86 else 41}, b'/', b'/'), errno.EPERM)",
    "a new user namespace": "held(libc.unshare(0x10000000), errno.EPERM)",
    "a new mount namespace": "held(libc.unshare(0x00020000), errno.EPERM)",
    "a clone with namespaces": (
        "held(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0), errno.EPERM)"
    ),
    "clone3, whose flags no filter can read": "held(libc.syscall(435, 0, 0), errno.ENOSYS)",
    "enter its init's namespaces": "held(libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0), errno.EPERM)",
    "a BPF program": f"held(libc.syscall({_BPF}, 5, 0, 0), errno.EPERM)",
    "keyrings": f"held(libc.syscall({_KEYCTL}, 0, -3, 0), errno.EPERM)",
    "io_uring": f"held(libc.syscall({_IO_URING}, 8, 0), errno.ENOSYS)",
    "userfaultfd": f"held(libc.syscall({_USERFAULTFD}, 0), errno.EPERM)",
    "perf": f"held(libc.syscall({_PERF}, 0, 0, -1, -1, 0), errno.EPERM)",
    "memory that no watchdog sees": f"held(libc.syscall({319 if _IS_X86 else 279}, b'x', 0), errno.ENOSYS)",
    "shared memory that no watchdog sees": (
        "libc.mmap.restype = ctypes.c_long\n"
        "held(libc.mmap(0, 4096, 3, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0), errno.EPERM)"
    ),
    "shared memory of /dev/zero": (
        "libc.mmap.restype = ctypes.c_long\n"
        "held(libc.mmap(0, 4096, 3, mmap.MAP_SHARED, os.open('/dev/zero', os.O_RDWR), 0), errno.ENODEV)"
    ),
    "a lease on a file": (
        "held(libc.fcntl(os.open('/tmp/leased', os.O_RDWR | os.O_CREAT), 1024, fcntl.F_WRLCK), errno.EINVAL)"
    ),
    "a child of the supervisor": (
        "held(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x8011, 0, 0, 0, 0), errno.EPERM)"
    ),
    "a netlink socket for netfilter": "held(libc.socket(16, 3, 12), errno.EPROTONOSUPPORT)",
    "another kernel": f"held(libc.syscall({_KEXEC}, 0, 0, 0, 0), errno.EPERM)",
    "a file by its handle": f"held(libc.syscall({_HANDLE}, -100, 0, 0), errno.EPERM)",
    "words into its terminal": "held(libc.ioctl(0, 0x5412, b'x'), errno.EPERM)",
    "the machine's clock": "held(libc.settimeofday(struct.pack('ll', 1, 1), None), errno.EPERM)",
    "the machine's name": "held(libc.sethostname(b'x', 1), errno.EPERM)",
    "a kernel module": "held(libc.syscall(175 if os.uname().machine == 'x86_64' else 105, 0, 0, b''), errno.EPERM)",
    "a reboot": "held(libc.reboot(0x01234567), errno.EPERM)",
}
if _IS_X86:
    CALLS["a call by its x32 number"] = "held(libc.syscall(0x40000000 | 165, 0, 0, 0, 0, 0), errno.ENOSYS)"

OPENS = {
    "the kernel's core pattern": ("/proc/sys/kernel/core_pattern", "w"),
    "the kernel's helper program": ("/proc/sys/kernel/modprobe", "w"),
    "a magic key": ("/proc/sysrq-trigger", "w"),
    "the machine's memory": ("/proc/kcore", "rb"),
    "memory settings": ("/proc/sys/vm/drop_caches", "w"),
    "binary formats": ("/proc/sys/fs/binfmt_misc/register", "w"),
    "its limits of processes": ("/proc/sys/user/max_user_namespaces", "w"),
    "its number of message queues": ("/proc/sys/kernel/msgmni", "w"),
    "its number of inotify instances": ("/proc/sys/user/max_inotify_instances", "w"),
    "its user mapping": ("/proc/self/uid_map", "w"),
    "a disk": ("/dev/vda", "rb"),
    "raw memory": ("/dev/mem", "rb"),
    "fuse": ("/dev/fuse", "rb"),
    "the kernel's log": ("/proc/kmsg", "rb"),
    "control groups": ("/sys/fs/cgroup/cgroup.procs", "w"),
    "a device made in /dev": ("/dev/made", "w"),
}


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in CALLS.items()])
async def test_a_system_call_is_refused(sandbox: Sandbox, code: str) -> None:
    done = await python(sandbox, _CALL + code)

    assert (done.stdout, done.status) == (b"held\n", 0), done


@pytest.mark.parametrize(("path", "mode"), [pytest.param(*case, id=name) for name, case in OPENS.items()])
async def test_a_file_of_the_machine_is_out_of_reach(sandbox: Sandbox, path: str, mode: str) -> None:
    use = "f.read(1)" if "r" in mode else "f.write('1'); f.flush()"
    code = f"try:\n    f = open({path!r}, {mode!r}); {use}\n    print('ESCAPED')\nexcept OSError:\n    print('held')"

    done = await python(sandbox, code)

    assert done.stdout == b"held\n", done


@pytest.mark.parametrize("family", [17, 38, 40, 15, 31, 44], ids=["packet", "alg", "vsock", "key", "bluetooth", "xdp"])
async def test_a_socket_outside_network_namespaces_is_refused(sandbox: Sandbox, family: int) -> None:
    done = await python(sandbox, _CALL + f"held(libc.socket({family}, 3, 0), errno.EAFNOSUPPORT)")

    assert done.stdout == b"held\n", done


async def test_there_is_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import socket\n"
            f"for host, port in (('127.0.0.1', {port}), ('1.1.1.1', 53), ('169.254.169.254', 80)):\n"
            "    try:\n        socket.create_connection((host, port), 2); print('ESCAPED')\n"
            "    except OSError:\n        print('held')"
        )

        done = await python(sandbox, code)

    assert done.stdout == b"held\nheld\nheld\n", done


async def test_unix_sockets_of_the_machine_are_out_of_reach(sandbox: Sandbox, work: Path) -> None:
    with socket.socket(socket.AF_UNIX) as abstract:
        name = f"env-gateway-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        code = (
            "import socket\n"
            f"for name in ('\\0{name}', '/var/run/docker.sock', '/run/docker.sock'):\n"
            "    try:\n        socket.socket(socket.AF_UNIX).connect(name); print('ESCAPED')\n"
            "    except OSError:\n        print('held')"
        )

        done = await python(sandbox, code)

    assert done.stdout == b"held\nheld\nheld\n", done


async def test_a_sandbox_sees_and_signals_only_its_own_processes(sandboxes: Sandboxes) -> None:
    one, other = await sandboxes.open(), await sandboxes.open()
    await bash(other, 'sleep 300 & while [ "$(cat /proc/$!/comm)" != sleep ]; do :; done')  # not only its fork

    assert await said(one, "ls -d /proc/[0-9]*/ | wc -l") in ("3\n", "4\n")  # its init, bash, ls and wc
    await bash(one, f"kill -9 {os.getpid()} {os.getppid()}; kill -9 -1")
    assert await said(other, "pgrep -c sleep") == "1\n"


_WATCH = """
import os, time
seen = set()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for pid in os.listdir('/proc'):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        for name in ('cmdline', 'environ', 'comm', 'maps', 'mountinfo', 'exe', 'cwd', 'root', 'auxv', 'stack'):
            path = f'/proc/{pid}/{name}'
            try:
                seen.add(os.readlink(path) if name in ('exe', 'cwd', 'root') else open(path, errors='replace').read())
            except OSError:
                pass
        try:
            for fd in os.listdir(f'/proc/{pid}/fd'):
                seen.add(os.readlink(f'/proc/{pid}/fd/{fd}'))
        except OSError:
            pass
print('\\n'.join(seen))
"""
_SECRETS = (
    *("the-secret-word", "envserver", "spawner", "site-packages", "pytest", "socket:", "pidfd", "eventpoll", "memfd"),
    str(Path(__file__).parent),
)


async def test_nothing_of_the_server_is_visible(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVER_SECRET", "the-secret-word")
    secret = os.open(__file__, os.O_RDONLY)
    os.set_inheritable(secret, True)
    try:
        sandbox = await sandboxes.open()
        watcher = sandbox.run(["python3", "-I", "-c", _WATCH], output_bytes=4_000_000, timeout_s=60)
        running = asyncio.create_task(watcher)
        starts = 0
        while not running.done():  # so that the watcher meets processes between fork and exec
            await sandbox.run(["true"])  # not a shell, which opens its own sockets to look up users
            starts += 1
        seen = running.result().stdout.decode()
    finally:
        os.close(secret)

    assert starts > 10
    assert "/usr/lib" in seen  # the watcher did look
    for word in _SECRETS:
        assert word not in seen, [line for line in seen.splitlines() if word in line]


async def test_mounts_reveal_nothing_about_the_server(sandbox: Sandbox, work: Path) -> None:
    shown = await said(sandbox, "cat /proc/self/mountinfo /proc/mounts")

    for word in ("env-gateway", str(work), "/tmp/", "/srv"):
        assert word not in shown
    assert "lowerdir=0," in shown


async def test_proc_shows_neither_the_machines_command_line_nor_its_control_groups(sandbox: Sandbox) -> None:
    assert await said(sandbox, "cat /proc/cmdline") == ""
    assert await said(sandbox, "cut -d: -f3 /proc/self/cgroup | sort -u") == "/\n"


async def test_a_set_user_id_program_gains_a_user_nothing(sandbox: Sandbox) -> None:
    await said(sandbox, "useradd -m jack; cp /usr/bin/python3 /usr/bin/rootly; chmod 4755 /usr/bin/rootly")

    done = await bash(sandbox, "rootly -I -c 'import os; os.setuid(0); print(\"ESCAPED\")'", user="jack")

    assert (b"PermissionError" in done.stderr, done.stdout) == (True, b"")


async def test_root_has_no_device_nodes_and_only_the_named_capabilities(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "mknod /root/disk b 254 0 && head -c1 /root/disk")
    assert done.status != 0

    held = int(await said(sandbox, "grep CapBnd /proc/self/status | cut -f2"), 16)
    for capability in (
        12,
        13,
        16,
        17,
        19,
        21,
        22,
        23,
        24,
        25,
        27,
        38,
        39,
    ):  # NET_ADMIN … SYS_ADMIN … MKNOD, PERFMON, BPF
        assert not held >> capability & 1


_BOUNDS = "grep -E '^(NoNewPrivs|Seccomp|CapInh|CapBnd|CapAmb|SigBlk|SigIgn):' /proc/self/status"
_BOUND = {
    "NoNewPrivs": "1",
    "Seccomp": "2",
    "CapInh": f"{0:016x}",
    "CapBnd": f"{sum(1 << capability for capability in (0, 1, 3, 4, 5, 6, 7, 8, 10, 18, 29, 31)):016x}",
    "CapAmb": f"{0:016x}",
    "SigBlk": f"{0:016x}",
    "SigIgn": f"{0:016x}",
}


@pytest.mark.parametrize("user", ["root", "jack"])
async def test_every_program_starts_within_the_same_bounds(sandbox: Sandbox, user: str) -> None:
    await said(sandbox, "useradd -m jack")

    ran = [await bash(sandbox, _BOUNDS, user=user) for _ in range(2)]
    terminal = await sandbox.terminal(["bash", "-c", f"{_BOUNDS}; read"], cwd="/", user=user)
    shown = b""
    while shown.count(b"\n") < len(_BOUND):
        shown += await terminal.read(4096, 20.0)

    for text in (*(done.stdout for done in ran), shown):
        assert dict(line.split(":\t") for line in text.decode().splitlines()) == _BOUND


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGHUP, id="as under nohup"),
        pytest.param(signal.SIGINT, id="as in the background of a script"),
    ],
)
async def test_programs_do_not_inherit_a_signal_that_the_server_ignores(
    sandboxes: Sandboxes, number: signal.Signals
) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        sandbox = await sandboxes.open()
    finally:
        signal.signal(number, before)

    assert await said(sandbox, "grep SigIgn /proc/self/status") == f"SigIgn:\t{0:016x}\n"


def act_on(number: int, handler: int) -> int:
    """Set a signal's handler past the C library, 0 for the default and 1 to ignore it; return the previous handler."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    wanted = ctypes.create_string_buffer(struct.pack("QQQQ", handler, 0, 0, 0), 32)
    was = ctypes.create_string_buffer(32)
    assert call(13 if _IS_X86 else 134, number, wanted, was, ctypes.c_size_t(8)) == 0
    return int.from_bytes(was.raw[:8], sys.byteorder)


async def test_programs_do_not_inherit_an_ignored_signal_that_the_c_library_reserves(sandboxes: Sandboxes) -> None:
    before = act_on(32, 1)  # some machines start all their processes with it ignored
    try:
        sandbox = await sandboxes.open()
    finally:
        act_on(32, before)

    assert await said(sandbox, "grep SigIgn /proc/self/status") == f"SigIgn:\t{0:016x}\n"


async def test_uids_outside_the_map_do_not_exist(sandbox: Sandbox) -> None:
    code = _CALL + "held(libc.setresuid(60001, 60001, 60001), errno.EINVAL)"

    assert (await python(sandbox, code)).stdout == b"held\n"


async def test_bubblewrap_inside_a_sandbox_opens_nothing(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "bwrap --ro-bind / / --proc /proc --unshare-user true")

    assert (done.status != 0, b"No permissions" in done.stderr or b"not permitted" in done.stderr) == (True, True), done


async def test_a_chroot_out_of_the_root_stays_in(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "marker").write_text("")
    code = (
        "import os\n"
        "os.makedirs('/tmp/jail', exist_ok=True)\n"
        "top = os.open('/', os.O_RDONLY)\n"
        "os.chroot('/tmp/jail'); os.fchdir(top)\n"
        "for _ in range(50): os.chdir('..')\n"
        "os.chroot('.')\n"
        f"print('ESCAPED' if os.path.exists({str(tmp_path / 'marker')!r}) else 'held')"
    )

    assert (await python(sandbox, code)).stdout == b"held\n"


async def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    code = (
        "import resource\n"
        "for name in ('NPROC', 'DATA', 'NOFILE', 'CPU'):\n"
        "    which = getattr(resource, f'RLIMIT_{name}')\n"
        "    soft, hard = resource.getrlimit(which)\n"
        "    try:\n        resource.setrlimit(which, (hard + 1, hard + 1)); print('ESCAPED', name)\n"
        "    except (ValueError, OSError):\n        print('held')"
    )

    assert (await python(sandbox, code)).stdout == b"held\n" * 4


async def test_the_pipes_of_the_init_have_no_reader(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "trap '' PIPE; for fd in 1 2; do echo x > /proc/1/fd/$fd; done")

    assert done.stderr.count(b"Broken pipe") == 2, done


async def test_the_supervisor_imports_nothing_from_the_agents_folders(sandbox: Sandbox) -> None:
    code = (
        "import pathlib, sys\n"
        f"folder = pathlib.Path({sysconfig.get_path('stdlib')!r}); folder.mkdir(parents=True, exist_ok=True)\n"
        f"for name in {sorted(sys.stdlib_module_names)!r}:\n"
        "    (folder / f'{name}.py').write_text(f'open(\"/tmp/imported\", \"a\").write({name!r})')\n"
    )
    done = await sandbox.run(["/usr/bin/python3", "-I", "-c", code], cwd="/")
    assert done.status == 0, done

    await said(sandbox, "useradd -m jack; su jack -c true; sleep 1000 &")
    assert (await bash(sandbox, "exec sleep 1000", timeout_s=0.2)).timed_out
    for refused in (
        sandbox.run(["no-such-program"]),
        sandbox.run(["/etc/passwd"]),
        sandbox.read_file("/none", max_bytes=1),
        sandbox.write_file("/proc/1/x/y", b""),
        sandbox.run(["true"], user="nobody-here"),
    ):
        with pytest.raises(SandboxError):
            await refused
    terminal = await sandbox.terminal(["cat"])
    await terminal.kill_foreground()
    while await terminal.read(4096, 20.0):
        pass
    await terminal.close()

    with pytest.raises(SandboxError, match="No such file"):
        await sandbox.read_file("/tmp/imported", max_bytes=1)


_REACH = """
import os, pathlib, sys, time
def tries(pid):
    for what, how in (("mem", os.O_RDWR), ("fd/1", os.O_WRONLY), ("environ", os.O_RDONLY), ("maps", os.O_RDONLY)):
        try:
            os.close(os.open(f"/proc/{pid}/{what}", how))
            yield "reached"
        except OSError as error:
            yield error.strerror
pid = pathlib.Path("/tmp/pid")
while not (pid.exists() and pid.read_text()):
    time.sleep(0.01)
print(*tries(int(pid.read_text())), sep=", ")
"""


@pytest.mark.parametrize("is_judged", [False, True], ids=["another program of the agent's", "a judged program"])
async def test_an_agents_process_cannot_reach_into_a_judged_program(sandbox: Sandbox, is_judged: bool) -> None:
    sandbox.judged = Judged(60.0) if is_judged else None
    waiting = "echo $$ > /tmp/pid.new; mv /tmp/pid.new /tmp/pid; until test -e /tmp/looked; do sleep 0.02; done"
    judging = asyncio.ensure_future(bash(sandbox, f"{waiting}; echo honest"))
    await asyncio.sleep(0)  # the run has read ``judged``
    sandbox.judged = None

    reached = await python(sandbox, _REACH)
    await said(sandbox, "touch /tmp/looked")
    judged = await judging

    assert judged.stdout == b"honest\n"
    expected = "Permission denied" if is_judged else "reached"
    assert reached.stdout.decode().strip().split(", ") == [expected] * 4
