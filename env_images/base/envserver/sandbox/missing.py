"""Tells a judge's program that a box never had from one that ran and failed.

The first is a mistake of the task's author, or of who made the box; it says nothing about what the agent did.
"""

import re
from typing import Protocol

_WORD = r"(?<![\w./+@-])(?P<name>[\w.+@-]+)['\u2019]?"
_MISSING = tuple(
    map(
        re.compile,
        (
            rf"{_WORD}: (?:command )?not found",
            rf"(?:failed to run command|env:|xargs:|nice:|nohup:) ['\u2018]?{_WORD}: No such file or directory",
            r"(?<![\w.+@-])(?P<name>(?:/usr)?(?:/local)?/s?bin/[\w.+@-]+): (?:not found|No such file or directory)",
            r"No module named (?P<name>pytest)\b",  # of the modules of a box; any other one may be the agent's to write
        ),
    )
)
_LOOK_S = 10.0
_LOOK = (
    'command -v -- "$0" > /dev/null || '
    'python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)" "$0"'
)
"""For `sh -c`: whether a name is a program's, or a Python module's."""


class _Ran(Protocol):
    @property
    def status(self) -> int | None: ...


class Runs(Protocol):
    """A box that runs programs."""

    async def run(self, argv: list[str], *, cwd: str, timeout_s: float) -> _Ran:
        """Run *argv* to its end."""


def missing_programs(script: str, said: str) -> list[str]:
    """List the programs, and the module pytest, that *said*, an error output, calls missing and that *script* names."""
    found = [match["name"] for pattern in _MISSING for match in pattern.finditer(said)]
    return [name for name in dict.fromkeys(found) if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", script)]


async def lacks_program(box: Runs, name: str) -> bool:
    """Say whether *box*, in which no agent has acted, has no program and no Python module *name*."""
    done = await box.run(["/bin/sh", "-c", f"{_LOOK} 2> /dev/null", name], cwd="/", timeout_s=_LOOK_S)
    return done.status != 0
