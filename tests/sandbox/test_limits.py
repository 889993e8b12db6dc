"""Memory, processes, disk and time: a program over a limit ends, and other sandboxes are unaffected."""

import asyncio
import shlex
from pathlib import Path

import pytest
from envserver.sandbox import Box, Limits, Sandbox, SandboxError, Sandboxes
from envserver.sandbox.watchdog import FULL_LOOKS, Usage, verdict

from tests.sandbox.conftest import LIMITS, MIB
from tests.sandbox.inside import bash, python, said


@pytest.mark.parametrize(
    ("usage", "looks_full", "expected"),
    [
        pytest.param(Usage(3, 100), 0, None, id="at the limit is not above it"),
        pytest.param(Usage(3, 101), 0, "memory", id="memory immediately"),
        pytest.param(Usage(32, 1), FULL_LOOKS, "pids", id="processes after a second at the limit"),
        pytest.param(Usage(32, 1), FULL_LOOKS - 1, None, id="processes not for a moment"),
        pytest.param(Usage(31, 1), FULL_LOOKS, "pids", id="nearly full is full"),
        pytest.param(Usage(29, 1), FULL_LOOKS, None, id="many is not full"),
        pytest.param(Usage(32, 101), FULL_LOOKS, "memory", id="memory is named first"),
    ],
)
def test_the_watchdog_ends_a_sandbox_over_its_memory_or_process_limit(
    usage: Usage, looks_full: int, expected: str | None
) -> None:
    assert verdict(usage, memory_bytes=100, pids=32, looks_full=looks_full) == expected


async def test_a_single_process_over_the_limit_gets_no_memory(sandbox: Sandbox) -> None:
    done = await python(sandbox, "bytearray(400 << 20)")

    assert b"MemoryError" in done.stderr
    assert sandbox.killed is None


HOGS = {
    "a tree of processes": (
        "for i in 1 2 3 4; do python3 -c 'b = bytearray(b\"x\") * (100 << 20); input()' < <(sleep 60) & done; wait"
    ),
    "page tables of memory that was only read": (
        "python3 -c 'import mmap, time\n"
        "m = mmap.mmap(-1, 400 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, prot=mmap.PROT_READ)\n"
        "for at in range(0, 400 << 30, 2 << 20): m[at]\n"
        "time.sleep(60)'"
    ),
    "System V segments that no process maps": (
        "python3 -c 'import ctypes, time\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.shmat.restype = ctypes.c_void_p\n"
        "for _ in range(60):\n"
        "    segment = libc.shmget(0, 5 << 20, 0o1600)\n"
        "    at = libc.shmat(segment, None, 0)\n"
        "    ctypes.memset(at, 1, 5 << 20)\n"
        "    libc.shmdt(ctypes.c_void_p(at))\n"
        "time.sleep(60)'"
    ),
    "queues of sockets": (
        "python3 -c 'import socket, time\n"
        "kept = []\n"
        "for _ in range(1900):\n"
        "    there, here = socket.socketpair()\n"
        "    here.setblocking(False)\n"
        "    try:\n"
        "        while True: here.send(bytes(32768))\n"
        "    except BlockingIOError: pass\n"
        "    here.close()\n"
        "    kept.append(there)\n"
        "time.sleep(60)'"
    ),
    "pipes of many processes": (
        "for i in $(seq 40); do python3 -c 'import os, time\n"
        "for _ in range(2000):\n"
        "    _, pipe = os.pipe()\n"
        "    os.set_blocking(pipe, False)\n"
        "    try:\n"
        "        while True: os.write(pipe, bytes(4096))\n"
        "    except BlockingIOError: pass\n"
        "time.sleep(60)' & done; wait"
    ),
    "files in /dev/shm": (
        "head -c 200M /dev/zero > /dev/shm/a; "
        "python3 -c 'import time; b = bytearray(b\"x\") * (100 << 20); time.sleep(60)'"
    ),
}


