"""Judges that run scripts in the agent's box: programs that the agent changed never decide."""

# ruff: noqa: E501 - the commands are shown as they are run
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.envs.complaints import complaints
from tests.envs.plain_box import os_module, require_sandboxes, sandboxes_of

episodes, judges, problems = (os_module(f"os_{name}") for name in ("episode", "judge", "problem"))

STATE: dict[str, Any] = {"check": ["stat -c '%a' /srv/depot", {"equals": "700"}]}
FILE: dict[str, Any] = {"script": "grep -q right /srv/depot/answer"}
ABSENT: dict[str, Any] = {"check": ["! grep -q wrong /srv/depot/answer"]}
PYTHON: dict[str, Any] = {
    "script": "import json, sys\nsys.exit(open('/srv/depot/answer').read() != 'right\\n')",
    "language": "python",
}
AFTER: dict[str, Any] = {"judge": "after", "example": "cat /srv/depot/answer", "check": [None, {"equals": "right"}]}
INIT = (
    "mkdir -m 755 /srv/depot; echo wrong > /srv/depot/answer; mkdir -p /usr/local/bin; "
    "printf '#!/bin/sh\\nexit 1\\n' > /usr/local/bin/report; chmod 755 /usr/local/bin/report"
)

PROGRAM = "#!/bin/sh\\necho 700\\nexit 0\\n"
PLANTED = "import os\\nos._exit(0)\\n"
LIBRARY = "$(python3 -c 'import os; print(os.path.dirname(os.__file__))')"
CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "bash replaced": (
        STATE,
        "cp /usr/bin/bash /tmp/b; printf '#!/tmp/b\\necho 700\\n' > /tmp/x; chmod 755 /tmp/x; mv -f /tmp/x /usr/bin/bash",
    ),
    "bash replaced by another program": (
        FILE,
        "cp /usr/bin/env /tmp/x; printf '#!/usr/bin/true\\n' > /tmp/x; chmod 755 /tmp/x; mv -f /tmp/x /usr/bin/bash",
    ),
    "bash made a link": (FILE, "cp /usr/bin/bash /tmp/b; ln -sf true /usr/bin/bash"),
    "a program before the box's own": (
        STATE,
        f"printf '{PROGRAM}' > /usr/local/sbin/stat; chmod 755 /usr/local/sbin/stat",
    ),
    "a program written in place": (FILE, "cat /usr/bin/true > /usr/bin/grep"),
    "its times set back": (
        FILE,
        "touch -r /usr/bin/grep /tmp/t; cat /usr/bin/true > /usr/bin/grep; touch -r /tmp/t /usr/bin/grep",
    ),
    "a program linked hard": (FILE, "ln -f /usr/bin/true /usr/bin/grep"),
    "a program renamed": (FILE, "mv /usr/bin/true /usr/bin/grep"),
    "a program removed": (ABSENT, "rm /usr/bin/grep"),
    "the folder of programs replaced": (
        FILE,
        "cp -a /usr/bin /tmp/bin; cat /usr/bin/true > /tmp/bin/grep; cp /usr/bin/mv /usr/bin/rm /tmp/; rm -rf /usr/bin; /tmp/mv /tmp/bin /usr/bin",
    ),
    "the link to it replaced": (
        FILE,
        "cp -a /usr/bin /tmp/bin; cat /usr/bin/true > /tmp/bin/bash; ln -sfn /tmp/bin /bin",
    ),
    "a preloaded library": (FILE, "echo /tmp/x.so > /etc/ld.so.preload"),
    "a module of Python's": (PYTHON, f"printf '{PLANTED}' > {LIBRARY}/sitecustomize.py"),
    "a module of Python's changed": (PYTHON, f"printf '{PLANTED}' > {LIBRARY}/json/__init__.py"),
    "a path file of Python's": (
        PYTHON,
        'd=$(python3 -c "import site; print(site.getsitepackages()[0])"); mkdir -p $d; echo "import os; os._exit(0)" > $d/x.pth',
    ),
    "a path file of the user's": (
        PYTHON,
        'd=$(python3 -c "import site; print(site.getusersitepackages())"); mkdir -p $d; echo "import os; os._exit(0)" > $d/x.pth',
    ),
    "a module in the home": (PYTHON, f"printf '{PLANTED}' > /root/json.py; printf '{PLANTED}' > /root/encodings.py"),
    "bytecode of Python's": (
        PYTHON,
        'python3 -c "import importlib.util as u, marshal, os, pathlib, json; p = pathlib.Path(u.cache_from_source(json.__file__)); '
        "p.parent.mkdir(exist_ok=True); p.write_bytes(u.MAGIC_NUMBER + (1).to_bytes(4, 'little') + bytes(8) + "
        "marshal.dumps(compile('import os; os._exit(0)', 'x', 'exec')))\"",
    ),
    "an example's program": (
        AFTER,
        "printf '#!/bin/sh\\necho right\\n' > /usr/local/bin/cat; chmod 755 /usr/local/bin/cat",
    ),
    "a pipe that makes the check wait": (FILE, "rm /srv/depot/answer; mkfifo /srv/depot/answer"),
    "nothing": (FILE, "true"),
}
CALLED: dict[str, Any] = {"script": "greet | grep -q hello"}
REPORT: dict[str, Any] = {"script": "report"}
HONEST: dict[str, tuple[dict[str, Any], str]] = {
    "the state": (STATE, "chmod 700 /srv/depot"),
    "the file": (FILE, "echo right > /srv/depot/answer"),
    "the file, for Python": (PYTHON, "python3 -c \"open('/srv/depot/answer', 'w').write('right\\n')\""),
    "the file, for an example": (AFTER, "echo right > /srv/depot/answer"),
    "nothing of what must be absent": (ABSENT, "> /srv/depot/answer"),
    "a program of a new name": (
        CALLED,
        "printf '#!/bin/sh\\necho hello\\n' > /usr/local/bin/greet; chmod 755 /usr/local/bin/greet",
    ),
    "a program of the task's mended": (REPORT, "sed -i 's/exit 1/exit 0/' /usr/local/bin/report"),
    "a program that no script names removed": (FILE, "rm /usr/bin/tac; echo right > /srv/depot/answer"),
    "accounts": (FILE, "echo 'x:x:7:' >> /etc/group; echo right > /srv/depot/answer"),
    "bytecode that Python writes": (FILE, "python3 -c 'import json, http.client'; echo right > /srv/depot/answer"),
}


