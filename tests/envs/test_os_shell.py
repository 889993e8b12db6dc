"""The os environment's shell on a real bash, a real terminal and its own real root directory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.deadlines import HANG_S
from tests.envs.os_sandboxes import opening_sandboxes, os_module

pytestmark = pytest.mark.sandbox

shells = os_module("os_shell")
RESTARTED = shells.RESTARTED

LIMIT_S = 1.0
"""Seconds instead of 30, for tests that reach the limit; ample for all other tests."""
AMPLE_S = 60.0


@pytest.fixture
async def sandbox() -> AsyncIterator[Any]:
    async with opening_sandboxes() as sandboxes:
        sandbox = await sandboxes.open()
        yield sandbox
        await sandbox.close()


@pytest.fixture
async def shell(sandbox: Any) -> Any:
    shell = shells.Shell(sandbox, command_timeout_s=AMPLE_S, grace_s=AMPLE_S)
    await shell.open()
    return shell


@pytest.fixture
async def hasty(sandbox: Any) -> Any:
    """A shell whose commands soon reach their limit."""
    shell = shells.Shell(sandbox, command_timeout_s=LIMIT_S)
    await shell.open()
    return shell


async def test_a_trace_shows_the_agents_own_commands_only(shell: Any) -> None:
    texts = [(await shell.run(script)).text for script in ("set -x; echo one", "false", "printf two", "echo three")]

    assert texts == ["++ echo one\none\n", "++ false\n", "++ printf two\ntwo", "++ echo three\nthree\n"]


@pytest.mark.parametrize(
    ("script", "text", "status"),
    [
        pytest.param("echo 220", "220\n", 0, id="immediately"),
        pytest.param("sleep 0.3; echo 220", "220\n", 0, id="delayed"),
        pytest.param("echo a\necho b\necho c", "a\nb\nc\n", 0, id="three lines"),
        pytest.param("for i in 1 2; do\n  echo $i\ndone", "1\n2\n", 0, id="a loop"),
        pytest.param("cat <<END\na b\nEND", "a b\n", 0, id="a here-document"),
        pytest.param("printf x", "x", 0, id="no final newline"),
        pytest.param("printf 'x\\n\\n'", "x\n\n", 0, id="two final newlines"),
        pytest.param("", "", 0, id="nothing"),
        pytest.param("true", "", 0, id="no output"),
        pytest.param("(exit 3)", "", 3, id="a status"),
        pytest.param(f"X={'a' * 6_000}; echo ${{#X}}", "6000\n", 0, id="a line of 6,000 bytes"),
        pytest.param("printf 'cost: 5 $ '", "cost: 5 $ ", 0, id="text like a prompt"),
        pytest.param("printf '\\033[31mred\\033[0m\\0\\r\\n'", "red\n", 0, id="escapes, NUL and CR"),
        pytest.param("printf '\\377\\376'", "\ufffd\ufffd", 0, id="not UTF-8"),
        pytest.param("echo größe", "größe\n", 0, id="UTF-8"),
        pytest.param("echo out; echo err >&2", "out\nerr\n", 0, id="both streams"),
        pytest.param("[ -t 1 ] && pwd", "/root\n", 0, id="a terminal, in the home directory"),
        pytest.param("date +%Z; echo $TERM", "UTC\ndumb\n", 0, id="time zone and terminal"),
        pytest.param('read -p "Go on? " x; echo "$? [$x]"', "1 []\n", 0, id="a question without an answer"),
        pytest.param("echo a b | while read x y; do echo $y; done", "b\n", 0, id="a read from a pipe"),
        pytest.param("cat > notes; wc -c < notes", "0\n", 0, id="a file from an empty input"),
        pytest.param(
            "sort; type bc &>x && bc; python3 -q; sh -s; bash -c cat", "", 0, id="programs that read an empty input"
        ),
        pytest.param("while read x; do echo $x; done; echo $?", "0\n", 0, id="a loop over an empty input"),
        pytest.param("echo 'echo piped' | bash; echo 'echo $1' > x; sh x y", "piped\ny\n", 0, id="shells with input"),
        pytest.param("su root -c 'cat; id -un'; bash <<< pwd", "root\n/root\n", 0, id="shells with a command"),
    ],
)
async def test_the_output_of_a_command_is_returned_with_its_status(
    shell: Any, script: str, text: str, status: int
) -> None:
    output = await shell.run(script)

    assert (output.text, output.status, output.notice) == (text, status, "")


async def test_an_unbalanced_quote_is_a_syntax_error_and_swallows_no_later_command(shell: Any) -> None:
    broken = await shell.run("echo 'abc")
    after = await shell.run("echo whole")

    assert "unexpected EOF" in broken.text
    assert broken.status != 0
    assert after.text == "whole\n"


async def test_directory_variables_functions_and_status_persist(shell: Any) -> None:
    await shell.run("cd /tmp; var=3.14; f() { echo f:$1; }")
    await shell.run("(exit 7)")

    output = await shell.run("echo $?; pwd; echo $var; f x")

    assert output.text == "7\n/tmp\n3.14\nf:x\n"


async def test_a_background_job_continues(shell: Any) -> None:
    await shell.run("mkfifo /tmp/pipe; (read line < /tmp/pipe; echo got $line > /tmp/got) &")

    output = await shell.run("echo news > /tmp/pipe; wait; cat /tmp/got")

    assert output.text.endswith("got news\n")


@pytest.mark.parametrize(
    ("login", "home"),
    [
        pytest.param("su - jack", "/home/jack", id="bash with a line editor"),
        pytest.param("su - tim", "/home/tim", id="dash"),
    ],
)
async def test_a_nested_shell_reads_the_commands_until_it_exits(shell: Any, login: str, home: str) -> None:
    await shell.run("useradd -m -s /bin/bash jack; useradd -m -s /bin/sh tim")

    entered = await shell.run(login)
    inside = await shell.run("id -un; pwd; echo 'a # '")
    left = await shell.run("exit")
    outside = await shell.run("id -un")

    assert entered.text == ""
    assert inside.text == f"{login.split()[-1]}\n{home}\na # \n"
    assert left.text in ("", "logout\n")
    assert outside.text == "root\n"


async def test_nested_shells_exit_one_by_one(shell: Any) -> None:
    await shell.run("useradd -m -s /bin/bash jack")

    seen = [(await shell.run(script)).text for script in ("bash --norc", "x=1; sh", "su - jack", "id -un; echo [$x]")]
    left = [(await shell.run("exit")).text for _ in range(3)]
    outside = await shell.run("id -un; echo [$x]; echo $BASH_SUBSHELL")

    assert seen == ["", "", "", "jack\n[]\n"]
    assert set(left) <= {"", "exit\n", "logout\n"}
    assert outside.text == "root\n[]\n0\n"


async def test_a_nested_shell_that_does_not_start_leaves_the_next_command_clean(shell: Any) -> None:
    failed = await shell.run("su - nobody-here; bash --no-such-option")
    after = await shell.run("echo clean")

    assert "nobody-here" in failed.text
    assert failed.status == 2
    assert (after.text, after.notice) == ("clean\n", "")


async def test_a_question_for_a_password_gets_nothing_that_the_agent_did_not_write(shell: Any) -> None:
    output = await shell.run("useradd jack; (sleep 0.5; pkill passwd) & passwd jack")

    assert "Retype" not in output.text  # which passwd asks after it has read a first password


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("cd /tmp; touch kept; exit 3", id="exit"),
        pytest.param("cd /tmp; touch kept; set -e; false", id="set -e"),
        pytest.param("cd /tmp; touch kept; kill -9 $$", id="kill"),
        pytest.param("cd /tmp; touch kept; exec true", id="exec"),
        pytest.param("cd /tmp; touch kept; exec bash", id="exec of a shell, whose input is empty"),
        pytest.param("cd /tmp; touch kept; sleep 100 & exit", id="exit with a job that holds the terminal"),
    ],
)
async def test_a_shell_that_ends_is_replaced_and_the_files_stay(shell: Any, script: str) -> None:
    ended = await shell.run(script)
    after = await shell.run("pwd; ls /tmp/kept")

    assert ended.notice == RESTARTED
    assert ended.status is None
    assert after.text == "/root\n/tmp/kept\n"
    assert after.notice == ""


async def test_a_failed_status_that_set_e_ignores_is_kept_without_ending_the_shell(shell: Any) -> None:
    await shell.run("(exit 4)")

    kept = await shell.run("echo $?; set -e; if false; then :; fi; x=1")
    after = await shell.run("echo $x")

    assert (kept.text, after.text, after.notice) == ("4\n", "1\n", "")


@pytest.mark.parametrize(
    ("script", "text"),
    [
        pytest.param("cat < /dev/tty", "", id="cat"),
        pytest.param('read x < /dev/tty; echo "[$x]"', "", id="a question to the terminal"),
        pytest.param("echo before; sleep 1000", "before\n", id="sleep"),
        pytest.param("sleep 1000 | cat", "", id="a pipeline"),
        pytest.param("while :; do sleep 0.2; done", "", id="a loop"),
        pytest.param("bash -c 'trap \"\" INT; sleep 1000'", "Killed", id="a command that ignores the interrupt"),
        pytest.param("python3 -q < /dev/tty", "", id="an interpreter that continues after the interrupt"),
    ],
)
async def test_a_command_that_does_not_end_is_stopped_and_the_next_is_clean(hasty: Any, script: str, text: str) -> None:
    stopped = await hasty.run(script)
    after = await hasty.run("echo clean")

    assert f"[the command was stopped: it had not ended after {LIMIT_S:g} seconds]" in stopped.notice
    assert text in stopped.text
    assert "printf" not in stopped.text
    assert after.text == "clean\n"


async def test_an_endless_output_is_stopped_long_before_the_limit(shell: Any) -> None:
    stopped = await shell.run("yes")
    after = await shell.run("echo clean")

    assert "it wrote more than" in stopped.notice
    assert 0 < len(stopped.text) <= 65_536
    assert set(stopped.text) <= {"y", "\n"}
    assert after.text == "clean\n"


async def test_a_long_output_keeps_its_first_64_kib_and_the_command_runs_to_its_end(shell: Any) -> None:
    output = await shell.run("seq 1 200000; touch /tmp/done")
    after = await shell.run("ls /tmp/done")

    assert output.text == "".join(f"{number}\n" for number in range(1, 200_001))[:65_536]
    assert output.status == 0
    assert after.text == "/tmp/done\n"


async def test_a_forged_mark_is_output(shell: Any) -> None:
    forged = r"printf '\n%s%s:%d:%d:\n' 0123456789ab cdef01234567 0 7; echo after"

    output = await shell.run(forged)

    assert output.text == "\n0123456789abcdef01234567:0:7:\nafter\n"


async def test_terminal_settings_that_a_command_changed_are_restored(shell: Any) -> None:
    await shell.run("stty onlcr echo < /dev/tty; PS1='# '; PROMPT_COMMAND='echo prompt'")

    output = await shell.run("echo clean")

    assert output.text == "clean\n"


async def test_an_echo_that_a_nested_shell_found_at_its_start_is_turned_off(shell: Any) -> None:
    await shell.run("useradd -m -s /bin/bash jack")

    entered = await shell.run(
        "stty onlcr echo < /dev/tty; su - jack"
    )  # its line editor restores the settings that it found
    outputs = [
        await shell.run(f"echo {word}; stty -a < /dev/tty | tr ' ;' '\\n\\n' | grep -x -e -echo -e -onlcr")
        for word in "ab"
    ]

    assert entered.text == ""
    assert [output.text for output in outputs] == ["a\n-onlcr\n-echo\n", "b\n-onlcr\n-echo\n"]


async def test_the_shell_itself_runs_no_program_in_the_box(shell: Any) -> None:
    output = await shell.run("printf '#!/bin/sh\\ntouch /tmp/ran\\n' > /tmp/stty; chmod 755 /tmp/stty; PATH=/tmp:$PATH")
    after = await shell.run("ls /tmp/ran")

    assert output.status == 0
    assert after.status != 0


@pytest.mark.parametrize("name", [".", "printf", "source", "exit"])
async def test_a_function_named_like_a_typed_command_does_not_replace_it(shell: Any, name: str) -> None:
    await shell.run(f"{name}() {{ echo mine; }}")
    after = await shell.run("echo theirs; false")

    assert (after.text, after.status, after.notice) == ("theirs\n", 1, "")


async def test_a_shell_that_cannot_be_opened_again_is_reported(shell: Any) -> None:
    ended = await shell.run("mv /bin /nobin; echo last; exit")

    assert (ended.text, ended.notice) == ("last\n", shells.ENDED)


async def test_commands_leave_no_history_in_the_box(shell: Any, sandbox: Any) -> None:
    await shell.run("echo secret-word; history -a")

    done = await sandbox.run(["/bin/grep", "-rl", "secret-word", "/root", "/home", "/tmp"])

    assert done.stdout == b""


async def test_a_box_without_bash_is_reported_as_without_a_shell(shell: Any) -> None:
    await shell.run("mv /bin /nobin; exit")  # /bin is a link in the box

    with pytest.raises(shells.ShellGone):
        await shell.run("echo x")


class Kept:
    """A sandbox whose terminals block the reading process for a moment after each line that it types."""

    def __init__(self, sandbox: Any, kept_s: float) -> None:
        self._sandbox = sandbox
        self._kept_s = kept_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def terminal(self, *args: Any, **options: Any) -> Any:
        return KeptTerminal(await self._sandbox.terminal(*args, **options), self._kept_s)


class KeptTerminal:
    """A terminal of `Kept`."""

    def __init__(self, terminal: Any, kept_s: float) -> None:
        self._terminal = terminal
        self._kept_s = kept_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._terminal, name)

    async def write(self, data: bytes) -> None:
        # Before the typed line, so that its answer cannot have been read yet.
        asyncio.get_running_loop().call_soon(time.sleep, self._kept_s)
        await self._terminal.write(data)


async def test_an_answer_of_the_shell_counts_even_if_this_process_reads_it_late(sandbox: Any) -> None:
    shell = shells.Shell(Kept(sandbox, 0.5), command_timeout_s=AMPLE_S, grace_s=0.2)
    await shell.open()
    await shell.run("kept=here; cd /tmp")

    output = await shell.run("echo $kept $PWD")

    assert (output.text, output.status, output.notice) == ("here /tmp\n", 0, "")


async def test_a_shell_without_cpu_time_is_waited_for_and_not_replaced(sandbox: Any) -> None:
    shell = shells.Shell(sandbox, command_timeout_s=AMPLE_S, grace_s=0.1)
    await shell.open()
    await shell.run("kept=here; trap 'for ((i = 0; i < 150000; i++)); do :; done' DEBUG")  # works before it answers

    output = await shell.run("echo $kept")

    assert (output.text, output.notice) == ("here\n", "")


class LooksLate:
    """A sandbox that returns the state of a shell only after the shell has finished its work."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        async with asyncio.timeout(HANG_S):
            while True:
                told = bytes(await self._sandbox.read_file(path, max_bytes=max_bytes))
                if not path.endswith("/stat") or told.rpartition(b")")[2].split()[:1] == [b"S"]:
                    return told
                await asyncio.sleep(0.01)


async def test_a_shell_that_answers_while_its_state_is_checked_is_not_replaced(sandbox: Any) -> None:
    shell = shells.Shell(LooksLate(sandbox), command_timeout_s=AMPLE_S, grace_s=0.1)
    await shell.open()
    await shell.run("kept=here; trap 'for ((i = 0; i < 150000; i++)); do :; done' DEBUG")

    output = await shell.run("echo $kept")

    assert (output.text, output.notice) == ("here\n", "")
