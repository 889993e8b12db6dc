"""One bash that lives as long as its session: directory, variables, jobs and nested shells persist between turns.

A command reaches the shell as a file, not as typed text. So an unbalanced quote is a syntax error, and a line longer
than the terminal's 4,095 bytes stays whole. Only two short lines are typed: a begin mark, and the line that runs the
file and then prints an end mark (see os_marks). The text between the marks is the output.

No user types, so a command's standard input is empty: `cat > notes` ends immediately, and nothing that the agent did
not write gets into a file. Only a shell that the agent starts without a command (`su - jack`, `bash`) reads the
terminal, and with it the commands of later turns.
"""

from __future__ import annotations

import asyncio
import enum
import math
import re
from dataclasses import dataclass

from os_box import ENVIRONMENT, HOME, Sandbox, Terminal, is_refusal
from os_marks import TYPED, Capture, Mark, Nesting
from os_text import plain

COMMAND_TIMEOUT_S = 30.0
"""AgentBench's limit for one command, in seconds."""
GRACE_S = 2.0
"""Seconds for an interrupted or killed command to end, and for a shell to report that it is ready."""
PATIENCE_S = 15.0
"""The same for a shell that only waits for a CPU: on a full machine it is late through no fault of its own."""
OPEN_TIMEOUT_S = 10.0
"""Seconds for a login shell's profile scripts on a busy machine; usually they take some ten milliseconds."""
MOST_OUTPUT_BYTES = 32 * 2**20
"""The maximum output of a command before it is interrupted: `yes` would occupy a core of the server until its limit."""

COMMAND_FILE = "/run/command"
"""A neutral name, because bash's error messages show it, outside the places whose files tasks count."""
_TRACED = re.compile(rf"\A(?:\++ exit \d+\n)?\++ command \. {COMMAND_FILE}\n")
"""The typed line before a command, as ``set -x`` prints it."""

MOST_NESTED = 50
"""The maximum number of shells in each other that the server keeps track of."""

_ARGV = ("/bin/bash", "--login", "--noediting")
_READ_BYTES = 65_536
_WAIT_S = 2.0
"""The longest single wait for bytes, in seconds; then the shell's process is checked."""
_ARRIVAL_S = 0.5
"""Seconds until written bytes arrive: the kernel passes them on in its own thread."""

# In each turn, because a nested shell has its own prompt and line editor.
_SILENCE = "set +o emacs +o vi; PS1= PS2= PROMPT_COMMAND=; unset HISTFILE; "

RESTARTED = "[the shell has ended; a new one is open: files are as they were, variables and the directory are not]"
ENDED = "[the shell has ended, and a new one does not start: the next command tries once more]"


class ShellGone(RuntimeError):
    """No shell could be opened in the sandbox."""


class _End(enum.Enum):
    MARKED = enum.auto()
    CLOSED = enum.auto()
    LATE = enum.auto()
    FLOODED = enum.auto()


@dataclass(frozen=True, slots=True)
class Output:
    """The result of a command."""

    text: str
    status: int | None
    """The exit status, or None if the shell ended or was ended. For logs; never for a reward."""
    notice: str = ""
    """Events of the command or the shell, in a line for the model, or an empty text."""


