"""A shell on a pty."""

import pytest
from envserver.sandbox import Sandbox, SandboxError, Sandboxes, Terminal

from tests.envserver.eventually import eventually
from tests.sandbox.inside import bash, has_no_process, said

SHELL = ["bash", "--login", "--noediting"]


async def read_until(terminal: Terminal, mark: bytes, *, timeout_s: float = 20.0) -> bytes:
    text = b""
    while mark not in text:
        data = await terminal.read(4096, timeout_s)
        assert data, text
        text += data
    return text


async def shell(sandbox: Sandbox) -> Terminal:
    terminal = await sandbox.terminal(SHELL)
    await terminal.write(b"stty -echo -onlcr; PS1= PS2= PROMPT_COMMAND=; printf 'be%s\\n' gun\n")
    await read_until(terminal, b"begun\n")
    return terminal


async def test_a_shell_keeps_its_state(sandbox: Sandbox) -> None:
    terminal = await shell(sandbox)

    await terminal.write(b"cd /tmp; x=5\n")
    await terminal.write(b"echo $x $PWD; tty; stty size; echo $TERM; printf 'en%s\\n' d\n")

    assert await read_until(terminal, b"end\n") == b"5 /tmp\n/dev/pts/0\n24 80\ndumb\nend\n"


async def test_reading_waits_at_most_its_timeout(sandbox: Sandbox) -> None:
    terminal = await shell(sandbox)

    with pytest.raises(TimeoutError):
        await terminal.read(100, 0.05)
    assert not terminal.is_closed


async def test_interrupt_reaches_the_command_and_not_the_shell(sandbox: Sandbox) -> None:
    terminal = await shell(sandbox)
    shells_own = terminal._foreground()
    await terminal.write(b"stty -isig; echo be\\gun; sleep 300\n")
    await read_until(terminal, b"begun\n")

    async def is_in_front() -> bool:  # earlier, the interrupt would reach the shell, which leaves sleep behind
        return terminal._foreground() != shells_own and not await has_no_process(sandbox, "sleep")

    await eventually(is_in_front)
    await terminal.interrupt()
    await terminal.write(b"echo al\\ive $?\n")

    assert b"alive 130\n" in await read_until(terminal, b"alive 130\n")
    await eventually(lambda: has_no_process(sandbox, "sleep"))


async def test_kill_foreground_ends_a_command_that_ignores_signals(sandbox: Sandbox) -> None:
    terminal = await shell(sandbox)
    await terminal.write(b"bash -c 'trap \"\" INT TERM HUP; echo be\\gun; while :; do sleep 1; done'; echo status $?\n")
    await read_until(terminal, b"begun\n")

    await terminal.interrupt()
    await terminal.kill_foreground()

    assert b"status 137\n" in await read_until(terminal, b"status 137\n")


async def test_a_command_of_another_user_is_interrupted_and_killed_too(sandbox: Sandbox) -> None:
    await said(sandbox, "useradd -m jack")
    terminal = await shell(sandbox)
    await terminal.write(
        b"su jack --session-command 'trap \"\" INT; echo be\\gun; while :; do sleep 1; done'; echo sta\\tus $?\n"
    )
    await read_until(terminal, b"begun\n")

    await terminal.kill_foreground()

    await read_until(terminal, b"status ")
    await eventually(lambda: has_no_process(sandbox, "-u jack"))


async def test_without_a_foreground_group_no_process_is_killed_or_interrupted(sandbox: Sandbox) -> None:
    held = b"trap '' HUP INT; (echo be\\gun; exec sleep 300) & exit\n"
    terminal = await shell(sandbox)
    await terminal.write(held)
    await read_until(terminal, b"begun\n")

    async def has_none() -> bool:
        return terminal._foreground() is None

    await eventually(has_none)  # the shell has ended, and its child holds the terminal
    await terminal.interrupt()
    await terminal.kill_foreground()

    assert not terminal.is_closed
    assert await said(sandbox, "pgrep -c sleep") == "1\n"


@pytest.mark.parametrize("group", [0, 1, -1])
async def test_a_group_that_does_not_belong_to_the_agent_is_not_killed(sandboxes: Sandboxes, group: int) -> None:
    sandbox, other = await sandboxes.open(), await sandboxes.open()

    await sandbox._tell({"op": "kill_group", "group": group})

    assert await said(sandbox, "echo here") == "here\n"
    assert await said(other, "echo here") == "here\n"


async def test_the_stream_ends_with_the_shell(sandbox: Sandbox) -> None:
    terminal = await shell(sandbox)

    await terminal.write(b"exit\n")
    while data := await terminal.read(4096, 20.0):
        assert data != b"", data

    assert terminal.is_closed
    assert await terminal.read(100, 1.0) == b""
    await terminal.write(b"nobody reads this\n")


async def test_closing_a_terminal_kills_its_session_and_leaves_the_sandbox(sandbox: Sandbox) -> None:
    terminal = await shell(sandbox)
    await terminal.write(b"trap '' HUP; sleep 300 & sleep 300 & echo be\\gun\n")
    await read_until(terminal, b"begun\n")

    await terminal.close()
    await terminal.close()

    assert terminal.is_closed
    await eventually(lambda: has_no_process(sandbox, "sleep"))


async def test_a_flood_is_read_at_the_readers_pace(sandbox: Sandbox) -> None:
    terminal = await shell(sandbox)
    await terminal.write(b"yes\n")

    taken = 0
    while taken < 300_000:
        taken += len(await terminal.read(65_536, 20.0))
    await terminal.kill_foreground()
    await terminal.write(b"printf 'aft%s\\n' er\n")

    await read_until(terminal, b"after\n")


async def test_two_terminals_do_not_see_each_others_output(sandbox: Sandbox) -> None:
    first, second = await shell(sandbox), await shell(sandbox)

    await first.write(b"echo on\\e\n")

    assert await read_until(first, b"one\n") == b"one\n"
    with pytest.raises(TimeoutError):
        await second.read(100, 0.05)


async def test_a_terminal_ends_with_its_sandbox(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.open()
    terminal = await shell(sandbox)

    await sandbox.close()

    assert terminal.is_closed
    assert await terminal.read(10, 1.0) == b""
    await terminal.interrupt()
    await terminal.kill_foreground()
    await terminal.close()


async def test_a_missing_program_opens_no_terminal(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="No such file"):
        await sandbox.terminal(["no-such-shell"])

    assert (await bash(sandbox, "ls /dev/pts")).stdout == b"ptmx\n"
