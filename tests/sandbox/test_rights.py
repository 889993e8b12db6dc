"""A server that starts with the right to become other users gives it up, and opens sandboxes all the same."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from envserver.sandbox import Box

from tests.deadlines import COMMAND_S

PACKAGE = Path(__file__).parents[2] / "env_images" / "base" / "envserver"
SERVER_UID = 100_000
_RIGHTS = "+setuid,+setgid"
_PROGRAM = """
import asyncio, json, os, signal, sys, types
from pathlib import Path
package = types.ModuleType("envserver")  # without its server, whose libraries this interpreter may not have
package.__path__ = [sys.argv[1]]
sys.modules["envserver"] = package
from envserver.sandbox import Box, Limits, SandboxError, Sandboxes, rights

def tried(attempt):
    try:
        attempt()
    except (OSError, SandboxError) as error:
        return type(error).__name__
    return "DONE"

def children():
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) in (os.getpid(), *found.values()):
                    found[(folder / "comm").read_text().strip()] = int(folder.name)
            except OSError:
                pass
    return found

def capabilities(pid):
    rows = dict(line.split(":\\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [int(rows[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")]

async def main():
    could = os.getresuid(), sum(capabilities("self"))
    rights.give_up()
    facts = {"could": bool(could[1]), "capabilities": capabilities("self")}
    for name in ("setuid", "seteuid", "setgid", "setegid"):
        facts[name] = tried(lambda: getattr(os, name)(0))
    facts["groups"] = tried(lambda: os.setgroups([0]))
    facts["core_pattern"] = tried(lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_RDWR)))
    async with Sandboxes(Box(sys.argv[2]), sys.argv[3], Limits(pids=40)) as sandboxes:
        await sandboxes.check()
        sandbox = await sandboxes.open()
        done = await sandbox.run(["bash", "-c", "useradd -m jack; su jack -c id\\\\ -un; cat /proc/self/uid_map"])
        facts["inside"] = done.stdout.decode().split()
        launcher = rights.launcher()
        pids = children()
        facts["spawner"] = capabilities(pids["spawner"])
        facts["files"] = tried(lambda: os.readlink(f"/proc/{pids['launcher']}/fd/0"))
        facts["memory"] = tried(lambda: os.close(os.open(f"/proc/{pids['launcher']}/mem", os.O_RDWR)))
        facts["other"] = tried(lambda: launcher.map_users(os.getpid()))
        sandboxes._spawner.process.kill()
        while not sandbox.is_closed:
            await asyncio.sleep(0.01)
        again = await sandboxes.open()
        facts["again"] = (await again.run(["id", "-un"])).stdout.decode()
    print(json.dumps(facts))

asyncio.run(main())
"""


@pytest.fixture
def home(work: Path) -> Iterator[Path]:
    """Yield a folder with a copy of the package, which every user can read."""
    folder = Path(tempfile.mkdtemp(prefix="env-gateway-rights-"))
    folder.chmod(0o755)
    shutil.copytree(PACKAGE, folder / "envserver", ignore=shutil.ignore_patterns("__pycache__"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process with these two capabilities")
def test_a_server_without_the_right_to_become_root_opens_sandboxes_through_its_launcher(
    box: Box, work: Path, home: Path
) -> None:
    become = ["setpriv", "--reuid", str(SERVER_UID), "--regid", str(SERVER_UID), "--clear-groups"]
    become += ["--inh-caps", f"-all,{_RIGHTS}", "--ambient-caps", _RIGHTS, "--bounding-set", f"-all,{_RIGHTS}"]
    os.chown(work, SERVER_UID, SERVER_UID)

    done = subprocess.run(
        [*become, "/usr/bin/python3", "-B", "-c", _PROGRAM, str(home / "envserver"), str(box.path), str(work)],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "could": True,
        "capabilities": [0, 0, 0, 0],
        **dict.fromkeys(("setuid", "seteuid", "setgid", "setegid", "groups", "core_pattern"), "PermissionError"),
        "inside": ["jack", "0", "0", "60000", "65534", "65534", "1"],
        "spawner": [(1 << 41) - 1, (1 << 41) - 1, 0, 0],  # of its own user namespace
        "files": "PermissionError",
        "memory": "PermissionError",
        "other": "SandboxError",
        "again": "root\n",
    }