class Shell:
    """A session's shell. It runs one command at a time."""

    def __init__(
        self, sandbox: Sandbox, *, command_timeout_s: float = COMMAND_TIMEOUT_S, grace_s: float = GRACE_S
    ) -> None:
        self._sandbox = sandbox
        self._command_timeout_s = command_timeout_s
        self._grace_s = grace_s
        self._terminal: Terminal | None = None
        self._status = 0
        self._pid = 0
        """The process id of the shell that answered last: the first, or a shell nested in it."""
        self._nesting = Nesting()
        self._outer: list[Mark] = []
        """The marks of the lines that started a nested shell. They are printed when it exits."""
        self._first_pid = 0

    async def open(self) -> None:
        """Start the shell.

        Raises:
            ShellGone: The shell could not be started, or did not answer.
        """
        await self.close()
        environment = {**ENVIRONMENT, "TERM": "dumb", "PAGER": "cat"}
        try:
            terminal = await self._sandbox.terminal(_ARGV, cwd=HOME, env=environment, rows=50, cols=200)
        except Exception as error:
            if not is_refusal(error):
                raise
            raise ShellGone(f"the shell did not start: {error}") from error  # the agent removed it or its home
        self._terminal, self._status, self._first_pid, self._outer = terminal, 0, 0, []
        if not await self._begin(terminal, OPEN_TIMEOUT_S):
            await self.close()
            raise ShellGone("the shell did not start")
        self._first_pid = self._pid

    async def _restarted(self) -> str:
        """Open another shell and return a note about it; this command's output is kept even if no shell opens."""
        try:
            await self.open()
        except ShellGone:
            return ENDED
        return RESTARTED

    async def close(self) -> None:
        """End the shell; the sandbox stays."""
        terminal, self._terminal = self._terminal, None
        if terminal is not None:
            await terminal.close()

    async def run(self, script: str, *, within_s: float = math.inf) -> Output:
        """Run *script* in the shell, for at most `COMMAND_TIMEOUT_S` and the graces, and *within_s* seconds in all.

        Raises:
            ShellGone: There is no shell, and no shell could be opened.
        """
        await self._sandbox.write_file(COMMAND_FILE, f"{script}\n".encode("utf-8", "replace"), mode=0o644)
        terminal, notices = await self._ready()
        mark = Mark()
        capture = Capture(mark, *self._outer, nesting=self._nesting)
        # After `||`, because a failing subshell alone would end a shell under `set -e`; the file finds the status in
        # `$?`.
        hand_on = f"(exit {self._status}) || " if self._status else ""
        end = _End.CLOSED
        # Not the bare names: an agent's function called `.` or `printf` would run in their place, here and in later
        # turns.
        if await _typed(terminal, f"{hand_on}\\command . {COMMAND_FILE} < /dev/null; {mark.line}\n"):
            limit_s = min(self._command_timeout_s, max(self._grace_s, within_s - 2 * self._grace_s))
            end = await self._read(terminal, capture, limit_s)
        if end in (_End.LATE, _End.FLOODED):
            notices.append(self._interrupted(end))
            end = await self._stop(terminal, capture)
        if end is not _End.MARKED:
            notices.append(await self._restarted())
        output = self._output(capture, notices)
        if capture.found is not None:
            self._status, self._pid = capture.found.status, capture.found.shell_pid
            self._settle(mark, capture.found.mark)
        return output

    def _settle(self, mark: Mark, found: Mark) -> None:
        """Keep the marks of the lines that still run: a nested shell started, or it exited to the shell around it."""
        if found in self._outer:
            del self._outer[self._outer.index(found) :]
        elif found is not mark:
            self._outer = [*self._outer[-MOST_NESTED + 1 :], mark]

    async def _ready(self) -> tuple[Terminal, list[str]]:
        """Wait for a begin mark, in a new shell if the old shell does not answer.

        The mark is typed separately from the command. Otherwise a late shell would run the command, and its replacement
        would run it again.
        """
        notices = []
        if self._terminal is None or not await self._begin(self._terminal, self._grace_s):
            notices.append(RESTARTED)
            await self.open()
        if self._terminal is None:
            raise ShellGone("the shell did not start")
        return self._terminal, notices

    async def _begin(self, terminal: Terminal, timeout_s: float) -> bool:
        """Silence the shell and read until it is ready; return False if it is not ready within *timeout_s*."""
        mark = Mark()
        capture = Capture(mark)
        terminal.silence()
        if not await _typed(terminal, f"{_SILENCE}{self._nesting.functions}{mark.line}\n"):
            return False
        if await self._answer(terminal, capture, timeout_s) is not _End.MARKED or capture.found is None:
            return False
        # Once more: a nested shell's line editor has restored the settings that it found, possibly an echo.
        terminal.silence()
        self._pid = capture.found.shell_pid
        return True

    async def _stop(self, terminal: Terminal, capture: Capture) -> _End:
        """Interrupt the running command, then kill it if necessary, until the shell answers."""
        for stop in (terminal.interrupt, terminal.kill_foreground):
            await stop()
            # A fresh mark, because a command that reads its input has swallowed the first. The empty line before it is
            # for bash itself, which loses a character when it is interrupted while it waits for input.
            capture.marks.append(Mark())
            if not await _typed(terminal, f"\n{capture.marks[-1].line}\n"):
                return _End.CLOSED
            end = await self._answer(terminal, capture, self._grace_s)
            if end in (_End.MARKED, _End.CLOSED):
                return end
        return _End.LATE

    async def _answer(self, terminal: Terminal, capture: Capture, timeout_s: float) -> _End:
        """Wait for a mark before which the shell has no work, as `_read` does.

        A shell that is late because the machine is full gets up to `PATIENCE_S`. A new shell in its place would lose
        the agent's directory and variables, and with them its reward.
        """
        clock = asyncio.get_running_loop().time
        patient_until = clock() + PATIENCE_S
        end = await self._read(terminal, capture, timeout_s)
        while end is _End.LATE and clock() < patient_until:
            is_runnable = await self._is_runnable()
            # Also from a shell that no longer runs: it may have answered after the last read, and wait for a line since
            # then.
            end = await self._read(terminal, capture, min(timeout_s, _WAIT_S if is_runnable else _ARRIVAL_S))
            if not is_runnable:
                break
        return end

    async def _read(self, terminal: Terminal, capture: Capture, timeout_s: float) -> _End:
        """Feed *capture* until one of its marks arrives, the stream ends, the time is up, or the output is too large.

        Bytes that have arrived by then count, even if this process itself could not read them before its time was up.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        flooded_at = capture.seen_bytes + MOST_OUTPUT_BYTES
        is_last = False
        while not is_last:
            left_s = deadline - clock()
            is_last = left_s <= 0
            try:
                data = await terminal.read(_READ_BYTES, max(0.0, min(left_s, _WAIT_S)))
            except TimeoutError:
                data = b""
            if not data:
                if terminal.is_closed or not await self._is_alive():
                    return _End.CLOSED
                continue
            if capture.feed(data) is not None:
                return _End.MARKED
            if capture.is_nested and not await self._enter(terminal, capture):
                return _End.CLOSED
            if capture.seen_bytes > flooded_at:
                return _End.FLOODED
            await asyncio.sleep(0)  # available bytes are read without a wait, so yield to other sessions
        return _End.LATE

    async def _enter(self, terminal: Terminal, capture: Capture) -> bool:
        """Type a mark for the nested shell that starts; return False if no process can read it."""
        capture.is_nested = False
        capture.marks.append(Mark())
        return await _typed(terminal, f"{capture.marks[-1].line}\n")

    async def _is_runnable(self) -> bool:
        """Return True if the shell that answered last runs, or waits only for a CPU or a disk."""
        if not self._pid:
            return False
        try:
            told = await self._sandbox.read_file(f"/proc/{self._pid}/stat", max_bytes=512)
        except Exception as error:
            if not is_refusal(error):
                raise
            return False
        return told.rpartition(b")")[2].split()[:1] in ([b"R"], [b"D"])

    async def _is_alive(self) -> bool:
        """Check the shell's process: a background job keeps the terminal open after the shell has ended."""
        if not self._first_pid:
            return True
        try:
            return bool(await self._sandbox.read_file(f"/proc/{self._first_pid}/comm", max_bytes=64))
        except Exception as error:
            if not is_refusal(error):
                raise
            return False

    def _interrupted(self, end: _End) -> str:
        if end is _End.FLOODED:
            return f"[the command was stopped: it wrote more than {MOST_OUTPUT_BYTES // 2**20} MiB]"
        return f"[the command was stopped: it had not ended after {self._command_timeout_s:g} seconds]"

    def _output(self, capture: Capture, notices: list[str]) -> Output:
        text = plain(capture.output)
        if capture.found is not None and capture.found.shell_pid != self._pid:
            text = _without_prompt(text, capture.found.mark)
        text = TYPED.sub("", _TRACED.sub("", text))
        return Output(text, capture.found.status if capture.found else None, "\n".join(notices))


def _without_prompt(text: str, mark: Mark) -> str:
    """Cut the one prompt that a shell shows before it is silenced; a line editor repeats the typed line behind it."""
    return re.sub(rf"(?:\A|\n)[^\n]*[$#%>] ?(?:{re.escape(mark.line)})?\n?\Z", "", text)


async def _typed(terminal: Terminal, line: str) -> bool:
    """Type *line*; return False if no process can read it."""
    try:
        await terminal.write(line.encode())
    except OSError:
        return False
    return not terminal.is_closed
