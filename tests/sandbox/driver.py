"""The program that the container's test runs in the container, as an environment server would.

It prints one JSON object.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress

from envserver.sandbox import Box, Judged, Limits, Sandbox, SandboxError, Sandboxes, rights


async def said(sandbox: Sandbox, script: str) -> str:
    done = await sandbox.run(["bash", "-c", script], cwd="/")
    return (done.stdout + done.stderr).decode().strip()


async def ended(sandbox: Sandbox, script: str) -> str | None:
    with suppress(SandboxError):
        await sandbox.run(["bash", "-c", script], timeout_s=60)
    return sandbox.killed


async def judged_beside_loops(hog: Sandbox, judge: Sandbox) -> str:
    """Run a judged program of 0.3 s of CPU next to an agent's busy loops, on the container's one CPU."""
    await said(hog, "for i in $(seq 40); do (while :; do :; done) & done")
    judge.judged = Judged(1.0)
    code = "import os, time\nwhile time.process_time() < 0.3: pass\nprint(os.getpriority(os.PRIO_PROCESS, 0))"
    done = await judge.run(["python3", "-c", code], timeout_s=8.0)
    await hog.close()
    return "it took too long" if done.timed_out else done.stdout.decode().strip()


def refused(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except PermissionError:
        return True
    return False


async def main() -> None:
    rights.give_up()
    limits = Limits(memory_bytes=128 << 20, pids=48, disk_bytes=16 << 20)
    async with Sandboxes(Box(sys.argv[1]), sys.argv[2], limits) as sandboxes:
        await sandboxes.check()
        layer = await sandboxes.layer("key", lambda sandbox: said(sandbox, "useradd -m jack; echo made > /root/made"))
        sandbox, loops, judge, bomb, hog = [await sandboxes.open(layer) for _ in range(5)]
        facts = {
            "uid": os.getuid(),
            "setuid": refused(lambda: os.setuid(0)),
            "kernel": refused(lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_RDWR))),
            "id": await said(sandbox, "id -u; su jack -c 'id -un'; cat /root/made"),
            "disk": await said(sandbox, "head -c 50M /dev/zero > /root/x; rm /root/x"),
            "core_pattern": await said(sandbox, "echo x > /proc/sys/kernel/core_pattern"),
            "sysrq": await said(sandbox, "echo h > /proc/sysrq-trigger"),
            "mount": await said(sandbox, "mount -t tmpfs x /mnt"),
            "processes": await said(sandbox, "ls -d /proc/[0-9]*/ | wc -l"),
            "network": await said(sandbox, "grep -c : /proc/net/dev"),
            "niceness": await said(sandbox, "python3 -c 'import os; print(os.nice(0))'"),
            "judged": await judged_beside_loops(loops, judge),
            "bomb": await ended(bomb, "b() { b | b & }; b; sleep 60"),
            "hog": await ended(hog, "for i in 1 2 3; do head -c 100M /dev/zero | tail & done; wait; sleep 60"),
            "after": await said(sandbox, "echo fine"),
        }
        print(json.dumps(facts))


asyncio.run(main())
