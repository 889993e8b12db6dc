"""The time of a judgement: CPU time is the solution's own, real time is shared with whoever else is on the machine.

A case has a limit of CPU time, which the kernel counts, and one of real time, at which a solution that sleeps must end.
What its processes had of the CPUs (`envserver.sandbox.Judged`) says why a case came to its limit of real time:

* All its processes together used its CPU time: its own doing, whoever else was there.
* They used less, and did not wait for a CPU: it slept. Its own doing, unless the disk, a pipe or the server stood
  still, which looks the same from here. So it is run once more, and has failed if it sleeps again.
* They used less, and waited: others had the CPU, or its own processes kept each other waiting, as 128 busy loops of a
  hostile solution would. But they can do that only while they run: what others took is at least the wait less the CPU
  time that the case used itself.

Where others took a substantial part, the case is run again with a longer limit, and in the end there is a fault and no
verdict. A hostile solution must not turn its failure into that fault. Hence three more rules:

* A thread that lowers its own priority waits of its own will: its wait is not counted.
* CPU time of processes that nobody waits for may be missing in what was used, and a chain of short ones could starve
  its own parent. So a case is charged for each interval in which that may be.
* The claim to the server's priority ends with the CPU time limit, so no solution keeps others waiting in its turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from coding_sandbox import Completed, SandboxFault
from envserver.sandbox import Judged

TOTAL_S = 300.0
"""Real time for all of a judgement; cases left then were not passed. Half of the environment's limit for a call."""
WALL_FACTOR, WALL_EXTRA_S = 3.0, 5.0
"""A case may take this much real time for its CPU time limit, at first."""
ATTEMPTS = 3
"""Each has twice the real time of the one before."""
OTHERS_SHARE = 0.25
"""What others may take of the real time before it counts. A solution that does not sleep and needs no more than its
limit of L seconds, but did not get it within 3 L + 5 s, has waited for at least 2 L + 5 s; less the L that it may have
used, this is more than a third."""
STARVED = "other sessions kept the solution from the CPU for too long"


def taken_by_others_s(*, used_s: float, waited_s: float, cpu_s: float) -> float:
    """Say how much of a case's real time others took, at least; 0 for one that had its CPU time.

    Args:
        used_s: CPU time of all its processes together.
        waited_s: real time for which one of them could have run and had no CPU.
        cpu_s: its limit of CPU time.
    """
    return max(0.0, waited_s - used_s) if used_s < cpu_s else 0.0


def is_starved(*, used_s: float, waited_s: float, cpu_s: float, wall_s: float) -> bool:
    """Say whether others kept a case that was stopped after *wall_s* from its CPU time; else it has failed."""
    return taken_by_others_s(used_s=used_s, waited_s=waited_s, cpu_s=cpu_s) > wall_s * OTHERS_SHARE


class Time:
    """The time of one judgement.

    Args:
        total_s: real time for all cases.
        limit_s: CPU time of each.
        is_charged: whether CPU time that may be missing counts as used. Not for test commands: they start processes all
            the time, and code that sets out to deceive them has simpler ways (README.md).
    """

    def __init__(self, total_s: float, *, limit_s: float, is_charged: bool = True) -> None:
        self._clock = asyncio.get_running_loop().time
        self._total_s = total_s
        self._end = self._clock() + total_s
        self._wall_s = limit_s * WALL_FACTOR + WALL_EXTRA_S
        self._is_charged = is_charged
        self._taken_s = 0.0
        """By others."""
        self.cpu_s = math.ceil(limit_s)

    def is_over(self) -> bool:
        """Say whether no case can be run any more.

        Raises:
            SandboxFault: it is over because of others.
        """
        is_over = self._clock() >= self._end
        if is_over and self._taken_s > self._total_s * OTHERS_SHARE:
            raise SandboxFault(STARVED)
        return is_over

    async def give(self, attempt: Callable[[Judged, float], Awaitable[Completed]]) -> Completed:
        """Run a case by *attempt*, which gets the claim to CPU time and the limit of real time; again while it starves.

        Raises:
            SandboxFault: others kept it from the CPU each time.
        """
        starved = 0
        slept: Completed | None = None
        while starved < ATTEMPTS:
            wall_s = min(self._end - self._clock(), self._wall_s * 2**starved)
            if wall_s <= 0 and slept is not None:
                self.is_over()  # a fault where the earlier cases' waits left this one too little time
                return slept
            if wall_s <= 0 and starved:  # a first attempt without time left times out, and is judged as what it is
                break
            judged = Judged(self.cpu_s)
            done = await attempt(judged, wall_s)
            used_s = judged.used_s + judged.unseen_s * self._is_charged
            self._taken_s += taken_by_others_s(used_s=used_s, waited_s=judged.waited_s, cpu_s=self.cpu_s)
            if not done.timed_out or used_s >= self.cpu_s:
                return done
            if is_starved(used_s=used_s, waited_s=judged.waited_s, cpu_s=self.cpu_s, wall_s=wall_s):
                starved += 1
            elif slept is not None:
                self.is_over()
                return done
            else:
                slept = done
        raise SandboxFault(STARVED)
