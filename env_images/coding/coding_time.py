"""The time of a judgement: a solution has its own CPU time, but shares wall time with all programs of the machine.

A case has a limit of CPU time, which the kernel counts, and of wall time, at which a sleeping solution must end. The
CPU use of its processes (`envserver.sandbox.Judged`) explains why a case reached its limit of wall time:

* All its processes together used its CPU time: this is its own fault, whatever else ran.
* They used less and did not wait for a CPU: the case slept. This is its own fault, unless the disk, a pipe or the
  server stood still, which looks the same from here. So the case runs once more, and fails if it sleeps again.
* They used less and waited: other programs had the CPU, or its own processes delayed each other, as 128 busy loops of a
  hostile solution would. But they can do that only while they run. Therefore other programs took at least the wait
  minus the CPU time that the case used itself.

If other programs took a substantial part, the case runs again with a longer limit, and finally there is a fault and no
verdict. A hostile solution must not turn its failure into that fault. Hence three more rules:

* A thread that lowers its own priority waits voluntarily: its wait does not count.
* The used time may lack CPU time of processes without a waiting parent, and a chain of short processes could starve its
  own parent. So a case is charged for each interval in which that may happen.
* The claim to the server's priority ends with the CPU time limit, so no solution delays other sessions in its turn.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from coding_sandbox import Completed, SandboxFault
from envserver.sandbox import Judged

TOTAL_S = 300.0
"""Wall time for a whole judgement, after which no case runs. It is half of the environment's limit for a call."""
WALL_FACTOR, WALL_EXTRA_S = 3.0, 5.0
"""The wall time of a case's first attempt: the factor times its CPU time limit, plus the extra seconds."""
ATTEMPTS = 3
"""The maximum number of attempts; each has twice the wall time of the previous attempt."""
OTHERS_SHARE = 0.25
"""The share of wall time that other programs may take before it counts.

A solution that does not sleep and needs at most its limit of L seconds, but does not get it within 3 L + 5 s, has
waited for at least 2 L + 5 s. Minus the L that it may have used, this is more than a third.
"""
STARVED = "other sessions kept the solution from the CPU for too long"


def taken_by_others_s(*, used_s: float, waited_s: float, cpu_s: float) -> float:
    """Return the minimum of a case's wall time that other programs took; 0 for a case that had its CPU time.

    Args:
        used_s: CPU time of all its processes together.
        waited_s: Wall time for which one of its processes could have run and had no CPU.
        cpu_s: Its limit of CPU time.
    """
    return max(0.0, waited_s - used_s) if used_s < cpu_s else 0.0


def is_starved(*, used_s: float, waited_s: float, cpu_s: float, wall_s: float) -> bool:
    """Return True if other programs kept a case that was stopped after *wall_s* from its CPU time; else it failed."""
    return taken_by_others_s(used_s=used_s, waited_s=waited_s, cpu_s=cpu_s) > wall_s * OTHERS_SHARE


class Time:
    """The time of one judgement.

    Args:
        total_s: Wall time for all cases.
        limit_s: CPU time of each case.
        is_charged: True if CPU time that may be missing counts as used. Not for test commands: they start processes all
            the time, and code that deceives them has simpler ways (README.md).
    """

    def __init__(self, total_s: float, *, limit_s: float, is_charged: bool = True) -> None:
        self._clock = asyncio.get_running_loop().time
        self._total_s = total_s
        self._end = self._clock() + total_s
        self._wall_s = limit_s * WALL_FACTOR + WALL_EXTRA_S
        self._is_charged = is_charged
        self._taken_s = 0.0
        """Seconds that other programs took."""
        self.cpu_s = math.ceil(limit_s)

    def is_over(self) -> bool:
        """Return True if no more cases can run.

        Raises:
            SandboxFault: The time is over because of other programs.
        """
        is_over = self._clock() >= self._end
        if is_over and self._taken_s > self._total_s * OTHERS_SHARE:
            raise SandboxFault(STARVED)
        return is_over

    async def give(self, attempt: Callable[[Judged, float], Awaitable[Completed]]) -> Completed:
        """Run a case, and repeat it while other programs keep it from the CPU. Return its result.

        Args:
            attempt: Runs the case with the given CPU account and within the given wall time in seconds.

        Raises:
            SandboxFault: Other programs kept the case from the CPU in each attempt.
        """
        starved = 0
        slept: Completed | None = None
        while starved < ATTEMPTS:
            wall_s = min(self._end - self._clock(), self._wall_s * 2**starved)
            if wall_s <= 0 and slept is not None:
                self.is_over()  # a fault if the waits of earlier cases left too little time for this case
                return slept
            if wall_s <= 0 and starved:  # a first attempt without time left times out and is judged as such
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