async def score(sandboxes: Any, evaluation: dict[str, Any], script: str) -> float:
    """Play an episode of one command and return its score."""
    task = {"instruction": "Do it.", "config": {"init": INIT}, "evaluation": evaluation}
    episode = await episodes.Episodes(sandboxes).open(problems.Problem.read(task), seed=1)
    try:
        await episode.bash(script)
        return float(await episode.judge("700"))
    finally:
        await episode.close()


async def test_a_changed_program_solves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "SCRIPT_TIMEOUT_S", 5.0)
    await require_sandboxes("library")
    async with sandboxes_of("library", tmp_path) as sandboxes:

        async def fails(case: tuple[dict[str, Any], str]) -> None:
            assert await score(sandboxes, *case) == 0.0

        assert await complaints(fails, CHANGED) == {}


async def test_a_solution_counts_with_the_changes_that_tasks_ask_for(tmp_path: Path) -> None:
    await require_sandboxes("library")
    async with sandboxes_of("library", tmp_path) as sandboxes:

        async def passes(case: tuple[dict[str, Any], str]) -> None:
            assert await score(sandboxes, *case) == 1.0

        assert await complaints(passes, HONEST) == {}


async def test_a_program_changed_while_the_scripts_run_solves_nothing(tmp_path: Path) -> None:
    await require_sandboxes("library")
    waits = "touch /srv/begun; until test -e /srv/planted; do sleep 0.05; done; grep -q right /srv/depot/answer"
    plants = "until test -e /srv/begun; do sleep 0.05; done; cat /usr/bin/true > /usr/bin/grep; touch /srv/planted"
    async with sandboxes_of("library", tmp_path) as sandboxes:
        assert await score(sandboxes, {"script": waits}, f"({plants}) > /dev/null 2>&1 &") == 0.0


def test_only_scripts_after_the_agents_last_action_count() -> None:
    read = judges.Evaluation.read

    assert read({"match": "7"}).scripts == []
    assert read({"reward_function": "exact_match('7')"}).scripts == []
    assert read({"check": [None, {"matcher": "in"}], "example": "ls"}).scripts == []
    assert [script.code for script in read({**AFTER, "check": [None, "true"]}).scripts] == [
        "cat /srv/depot/answer",
        "true",
    ]
