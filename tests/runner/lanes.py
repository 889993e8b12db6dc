"""What the runner and its pytest processes agree on. Standard library only: the runner starts without any package."""

from __future__ import annotations

RUN_VARIABLE = "TESTS_RUN"
"""Names the folder of this run's records."""
LANE_VARIABLE = "TESTS_LANE"
"""Which of the runner's pytest processes this is: it names its records, and chooses the tests that it runs."""
READY_VARIABLE = "TESTS_READY"
"""Names the folder in which the runner notes what is ready: a file NEED, or NEED.failed with the reason."""
PLAYED = "played"
"""The property in which a test notes how many bundled tasks it played: `environment`, `where`, and how many were `won`
by their reference and `lost` by a wrong play. The runner prints the sums."""


def reproduce(nodeid: str) -> str:
    """Return the command that runs a test by itself."""
    return f"make test ARGS={_quoted(nodeid)}"


def _quoted(nodeid: str) -> str:
    quoted = nodeid.replace("'", "'\\''")
    return f"\"'{quoted}'\"" if any(c in nodeid for c in ' [](){}$&;|<>*?"') else f"'{nodeid}'"
