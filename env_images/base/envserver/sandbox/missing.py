"""Distinguishes a judge's program that is missing in a box from a program that ran and failed.

A missing program is a mistake of the task's author or of the box's author. It says nothing about the agent's work.
"""

import re
from collections.abc import Iterable
from typing import Protocol

TELLING = 'command_not_found_handle() { echo "$1: command not found" > "/proc/$$/fd/2"; return 127; }\n'
"""Prefix for a bash script that reports missing programs even if the script silences their errors."""

_WORD = r"(?<![\w./+@-])(?P<name>[\w.+@-]+)['\u2019]?"
_MISSING = tuple(
    map(
        re.compile,
        (
            rf"{_WORD}: (?:command )?not found",
            rf"(?:failed to run command|env:|xargs:|nice:|nohup:) ['\u2018]?{_WORD}: No such file or directory",
            r"(?<![\w.+@-])(?P<name>(?:/usr)?(?:/local)?/s?bin/[\w.+@-]+): (?:not found|No such file or directory)",
            r"No module named (?P<name>pytest)\b",  # only pytest: any other module may be the agent's to write
            # Python's subprocess, in a traceback or in pytest's report. `open` raises the same error for files.
            r"(?:raise child_exception_type\([^\n]*\)\n(?:E\s+)?|subprocess\.py:\d+: )"
            r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<name>[\w.+@-]+)'",
        ),
    )
)
_MAKE = tuple(
    map(
        re.compile,
        (
            rf"\bmake(?:\[\d+\])?: {_WORD}: (?:Command not found|No such file or directory)",
            rf"{_WORD}: (?:command )?not found\nmake(?:\[\d+\])?: \*\*\* .* Error 127",
        ),
    )
)
"""Patterns of make, which ends at a missing program. The program comes from a makefile or make's own rules, so the
script need not name it."""
_LOOK_S = 10.0
_LOOK = (
    'command -v -- "$0" > /dev/null || '
    'python3 -c "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)" "$0"'
)
"""Script for `sh -c` that checks whether a name is a program or a Python module."""


class _Ran(Protocol):
    @property
    def status(self) -> int | None: ...


class Runs(Protocol):
    """A box that can run programs."""

    async def run(self, argv: list[str], *, cwd: str, timeout_s: float) -> _Ran:
        """Run *argv* to its end."""


def missing_programs(script: str, said: str) -> list[str]:
    """Return the programs, and the module pytest, that the output *said* reports missing and *script* or make names."""
    named = (name for name in _found(_MISSING, said) if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", script))
    return list(dict.fromkeys([*named, *_found(_MAKE, said)]))


def _found(patterns: Iterable[re.Pattern[str]], said: str) -> list[str]:
    return [match["name"] for pattern in patterns for match in pattern.finditer(said)]


async def lacks_program(box: Runs, name: str) -> bool:
    """Return True if *box*, before any agent has acted in it, has neither a program nor a Python module *name*."""
    done = await box.run(["/bin/sh", "-c", f"{_LOOK} 2> /dev/null", name], cwd="/", timeout_s=_LOOK_S)
    return done.status != 0
