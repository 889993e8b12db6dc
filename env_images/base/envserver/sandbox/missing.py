"""Tells a judge's program that a box never had from one that ran and failed.

The first is a mistake of the task's author, or of who made the box; it says nothing about what the agent did.
"""

import re
from collections.abc import Iterable
from typing import Protocol

TELLING = 'command_not_found_handle() { echo "$1: command not found" > "/proc/$$/fd/2"; return 127; }\n'
"""Before a script in bash: which programs are missing is told also where the script silences their errors."""

_WORD = r"(?<![\w./+@-])(?P<name>[\w.+@-]+)['\u2019]?"
_MISSING = tuple(
    map(
        re.compile,
        (
            rf"{_WORD}: (?:command )?not found",
            rf"(?:failed to run command|env:|xargs:|nice:|nohup:) ['\u2018]?{_WORD}: No such file or directory",
            r"(?<![\w.+@-])(?P<name>(?:/usr)?(?:/local)?/s?bin/[\w.+@-]+): (?:not found|No such file or directory)",
            r"No module named (?P<name>pytest)\b",  # of the modules of a box; any other one may be the agent's to write
            # Python's subprocess, in a traceback or in pytest's report; `open` raises the same for files.
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
"""make ends at such a program, and has it from a makefile or from its own rules: no script has to name it."""
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
    """List the programs, and the module pytest, that *said*, an output, calls missing and *script* or make names."""
    named = (name for name in _found(_MISSING, said) if re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w/-])", script))
    return list(dict.fromkeys([*named, *_found(_MAKE, said)]))


def _found(patterns: Iterable[re.Pattern[str]], said: str) -> list[str]:
    return [match["name"] for pattern in patterns for match in pattern.finditer(said)]


async def lacks_program(box: Runs, name: str) -> bool:
    """Say whether *box*, in which no agent has acted, has no program and no Python module *name*."""
    done = await box.run(["/bin/sh", "-c", f"{_LOOK} 2> /dev/null", name], cwd="/", timeout_s=_LOOK_S)
    return done.status != 0