@pytest.mark.parametrize("script", [pytest.param(script, id=name) for name, script in HOGS.items()])
async def test_a_memory_hog_ends_only_its_own_sandbox(sandboxes: Sandboxes, script: str) -> None:
    hog, other = await sandboxes.open(), await sandboxes.open()

    with pytest.raises(SandboxError, match="more memory than its limit") as raised:
        await bash(hog, script, timeout_s=60)

    assert (hog.killed, raised.value.code) == ("memory", "ended")
    assert await said(other, "echo fine") == "fine\n"
    with pytest.raises(SandboxError, match="more memory than its limit"):
        await hog.terminal(["bash"])


async def test_a_hundred_connections_of_a_server_are_no_hog(sandbox: Sandbox) -> None:
    code = (
        "import socket, time\n"
        "server = socket.create_server(('127.0.0.1', 0), backlog=200)\n"
        "here = [socket.create_connection(server.getsockname()) for _ in range(100)]\n"
        "there = [server.accept()[0] for _ in here]\n"
        "[each.sendall(bytes(1000)) for each in here]\n"
        "time.sleep(0.6)\n"
        "print(sum(len(each.recv(1000)) for each in there))"
    )

    done = await python(sandbox, code)

    assert (done.stdout, sandbox.killed) == (b"100000\n", None), done


async def test_memory_that_forks_share_counts_once(sandbox: Sandbox) -> None:
    code = (
        "import os, time\n"
        "b = bytearray(b'x') * (80 << 20)\n"
        "children = [os.fork() for _ in range(4)]\n"  # 16 processes, 1.3 GB as ps counts it
        "time.sleep(0.6)\n"
        "print('done')"
    )

    done = await python(sandbox, code)

    assert (done.status, sandbox.killed) == (0, None)


async def test_a_fork_bomb_is_bounded_and_ends_only_its_own_sandbox(sandboxes: Sandboxes) -> None:
    bomb, other = await sandboxes.open(), await sandboxes.open()

    with pytest.raises(SandboxError, match="limit of processes"):
        await bash(bomb, "b() { b | b & }; b; sleep 60", timeout_s=60)

    assert bomb.killed == "pids"
    assert await said(other, "for i in 1 2 3 4 5; do sleep 0.01 & done; wait; echo fine") == "fine\n"


async def test_the_process_limit_counts_the_sandboxs_processes_of_all_users(sandbox: Sandbox) -> None:
    code = (
        "import os, time\n"
        "made = 0\n"
        "try:\n"
        "    for uid in range(1000, 1200):\n"
        "        if os.fork() == 0:\n"
        "            os.setresuid(uid, uid, uid)\n"
        "            time.sleep(20)\n"
        "            os._exit(0)\n"
        "        made += 1\n"
        "except BlockingIOError:\n"
        "    pass\n"
        "print(made)"
    )

    done = await python(sandbox, code)

    assert 0 < int(done.stdout) < LIMITS.pids, done


async def test_a_full_disk_is_reported_inside_and_by_write_file(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "head -c 100M /dev/zero > /root/big")

    assert (done.status, b"No space left" in done.stderr) == (1, True)
    with pytest.raises(SandboxError, match="No space left") as raised:
        await sandbox.write_file("/root/more", b"x" * MIB)
    assert raised.value.code == "full"
    assert await said(sandbox, "rm /root/big && echo again > /root/small && cat /root/small") == "again\n"


async def test_the_number_of_files_is_bounded(sandbox: Sandbox) -> None:
    done = await python(sandbox, "for i in range(20000): open(f'/tmp/{i}', 'w').close()")

    assert b"No space left" in done.stderr


async def test_the_number_of_open_files_is_bounded(sandbox: Sandbox) -> None:
    opened = "import os\nfor n in range(9999):\n    try: os.open('/', 0)\n    except OSError: break\nprint(n)"

    assert await said(sandbox, f"ulimit -Sn; ulimit -Hn; python3 -c {shlex.quote(opened)}") == "4096\n4096\n4093\n"


