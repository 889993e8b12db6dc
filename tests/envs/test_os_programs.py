"""Judges that run scripts in the agent's box: programs that the agent changed never decide."""

# ruff: noqa: E501 - the commands are shown as they are run
from __future__ import annotations

from typing import Any

import pytest

from tests.envs.complaints import complaints
from tests.envs.os_sandboxes import opening_sandboxes, os_module, require_sandboxes

pytestmark = pytest.mark.sandbox

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
OTHER_LIBRARY = (
    f"l={LIBRARY}; v=$(basename $l); mkdir -p /opt/py/bin /opt/py/lib; cp -rs $l /opt/py/lib/$v; rm -rf /opt/py/lib/$v/json; "
    f"mkdir /opt/py/lib/$v/json; printf '{PLANTED}' > /opt/py/lib/$v/json/__init__.py; cp $(readlink -f /usr/bin/python3) /opt/py/bin/python3"
)
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
    "a library named by pyvenv.cfg beside Python": (
        PYTHON,
        f"{OTHER_LIBRARY}; echo 'home = /opt/py/bin' > /usr/bin/pyvenv.cfg",
    ),
    "a library named by pyvenv.cfg above Python": (
        PYTHON,
        f"{OTHER_LIBRARY}; echo 'home = /opt/py/bin' > /usr/pyvenv.cfg",
    ),
    "a link to the command line of the program that reads it": (FILE, "ln -sf /proc/self/cmdline /srv/depot/answer"),
    "the same by way of other links": (
        FILE,
        "ln -s / /srv/r; ln -s ../srv/r/proc/self /srv/me; ln -sf ../me/./cmdline /srv/depot/answer",
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
    "links that lead elsewhere": (
        FILE,
        "ln -s answer /srv/depot/other; ln -s /nowhere/proc/x /srv/a; ln -s b /srv/b; ln -s /srv/proc /srv/c; echo right > /srv/depot/answer",
    ),
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


async def test_a_changed_program_solves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "SCRIPT_TIMEOUT_S", 5.0)
    async with opening_sandboxes() as sandboxes:

        async def fails(case: tuple[dict[str, Any], str]) -> None:
            assert await score(sandboxes, *case) == 0.0

        assert await complaints(fails, CHANGED) == {}


async def test_a_solution_counts_with_the_changes_that_tasks_ask_for() -> None:
    async with opening_sandboxes() as sandboxes:

        async def passes(case: tuple[dict[str, Any], str]) -> None:
            assert await score(sandboxes, *case) == 1.0

        assert await complaints(passes, HONEST) == {}


async def test_a_program_changed_while_the_scripts_run_solves_nothing() -> None:
    await require_sandboxes()
    waits = "touch /srv/begun; until test -e /srv/planted; do sleep 0.05; done; grep -q right /srv/depot/answer"
    plants = "until test -e /srv/begun; do sleep 0.05; done; cat /usr/bin/true > /usr/bin/grep; touch /srv/planted"
    async with opening_sandboxes() as sandboxes:
        assert await score(sandboxes, {"script": waits, "live": True}, f"({plants}) > /dev/null 2>&1 &") == 0.0


SERVES = """
import glob, os, sys, time
path, is_pipe, seen = "/srv/depot/answer", sys.argv[1] == "pipe", set(os.listdir("/proc"))
if is_pipe:
    os.remove(path)
    os.mkfifo(path)
open("/srv/waits", "w").close()
while True:
    lines = b""
    for name in os.listdir("/proc"):
        try:
            lines += open(f"/proc/{name}/cmdline", "rb").read().replace(b"\\0", b"\\n") if name not in seen else b""
        except OSError:
            continue
    if b"depot" not in lines:
        continue
    try:
        os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), lines)
    except OSError:  # nobody reads the pipe yet
        time.sleep(0.001)
"""
"""A process that writes the command lines of new processes into the file that a check reads."""


@pytest.mark.parametrize("way", ["file", "pipe"])
@pytest.mark.parametrize("live", [False, True], ids=["as usual", "in a task about a service"])
async def test_a_process_that_waits_for_a_check_cannot_write_what_the_check_looks_for(
    monkeypatch: pytest.MonkeyPatch, way: str, live: bool
) -> None:
    monkeypatch.setattr(judges, "SCRIPT_TIMEOUT_S", 5.0)
    await require_sandboxes()
    slow: dict[str, Any] = {"script": "sleep 0.5; grep -q right /srv/depot/answer", "live": live}
    start = f"cat > /tmp/x.py <<'END'\n{SERVES}\nEND\nsetsid python3 /tmp/x.py {way} > /dev/null 2>&1 &"
    async with opening_sandboxes() as sandboxes:
        played = await score(sandboxes, slow, f"{start}\nuntil test -e /srv/waits; do sleep 0.02; done")

    assert played == (1.0 if live else 0.0), "the task's author accepts this with `live`"


async def test_a_check_of_a_service_needs_the_agents_processes() -> None:
    await require_sandboxes()
    asks: dict[str, Any] = {"script": "echo 7 > /srv/ask; timeout 5 cat /srv/tell | grep -q 14"}
    serves = (
        "mkfifo /srv/ask /srv/tell; (while read n; do echo $((2 * n)) > /srv/tell; done <> /srv/ask) > /dev/null 2>&1 &"
    )
    async with opening_sandboxes() as sandboxes:
        assert await score(sandboxes, {**asks, "live": True}, serves) == 1.0
        assert await score(sandboxes, asks, serves) == 0.0


def test_only_scripts_after_the_agents_last_action_count() -> None:
    read = judges.Evaluation.read

    assert read({"match": "7"}).scripts == []
    assert read({"reward_function": "exact_match('7')"}).scripts == []
    assert read({"check": [None, {"matcher": "in"}], "example": "ls"}).scripts == []
    assert [script.code for script in read({**AFTER, "check": [None, "true"]}).scripts] == [
        "cat /srv/depot/answer",
        "true",
    ]
