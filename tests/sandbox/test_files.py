"""write_file and read_file work inside, so that no link leads out of the sandbox."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
from envserver.sandbox import Sandbox, SandboxError

from tests.sandbox.inside import bash, said


async def test_a_file_is_read_back_as_it_was_written(sandbox: Sandbox) -> None:
    data = os.urandom(3_000_000)

    await sandbox.write_file("/root/new/folder/x", data, mode=0o640)

    assert await sandbox.read_file("/root/new/folder/x", max_bytes=len(data) + 1) == data
    assert await sandbox.read_file("/root/new/folder/x", max_bytes=10) == data[:10]
    assert await said(sandbox, "stat -c '%a %U %s' /root/new/folder/x; stat -c '%a %U' /root/new") == (
        "640 root 3000000\n755 root\n"
    )


async def test_a_shorter_text_replaces_a_longer_one(sandbox: Sandbox) -> None:
    await sandbox.write_file("/tmp/x", b"a long text")
    await sandbox.write_file("/tmp/x", b"short")

    assert await said(sandbox, "cat /tmp/x") == "short"


@pytest.mark.parametrize(
    "target", ["{outside}", "/../../../..{outside}", "/proc/1/root{outside}", "/proc/self/root{outside}"]
)
async def test_a_link_leads_to_the_sandboxs_own_file_or_nowhere(sandbox: Sandbox, tmp_path: Path, target: str) -> None:
    outside = tmp_path / "secret"
    outside.write_text("the server's")
    await said(sandbox, f"ln -s {target.format(outside=outside)} /root/link")

    with pytest.raises(SandboxError):
        await sandbox.read_file("/root/link", max_bytes=100)
    with suppress(SandboxError):  # there may be no such folder inside
        await sandbox.write_file("/root/link", b"agent's")

    assert outside.read_text() == "the server's"


async def test_a_folder_that_is_a_link_leads_to_the_sandboxs_own_folder(sandbox: Sandbox) -> None:
    await said(sandbox, "ln -s / /root/up; mkdir -p /root/a; ln -s ../../../../.. /root/a/top")

    await sandbox.write_file("/root/up/root/a/top/etc/made", b"1")

    assert await said(sandbox, "cat /etc/made") == "1"
    assert "made" not in os.listdir("/etc")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/tmp/fifo", id="fifo"),
        pytest.param("/dev/zero", id="device"),
        pytest.param("/tmp", id="folder"),
        pytest.param("/tmp/socket", id="socket"),
        pytest.param("/tmp/loop", id="loop of links"),
        pytest.param("/tmp/magic", id="a process's open file"),
        pytest.param("relative", id="relative"),
        pytest.param("/tmp/a\0b", id="zero byte"),
        pytest.param("/tmp/" + "x" * 300, id="long name"),
        pytest.param("/none/such", id="missing"),
    ],
)
async def test_a_path_that_is_not_a_plain_file_is_refused_immediately(sandbox: Sandbox, path: str) -> None:
    await said(sandbox, "mkfifo /tmp/fifo; ln -s loop /tmp/loop; ln -s /proc/1/fd/0 /tmp/magic")
    await said(sandbox, "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/tmp/socket\")'")

    with pytest.raises(SandboxError) as raised:
        await sandbox.read_file(path, max_bytes=100)

    assert raised.value.code == "refused"
    if "none" not in path:
        with pytest.raises(SandboxError):
            await sandbox.write_file(path, b"x")
    assert (await bash(sandbox, "true")).status == 0


async def test_an_endless_file_is_cut(sandbox: Sandbox) -> None:
    await said(sandbox, "truncate -s 1T /tmp/sparse")

    assert await sandbox.read_file("/tmp/sparse", max_bytes=1000) == bytes(1000)


@pytest.mark.parametrize("length", [5_000, 100_000])
async def test_a_name_of_any_length_is_refused_and_the_sandbox_goes_on(sandbox: Sandbox, length: int) -> None:
    name = "/" + "x" * length

    for refused in (
        sandbox.write_file(f"{name}/x", b""),
        sandbox.write_file(name, b""),
        sandbox.read_file(name, max_bytes=1),
        sandbox.run([name]),
        sandbox.run(["true"], cwd=name),
        sandbox.run(["true"], user=name),
    ):
        with pytest.raises(SandboxError) as raised:
            await refused
        assert raised.value.code == "refused"
        assert len(str(raised.value)) <= 4_096

    assert await said(sandbox, "echo fine") == "fine\n"
