"""CPU priorities: agents' programs come last, and judged programs come before them, within bounds."""

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from envserver.sandbox import Box, Judged, Limits, Sandbox, Sandboxes
from envserver.sandbox.processes import AGENT_NICE
from envserver.sandbox.watchdog import CpuTimes, Stopwatch

from tests.sandbox.control_groups import LOOPS, PEERS, cpu_group, join
from tests.sandbox.inside import bash, python, said


@pytest.fixture
async def crowded(box: Box, work: Path) -> AsyncIterator[Sandboxes]:
    """Yield sandboxes that share one CPU."""
    with cpu_group() as group:
        async with Sandboxes(box, work, Limits()) as sandboxes:
            await sandboxes.check()
            join(group)
            yield sandboxes


RAISES = """
import ctypes, json, os, resource, struct
attributes = struct.pack("IIQiIQQQ", 48, 0, 0, -5, 0, 0, 0, 0)  # struct sched_attr
def by_sched_setattr():
    number = {"x86_64": 314}.get(os.uname().machine, 274)
    if ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0:
        raise SystemExit("raised")
raises = [
    lambda: os.nice(-1),
    lambda: os.setpriority(os.PRIO_PROCESS, 0, 18),
    lambda: os.setpriority(os.PRIO_PGRP, 0, 0),
    lambda: os.setpriority(os.PRIO_USER, 0, 0),
    lambda: os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1)),
    lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    lambda: resource.setrlimit(resource.RLIMIT_NICE, (40, 40)),
    by_sched_setattr,
]
for attempt in raises:
    try:
        attempt()
    except (OSError, ValueError):
        pass
print(json.dumps([os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]))
"""


async def test_an_agents_program_comes_last_and_cannot_raise_itself(sandbox: Sandbox) -> None:
    done = await python(sandbox, RAISES)

    assert json.loads(done.stdout) == [AGENT_NICE, os.SCHED_OTHER], done


async def test_a_judged_program_has_the_servers_priority_and_a_later_agents_program_does_not(sandbox: Sandbox) -> None:
    niceness = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"
    sandbox.judged = Judged(60.0)
    judged = await python(sandbox, niceness)
    sandbox.judged = None
    after = await python(sandbox, niceness)

    assert (int(judged.stdout), int(after.stdout)) == (os.getpriority(os.PRIO_PROCESS, 0), AGENT_NICE)


SPENDERS = {
    "alone": "pass",
    "by busy children": "for _ in range(3):\n    if os.fork() == 0: break",
    "as another user": "os.setuid(1000)",
    "in a thread": "import threading\nthreading.Thread(target=all, args=[iter(lambda: True, 0)], daemon=True).start()",
}
IS_LOWERED = f"""
while os.getpriority(os.PRIO_PROCESS, 0) != {AGENT_NICE}: pass
os._exit(0)  # the box has no libgcc_s, with which a thread would be ended
"""
BY_A_CHAIN = f"""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps: nobody is told what the children used
while os.getpriority(os.PRIO_PROCESS, 0) != {AGENT_NICE}:
    if os.fork() == 0:
        while time.process_time() < 0.005: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
"""


@pytest.mark.parametrize(
    "code",
    [
        *(pytest.param(f"import os\n{spend}\n{IS_LOWERED}", id=name) for name, spend in SPENDERS.items()),
        pytest.param(BY_A_CHAIN, id="by children without a waiting parent"),
    ],
)
async def test_a_judged_program_comes_last_after_its_cpu_claim_is_used_up(sandbox: Sandbox, code: str) -> None:
    sandbox.judged = Judged(0.3)

    done = await python(sandbox, code)

    assert (done.status, done.timed_out) == (0, False), done
    assert sandbox.judged.used_s + sandbox.judged.unseen_s >= 0.3


async def test_a_hundred_busy_loops_do_not_keep_a_judged_program_from_its_cpu(crowded: Sandboxes) -> None:
    hog, judge = await crowded.open(), await crowded.open()
    await said(hog, LOOPS)
    judge.judged = Judged(1.0)

    done = await python(judge, "import time\nwhile time.process_time() < 0.3: pass", timeout_s=8.0)

    assert (done.status, done.timed_out) == (0, False)