async def test_cpu_time_is_bounded(box: Box, work: Path) -> None:
    async with Sandboxes(box, work, Limits(cpu_s=1)) as sandboxes:
        sandbox = await sandboxes.open()

        done = await bash(sandbox, "while :; do :; done", timeout_s=60)

    assert (done.status in (-24, -9), done.timed_out) == (True, False)


async def test_the_kernel_kills_agents_programs_first_when_memory_runs_out(sandbox: Sandbox) -> None:
    assert await said(sandbox, "cat /proc/self/oom_score_adj /proc/1/oom_score_adj") == "1000\n1000\n"


async def test_a_program_that_lowers_its_rank_for_the_kernels_kills_is_set_back(sandbox: Sandbox) -> None:
    await said(
        sandbox,
        "echo 0 > /proc/$$/oom_score_adj; "
        'until [ "$(cat /proc/$$/oom_score_adj)" = 1000 ]; do sleep 0.05; done; echo set back',
    )


COUNTED = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
def made(call):
    count = 0
    while count < 500 and call() >= 0:
        count += 1
    return count
def watches():
    total = 0
    for uid in (0, 1, 2):
        report, say = os.pipe()
        if os.fork() == 0:
            os.setresuid(uid, uid, uid)
            os.write(say, b"%d" % made(libc.inotify_init))
            signal.pause()
            os._exit(0)
        total += int(os.read(report, 9))
    return total
print(made(lambda: libc.msgget(0, 0o1600)), made(lambda: libc.semget(0, 1, 0o1600)), watches())
"""


async def test_queues_semaphores_and_watches_are_bounded_for_all_users_together(sandbox: Sandbox) -> None:
    done = await python(sandbox, COUNTED)

    queues, semaphores, watches = map(int, done.stdout.split())
    assert (queues, semaphores, watches) == (64, 64, 16), done


USUAL = {
    "a shared value of processes": "import multiprocessing as m; v = m.Value('i', 3); m.Array('d', 9); print(v.value)",
    "a pool of processes": "import multiprocessing as m; print(sum(m.Pool(2).map(int, ['1', '2'])))",
    "shared memory by name": (
        "from multiprocessing.shared_memory import SharedMemory as S\n"
        "s = S(create=True, size=99); s.buf[0] = 3; print(s.buf[0]); s.close(); s.unlink()"
    ),
    "a shared mapping of a file": (
        "import mmap; f = open('/tmp/x', 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); m[0] = 3; print(m[0])"
    ),
    "zeros": "f = open('/dev/zero', 'rb'); print(3 - sum(f.read(4_000_000)))",
    "addresses of the loopback": "import socket; print(len({3: socket.if_nameindex()}) + 2)",
}


@pytest.mark.parametrize("code", [pytest.param(code, id=name) for name, code in USUAL.items()])
async def test_what_usual_programs_need_still_works(sandbox: Sandbox, code: str) -> None:
    done = await python(sandbox, code)

    assert done.stdout == b"3\n", done


async def test_many_concurrent_floods_leave_the_loop_responsive(sandboxes: Sandboxes) -> None:
    boxes = await asyncio.gather(*(sandboxes.open() for _ in range(4)))

    floods = await asyncio.gather(*(box.run(["cat", "/dev/zero"], timeout_s=0.5) for box in boxes))

    assert {(done.timed_out, len(done.stdout)) for done in floods} == {(True, 65_536)}


async def test_root_inside_can_end_its_init_and_the_next_request_reports_the_reason(sandboxes: Sandboxes) -> None:
    async def bring_down(sandbox: Sandbox) -> None:
        while True:
            await bash(sandbox, "echo x > /proc/1/fd/0; sleep 60")

    for _ in range(10):  # the next request meets a namespace that is ending or has ended
        sandbox = await sandboxes.open()

        with pytest.raises(SandboxError) as raised:
            await bring_down(sandbox)

        assert (raised.value.code, sandbox.killed) == ("ended", "init")
        await sandbox.close()
