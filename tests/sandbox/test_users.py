"""Users are looked up in the sandbox's own files, in their current state."""

import os
from pathlib import Path

import pytest
from envserver.sandbox import Sandbox, SandboxError
from envserver.sandbox.users import Table

from tests.sandbox.inside import bash, said


async def home(sandbox: Sandbox, user: str) -> str:
    return (await bash(sandbox, 'echo "$HOME"', user=user)).stdout.decode().strip()


async def test_a_user_that_was_just_added_changed_or_removed_is_seen_immediately(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="no such user"):
        await bash(sandbox, "true", user="jack")
    await said(sandbox, "useradd -m jack")
    assert await home(sandbox, "jack") == "/home/jack"
    await said(sandbox, "sed -i s,/home/jack,/home/josh, /etc/passwd")
    assert await home(sandbox, "jack") == "/home/josh"
    await said(sandbox, "sed -i /^jack:/d /etc/passwd")
    with pytest.raises(SandboxError, match="no such user"):
        await bash(sandbox, "true", user="jack")


async def test_a_change_in_place_is_seen_even_with_unchanged_size_and_mtime(sandbox: Sandbox) -> None:
    await said(sandbox, "echo jack:x:1000:1000::/home/jack:/bin/sh >> /etc/passwd; touch -d 2020-01-01 /etc/passwd")
    assert await home(sandbox, "jack") == "/home/jack"

    await said(
        sandbox,
        "printf /home/josh | dd of=/etc/passwd bs=1 conv=notrunc seek=$(grep -ob /home/jack /etc/passwd | "
        "cut -d: -f1); touch -d 2020-01-01 /etc/passwd",
    )

    assert await home(sandbox, "jack") == "/home/josh"


async def test_a_users_command_has_the_users_groups(sandbox: Sandbox) -> None:
    await said(sandbox, "useradd -m jack; groupadd -g 1234 crew; usermod -a -G crew jack")

    assert (await bash(sandbox, "id -G", user="jack")).stdout.split()[-1] == b"1234"


async def test_a_box_of_the_host_has_the_users_groups_and_folders_of_debian(sandbox: Sandbox) -> None:
    await said(sandbox, "getent passwd bin sys www-data nobody && getent group sudo bin sys && chown bin:sudo /tmp")

    assert await said(sandbox, "cat /var/log/*.log | head -1 | wc -l; ls -d /usr/local/bin") == "1\n/usr/local/bin\n"


def test_a_table_that_changed_just_now_is_read_each_time(tmp_path: Path) -> None:
    path = tmp_path / "passwd"
    path.write_text("a:1")
    table = Table(str(path))

    first = table.rows()
    again = table.rows()

    assert (first, again) == ([["a", "1"]], [["a", "1"]])
    assert first is not again


def test_a_table_without_a_file_has_no_rows(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")

    for name in ("none", ".", "fifo"):
        assert Table(str(tmp_path / name)).rows() == []
