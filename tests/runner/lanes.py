"""Names that the runner and its pytest processes share. Standard library only: the runner starts without packages."""

from __future__ import annotations

RUN_VARIABLE = "TESTS_RUN"
"""Environment variable with the folder of this run's records."""
LANE_VARIABLE = "TESTS_LANE"
"""Environment variable with the name of a pytest process. The name selects its tests and the file of its records."""
READY_VARIABLE = "TESTS_READY"
"""Environment variable with the folder in which the runner notes prepared needs: a file NEED, or NEED.failed with the
reason."""
PLAYED = "played"
"""Property in which a test records the bundled tasks that it played: `environment`, `where`, and the numbers `won` by
their reference and `lost` by a wrong play. The runner prints the sums."""


def reproduce(nodeid: str) -> str:
    """Return the command that runs only this test."""
    return f"make test ARGS={_quoted(nodeid)}"


def _quoted(nodeid: str) -> str:
    quoted = nodeid.replace("'", "'\\''")
    return f"\"'{quoted}'\"" if any(c in nodeid for c in ' [](){}$&;|<>*?"') else f"'{nodeid}'"
