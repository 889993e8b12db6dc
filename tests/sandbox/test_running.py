"""Commands: their view of the sandbox, their results, and the processes that they leave."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from envserver.sandbox import Sandbox, SandboxError, Sandboxes, hostbox

from tests.envserver.eventually import eventually
from tests.sandbox.inside import bash, has_file, has_no_process, said


async def test_a_sandbox_opens_runs_and_closes(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.open()

    done = await sandbox.run(["true"])
    await sandbox.close()
    await sandbox.close()

    assert (done.status, done.stdout, done.stderr, done.timed_out, done.truncated) == (0, b"", b"", False, False)
    with pytest.raises(SandboxError, match="closed") as raised:
        await sandbox.run(["true"])
    assert raised.value.code == "ended"
    assert sandbox.killed is None


async def test_check_passes_on_this_machine(sandboxes: Sandboxes) -> None:
    await sandboxes.check()


async def test_status_output_input_folder_and_environment_are_the_commands_own(sandbox: Sandbox) -> None:
    done = await sandbox.run(
        ["bash", "-c", 'cat; echo "$WORD $PWD" >&2; exit 7'], stdin=b"typed", cwd="/tmp", env={"WORD": "hello"}
    )

    assert (done.status, done.stdout, done.stderr) == (7, b"typed", b"hello /tmp\n")


async def test_root_can_read_every_folder(sandbox: Sandbox) -> None:
    await said(sandbox, "find / > /dev/null")


async def test_a_signal_is_a_negative_status(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "kill -TERM $$")

    assert done.status == -15


@pytest.mark.parametrize(
    ("argv", "cwd", "user", "message"),
    [
        pytest.param(["no-such-program"], "/", "root", "no-such-program: No such file", id="program"),
        pytest.param(["true"], "/no/such", "root", "/no/such: No such file", id="folder"),
        pytest.param(["true"], "/", "nobody-at-all", "no such user: nobody-at-all", id="user"),
        pytest.param(["/etc/passwd"], "/", "root", "Permission denied", id="not executable"),
    ],
)
async def test_a_missing_program_folder_or_user_is_named(
    sandbox: Sandbox, argv: list[str], cwd: str, user: str, message: str
) -> None:
    with pytest.raises(SandboxError, match=message) as raised:
        await sandbox.run(argv, cwd=cwd, user=user)

    assert raised.value.code == "refused"
    assert (await sandbox.run(["true"])).status == 0


async def test_two_hundred_kilobytes_of_binary_go_in_and_come_out(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 800

    done = await sandbox.run(["cat"], stdin=data, output_bytes=len(data))

    assert done.stdout == data
    assert not done.truncated


async def test_a_long_argument_arrives(sandbox: Sandbox) -> None:
    word = "ä" * 60_000

    done = await sandbox.run(["printf", "%s", word], output_bytes=1_000_000)

    assert done.stdout.decode() == word


async def test_output_over_the_bound_is_dropped_and_reported(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "head -c 5000000 /dev/zero; echo end >&2")

    assert (len(done.stdout), done.stderr, done.truncated, done.status) == (65_536, b"end\n", True, 0)


async def test_endless_output_ends_at_the_deadline(sandbox: Sandbox) -> None:
    done = await sandbox.run(["yes"], timeout_s=0.5)

    assert (done.status, done.timed_out, done.truncated, len(done.stdout)) == (-9, True, True, 65_536)


async def test_a_command_that_ended_in_time_is_not_late_if_the_server_was_blocked(sandbox: Sandbox) -> None:
    running = asyncio.ensure_future(sandbox.run(["sh", "-c", "sleep 0.7; echo ended"], timeout_s=1.0))
    asyncio.get_running_loop().call_later(0.5, time.sleep, 1.0)

    done = await running

    assert (done.status, done.stdout, done.timed_out) == (0, b"ended\n", False)


async def test_a_command_that_does_not_read_its_input_still_ends(sandbox: Sandbox) -> None:
    done = await sandbox.run(["true"], stdin=b"x" * 1_000_000)

    assert done.status == 0


async def test_a_late_command_is_killed_with_all_processes_of_its_session(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "sleep 311 & timeout 311 sleep 312 & echo begun; wait", timeout_s=0.5)

    assert (done.timed_out, done.stdout) == (True, b"begun\n")
    # A killed process runs no more, but ``pgrep`` finds it until it got the CPU to end.
    await eventually(lambda: has_no_process(sandbox, "sleep"))


async def test_a_background_job_outlives_its_command(sandbox: Sandbox) -> None:
    done = await bash(sandbox, "sleep 300 & echo begun")

    assert done.stdout == b"begun\n"
    assert not done.timed_out  # although the job holds the pipe

    async def it_runs() -> bool:  # until the fork of the shell has become the program
        return await said(sandbox, "pgrep -c sleep || true") == "1\n"

    await eventually(it_runs)


async def test_commands_run_at_the_same_time(sandbox: Sandbox) -> None:
    await said(sandbox, "mkfifo /tmp/meet")

    reader, _ = await asyncio.gather(bash(sandbox, "cat /tmp/meet"), bash(sandbox, "echo met > /tmp/meet"))

    assert reader.stdout == b"met\n"


async def test_orphans_leave_no_zombies(sandbox: Sandbox) -> None:
    await said(sandbox, "for i in $(seq 50); do (setsid true &) ; done")

    async def none_is_left() -> bool:
        return await said(sandbox, "pgrep -c true || true") == "0\n"  # it finds zombies too

    await eventually(none_is_left)


async def test_killing_everything_inside_leaves_the_sandbox_usable(sandbox: Sandbox) -> None:
    await bash(sandbox, "sleep 300 & sleep 300 & kill -9 -1; kill -9 1")

    await eventually(lambda: has_no_process(sandbox, "sleep"))
    assert sandbox.killed is None


async def test_users_can_be_added_and_can_run_commands(sandbox: Sandbox) -> None:
    await said(sandbox, "useradd -m -u 1000 jack && echo mine > /root/secret && chmod 700 /root")

    assert await said(sandbox, "su jack -c 'id -un; id -u'") == "jack\n1000\n"
    done = await bash(sandbox, "cat /root/secret; echo $HOME; touch ~/x && stat -c %U ~/x", user="jack")
    assert done.stdout == b"/home/jack\njack\n"


async def test_two_sandboxes_share_nothing(sandboxes: Sandboxes) -> None:
    first, second = await asyncio.gather(sandboxes.open(), sandboxes.open())

    await said(first, "echo 1 > /root/file; rm -rf /etc/passwd /usr/bin/sed; sleep 300 & echo 2 > /dev/shm/file")

    assert await said(
        second, "ls /root /dev/shm; pgrep -c sleep || true; ls /usr/bin/sed; grep -c root: /etc/passwd"
    ) == ("/dev/shm:\n\n/root:\n0\n/usr/bin/sed\n1\n")


async def test_a_cancelled_command_is_killed(sandbox: Sandbox) -> None:
    running = asyncio.create_task(bash(sandbox, "touch /tmp/begun; exec sleep 300"))
    await eventually(lambda: has_file(sandbox, "/tmp/begun"))

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running

    await eventually(lambda: has_no_process(sandbox, "sleep"))


def test_a_box_of_an_older_recipe_stays_and_the_new_box_is_made_next_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostbox, "PROGRAMS", "bash cat")
    old = tmp_path / "box"
    (old / "etc").mkdir(parents=True)

    made = hostbox.box_of_host(old)
    again = hostbox.box_of_host(old)

    assert os.listdir(old) == ["etc"]
    assert Path(made.path).parent == tmp_path
    assert made.path != old
    assert Path(made.path, "usr/bin/bash").is_file()
    assert again == made
