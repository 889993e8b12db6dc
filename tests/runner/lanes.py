"""Names that the runner and its pytest processes share. Standard library only: the runner starts without packages."""

from __future__ import annotations

import os

RUN_VARIABLE = "TESTS_RUN"
"""Environment variable with the folder of this run's records."""
LANE_VARIABLE = "TESTS_LANE"
"""Environment variable with the name of a pytest process. The name selects its tests and the file of its records."""
READY_VARIABLE = "TESTS_READY"
"""Environment variable with the folder in which the runner notes prepared needs: a file NEED, or NEED.failed with the
reason."""
ORDER_VARIABLE = "TESTS_ORDER"
"""Environment variable with the order of tests: a seed for a random order, `GIVEN`, or by default `BY_DURATION`."""
GIVEN = "given"
"""The order of the arguments: it repeats the order of an earlier run."""
BY_DURATION = ""
"""Each folder spread over the run, its longest files first."""
PLAYED = "played"
"""Property in which a test records the bundled tasks that it played: `environment`, `where`, and the numbers `won` by
their reference and `lost` by a wrong play. The runner prints the sums."""
CERTIFIED = "certified"
"""Property in which a test records what the answers of a group of tasks earned, for `make certify`."""


def seed() -> int | None:
    """Return the seed of this run's order and generated input, or None if both are the same in each run."""
    order = os.environ.get(ORDER_VARIABLE, BY_DURATION)
    return None if order in (GIVEN, BY_DURATION) else int(order)


def reproduce(nodeid: str, *, hunt: int = 0) -> str:
    """Return the command that runs only this test, with the seed of this run, or *hunt* times under load."""
    options = f"--hunt {hunt} " if hunt else f"--seed {found} " if (found := seed()) is not None else ""
    quoted = nodeid.replace("'", "'\\''")
    is_plain = not options and not any(c in nodeid for c in ' [](){}$&;|<>*?"')
    return f"make test ARGS='{quoted}'" if is_plain else f"make test ARGS=\"{options}'{quoted}'\""