async def test_waiting_sleeping_and_running_are_distinguished(crowded: Sandboxes) -> None:
    hog, judge = await crowded.open(), await crowded.open()
    hog.judged = Judged(3600.0)  # at the same priority
    judge.judged = slept = Judged(60.0)
    await bash(judge, "sleep 60", timeout_s=1.0)
    judge.judged = ran = Judged(60.0)
    await bash(judge, "while :; do :; done", timeout_s=1.0)
    await bash(hog, PEERS)
    judge.judged = waited = Judged(60.0)
    await bash(judge, "while :; do :; done", timeout_s=4.0)

    # The test compares the larger shares of time, not exact times.
    assert slept.used_s + slept.waited_s < 0.5, slept
    assert ran.used_s > ran.waited_s, ran
    assert waited.waited_s > waited.used_s, waited


async def test_a_program_that_lowers_its_own_priority_does_not_count_as_waiting(crowded: Sandboxes) -> None:
    judge = await crowded.open()
    judge.judged = Judged(60.0)

    await python(judge, "import os\nif os.fork(): os.nice(19)\nwhile True: pass", timeout_s=2.0)

    assert judge.judged.used_s > judge.judged.waited_s, judge.judged


# Checks start one second apart. Each holds the CPU time of all processes, the wait of each thread, and the threads
# with a lower priority.
Look = tuple[float, dict[int, float]] | tuple[float, dict[int, float], list[int]]


@pytest.mark.parametrize(
    ("looks", "used_s", "waited_s", "unseen_s"),
    [
        pytest.param([(5, {1: 7.0}), (5, {1: 7.0})], 0, 0, 0, id="earlier use does not count"),
        pytest.param([(5, {1: 7.0}), (6, {1: 7.0}), (6.5, {1: 7.5})], 1.5, 0.5, 0, id="running, then waiting"),
        pytest.param([(0, {1: 0.0}), (0, {1: 0.0}), (0, {1: 2.0})], 0, 2, 0, id="a wait is reported when it is over"),
        pytest.param([(0, {1: 0.0, 2: 0.0}), (0, {1: 1.0, 2: 1.0})], 0, 1, 0, id="two that wait together"),
        pytest.param([(0, {1: 0.0, 2: 0.0}), (1, {1: 1.0, 2: 0.0}), (2, {1: 1.0, 2: 1.0})], 2, 1, 0, id="in turn"),
        pytest.param(
            [(0, {1: 0.0}), (0, {1: 0.0, 2: 1.0}), (0, {1: 0.0, 3: 1.0})], 0, 1.75, 2, id="one after the other"
        ),
        pytest.param([(0, {1: 0.0}), (0, {1: 0.0, 2: 0.0})], 0, 0, 1, id="a new thread"),
        pytest.param(
            [(3, {1: 0.0, 2: 0.0}), (2.5, {1: 0.0}), (3, {1: 0.0})],
            0.5,
            0,
            1,
            id="an ended thread without a waiting parent",
        ),
        pytest.param([(0, {1: 0.0}), (2, {1: 0.0, 2: 0.0})], 2, 0, 0, id="a new thread, and all CPU time was used"),
        pytest.param([(0, {1: 0.0}), (0, {1: 1.0}), (0, {1: 3.0}, [1])], 0, 1, 0, id="a thread that lowers itself"),
        pytest.param([(0, {1: 0.0}), (0, {1: 1.0, 2: 1.0}, [2])], 0, 1, 1, id="a thread that starts with low priority"),
        pytest.param([(0, {1: 0.0}), (4, {1: 0.0}), (4, {1: 1.0}, [1])], 4, 1, 0, id="a thread that was lowered"),
    ],
)
def test_checks_of_cpu_times_are_added_up(looks: list[Look], used_s: float, waited_s: float, unseen_s: float) -> None:
    # A check takes a quarter of a second here. The first of two threads may have waited that long next to the second.
    times = [CpuTimes(float(at), at + 0.25, *look) for at, look in enumerate(looks)]
    stopwatch = Stopwatch(times[0], claim_s=4.0)
    for each in times[1:]:
        stopwatch.add(each)

    assert stopwatch.as_message() == {"used_s": used_s, "waited_s": waited_s, "unseen_s": unseen_s}
    assert stopwatch.is_used_up is (used_s + unseen_s >= 4.0)
