"""A process inside that holds a new program before it starts: the watchdog goes on, and the agent answers for it."""

import pytest
from envserver.sandbox import Judged, Sandbox, SandboxError

from tests.envserver.eventually import eventually
from tests.sandbox.inside import bash, python

STOPPER = """
import os, signal
known = set(os.listdir("/proc"))
open("/tmp/ready", "w").close()
stopped = None
while stopped is None:
    for pid in filter(str.isdigit, set(os.listdir("/proc")) - known):
        os.kill(int(pid), signal.SIGSTOP)
        stopped = pid
"""
"""A program that stops the first new process inside."""
HOG = """
for _ in range(4):
    if os.fork() == 0:
        held = bytearray(b"x") * (100 << 20)
        signal.pause()
signal.pause()
"""
SEARCH_STOPPER = """
import os, signal
if os.fork() == 0:
    os.setsid()
    known = set(os.listdir("/proc"))
    open("/tmp/ready", "w").close()
    while True:
        for pid in filter(str.isdigit, set(os.listdir("/proc")) - known):
            try:
                os.kill(int(pid), signal.SIGSTOP)
            except ProcessLookupError:
                pass
while True:
    pass
"""
"""A busy program whose child, in a session of its own, stops all new processes inside."""
SLOWLY = {"PATH": ":".join(["/none"] * 20_000 + ["/usr/bin"])}
"""A search for the program that takes so long that it is stopped meanwhile."""


async def stop_the_next(sandbox: Sandbox, then: str = "signal.pause()") -> None:
    """Start a process that stops the next program that starts."""
    await bash(sandbox, f"python3 -I -c '{STOPPER}{then}' > /dev/null 2>&1 &")
    await eventually(lambda: exists(sandbox, "/tmp/ready"))


async def exists(sandbox: Sandbox, path: str) -> bool:
    """Return True if the file *path* exists. No process starts for it."""
    try:
        await sandbox.read_file(path, max_bytes=1)
    except SandboxError:
        return False
    return True


async def test_a_program_that_is_kept_from_starting_ends_the_sandbox_as_the_agents_doing(sandbox: Sandbox) -> None:
    await stop_the_next(sandbox)

    with pytest.raises(SandboxError, match="kept a new program from starting") as raised:
        await sandbox.run(["true"], cwd="/", env=SLOWLY)

    assert (raised.value.code, sandbox.killed) == ("ended", "stuck")
    await sandbox.close()


async def test_the_watchdog_sees_memory_while_a_program_is_kept_from_starting(sandbox: Sandbox) -> None:
    await stop_the_next(sandbox, HOG)

    with pytest.raises(SandboxError, match="more memory than its limit"):
        await sandbox.run(["true"], cwd="/", env=SLOWLY)

    assert sandbox.killed == "memory"


async def test_other_programs_start_while_one_is_kept_from_starting(sandbox: Sandbox) -> None:
    await stop_the_next(sandbox, 'open("/tmp/stopped", "w").close(); signal.pause()')
    request = {"op": "run", "id": 0, "argv": ["true"], "cwd": "/", "env": SLOWLY, "user": "root", "judged_s": None}
    await sandbox._tell(request)
    await eventually(lambda: exists(sandbox, "/tmp/stopped"))

    assert (await bash(sandbox, "echo fine")).stdout == b"fine\n"


async def test_a_process_that_stops_every_search_of_the_supervisor_delays_no_kill(sandbox: Sandbox) -> None:
    sandbox.judged = Judged(0.1)  # when it is used up, each check searches the processes to lower their priority

    done = await python(sandbox, SEARCH_STOPPER, timeout_s=2.0)

    assert done.timed_out
    assert await exists(sandbox, "/tmp/ready")
