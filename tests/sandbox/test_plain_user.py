"""Sandboxes for a plain user without capabilities, with one uid only."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadlines import COMMAND_S
from tests.fakes.user import need_other_users

PACKAGE = Path(__file__).parents[2] / "env_images" / "base" / "envserver"
UID = 12_345
_PROGRAM = """
import asyncio, sys, types
package = types.ModuleType("envserver")  # without its server, whose libraries this interpreter may not have
package.__path__ = [sys.argv[1]]
sys.modules["envserver"] = package
from envserver.sandbox import Limits, SandboxError, Sandboxes
from envserver.sandbox.hostbox import box_of_host

async def main():
    async with Sandboxes(box_of_host(sys.argv[2] + "/box"), sys.argv[2] + "/work", Limits(pids=40)) as sandboxes:
        await sandboxes.check()
        layer = await sandboxes.layer("key", lambda sandbox: sandbox.write_file("/root/made", b"made "))
        sandbox = await sandboxes.open(layer)
        done = await sandbox.run(["bash", "-c", "cat /root/made; rm /root/made; id -un; cat /etc/shadow | head -1"])
        print(done.stdout.decode(), end="")
        try:
            await sandbox.run(["bash", "-c", "b() { b | b & }; b; sleep 60"], timeout_s=60)
        except SandboxError:
            print(sandbox.killed)

asyncio.run(main())
"""


@pytest.fixture
def home() -> Iterator[Path]:
    need_other_users()
    folder = Path(tempfile.mkdtemp(prefix="env-gateway-plain-"))
    (folder / "work").mkdir()
    if os.geteuid() == 0:
        os.chown(folder, UID, UID)
        os.chown(folder / "work", UID, UID)
    yield folder
    shutil.rmtree(folder)


def test_a_plain_user_opens_sandboxes_in_which_only_root_exists(home: Path) -> None:
    become = ["setpriv", "--reuid", str(UID), "--regid", str(UID), "--clear-groups"] if os.geteuid() == 0 else []

    # The machine's interpreter: the tests' own interpreter may be in a folder of root's.
    done = subprocess.run(
        [*become, "/usr/bin/python3", "-B", "-c", _PROGRAM, str(PACKAGE), str(home)],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )

    assert done.stdout == "made root\nroot:*:19000:0:99999:7:::\npids\n", done.stderr
