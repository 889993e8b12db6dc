"""An unmodified `GRPOTrainer` learns on two replicas, of which one is killed in the middle of the run."""

from __future__ import annotations

import pytest

from tests.trainers.runs import RUNS

pytestmark = [
    pytest.mark.wire,
    pytest.mark.docker,
    pytest.mark.redis,
    pytest.mark.needs("trainers", "image:math"),
]


async def test_a_trl_run_learns_although_a_replica_is_killed() -> None:
    (run,) = [run for run in RUNS if run.name == "trl-ors-kill"]

    result = await run.result()

    assert result.opened >= 160  # 20 steps of 8 episodes, and TRL's trial session
