"""A judge stops the agent's processes: none of them runs on, whatever they do against it."""

import pytest
from envserver.sandbox import Sandbox, SandboxError

from tests.envserver.eventually import eventually
from tests.sandbox.inside import bash, said

TICKS = """
import os, time
def tick(name):
    while True:
        with open(name, "a") as file:
            file.write("x")
        time.sleep(0.001)
"""
AGAINST = {
    "nothing": "tick('/tmp/ticks')",
    "one continues the other": """
import signal
other = os.fork()
if other == 0:
    os.setsid()
    other = os.getppid()
while True:
    try:
        os.kill(other, signal.SIGCONT)
    except ProcessLookupError:
        pass
    open('/tmp/ticks', 'a').write('x')
""",
    "it forks without end": """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    open('/tmp/ticks', 'a').write('x')
    if os.fork():
        os._exit(0)
""",
    "each waits for its child to start a program": """
import subprocess
while True:
    subprocess.run(["true"])
    open('/tmp/ticks', 'a').write('x')
""",
    "threads": """
import threading
for n in range(8):
    threading.Thread(target=tick, args=('/tmp/ticks',)).start()
""",
}


async def started(sandbox: Sandbox, program: str) -> None:
    """Start *program* in the background, and wait until it has begun."""
    await sandbox.write_file("/tmp/program.py", f"{TICKS}\n{program}\n".encode())
    await bash(sandbox, "setsid python3 -I /tmp/program.py > /dev/null 2>&1 &")

    async def has_begun() -> bool:
        return await ticks(sandbox) > 0

    await eventually(has_begun)


async def ticks(sandbox: Sandbox) -> int:
    """Return how much the processes have written, measured without a program inside."""
    try:
        return len(await sandbox.read_file("/tmp/ticks", max_bytes=1 << 24))
    except SandboxError:
        return 0


@pytest.mark.parametrize("name", AGAINST)
async def test_no_process_runs_on(sandbox: Sandbox, name: str) -> None:
    await started(sandbox, AGAINST[name])

    await sandbox.freeze()
    before = await ticks(sandbox)
    states = (await said(sandbox, "ps -eo stat=,comm= | grep python3 | cut -c1 | sort -u")).split()
    await said(sandbox, "sleep 0.2")

    assert await ticks(sandbox) == before
    assert set(states) <= {"T", "D", "Z"}, states


async def test_programs_that_start_afterwards_run_and_end(sandbox: Sandbox) -> None:
    await started(sandbox, AGAINST["nothing"])

    await sandbox.freeze()
    await sandbox.freeze()

    assert await said(sandbox, "echo a | cat; (sleep 0.01; echo b) & wait") == "a\nb\n"


async def test_processes_that_kill_the_search_are_stopped_or_a_refusal(sandbox: Sandbox) -> None:
    await sandbox.write_file(
        "/tmp/program.py",
        b"""
import os, signal
known = set(os.listdir("/proc"))
open("/tmp/ready", "w").close()
while True:
    for pid in filter(str.isdigit, set(os.listdir("/proc")) - known):
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
""",
    )
    await bash(sandbox, "for i in 1 2 3; do setsid python3 -I /tmp/program.py > /dev/null 2>&1 & done")
    await eventually(lambda: _is_there(sandbox, "/tmp/ready"))

    refusal = ""
    try:
        await sandbox.freeze()
    except SandboxError as error:
        refusal = error.code
    states = "" if refusal else await said(sandbox, "ps -eo stat=,args= | grep program.p[y] | cut -c1 | sort -u")

    assert (refusal, states) in (("full", ""), ("", "T\n")), "the search may be faster"


async def _is_there(sandbox: Sandbox, path: str) -> bool:
    try:
        await sandbox.read_file(path, max_bytes=1)
    except SandboxError:
        return False
    return True
