"""The workspace: the directory in which the agent works, its initial state, and its archive for the judge."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from coding_sandbox import ENVIRONMENT, Sandbox, SandboxFault
from coding_tasks import MAX_TREE_BYTES, InvalidTask, read_files

WORKSPACE = "/root/task"
SOLUTION = f"{WORKSPACE}/solution.py"
MOMENT = 1_767_225_600
"""The date of all files of a workspace, so that sessions in different workers start alike: 2026-01-01, UTC."""
PREPARE_S = 60.0
"""Seconds for each step that prepares or collects a workspace."""

# Without git's advice and warnings, which would precede the reason of a failure.
CLONE = (
    'git -c advice.detachedHead=false -c init.defaultBranch=main clone -q --template= "$1" "$2" '
    '&& git -C "$2" checkout -q "$3" && rm "$1"'
)
COLLECT = 'tar -C "$0" -cf - .'


@dataclass(frozen=True, slots=True)
class Start:
    """The initial state of a task's workspace."""

    files: Mapping[str, str]
    bundle: bytes | None
    """A git bundle that is cloned into the workspace."""
    commit: str | None
    """The commit that is checked out of the bundle."""

    @property
    def key(self) -> str:
        """The key of the layer: equal starts share a layer."""
        whole = json.dumps([sorted(self.files.items()), self.commit]).encode() + b"\0" + (self.bundle or b"")
        return hashlib.sha256(whole).hexdigest()

    def build(self) -> Callable[[Sandbox], Awaitable[None]]:
        """Return the function that prepares a fresh sandbox.

        Raises (when it runs):
            InvalidTask: The bundle cannot be cloned, or has no such commit.
        """

        async def prepare(sandbox: Sandbox) -> None:
            await checked(sandbox, ["mkdir", "-p", WORKSPACE], "the workspace cannot be made")
            if self.bundle is not None:
                await sandbox.write_file("/tmp/start.bundle", self.bundle)
                clone = ["sh", "-c", CLONE, "sh", "/tmp/start.bundle", WORKSPACE, self.commit or "HEAD"]
                await checked(sandbox, clone, "config.git cannot be cloned")
            for path, text in self.files.items():
                await put(sandbox, f"{WORKSPACE}/{path}", text.encode("utf-8", "replace"))

        return prepare


def read_start(config: object) -> Start:
    """Read `files` and `git` of a task's configuration.

    Raises:
        InvalidTask: The shape is wrong, or a bound is exceeded.
    """
    given: Mapping[str, object] = config if isinstance(config, Mapping) else {}
    files = read_files(given.get("files", {}), name="config.files")
    match given.get("git"):
        case None:
            return Start(files, None, None)
        case {"bundle": str(bundle), "commit": str(commit)} if re.fullmatch("[0-9a-f]{7,64}", commit):
            return Start(files, _decoded(bundle), commit)
    raise InvalidTask("config.git must be {bundle, commit}: base64 of a git bundle, and a commit's hexadecimal name")


async def put(sandbox: Sandbox, path: str, data: bytes) -> None:
    """Write a file and make its directory; a file, link or directory in its place is removed first."""
    place = 'rm -rf -- "$0" && mkdir -p -- "$(dirname -- "$0")"'
    await checked(sandbox, ["sh", "-c", place, path], f"{path} cannot be written")
    await sandbox.write_file(path, data)


async def collect(sandbox: Sandbox) -> bytes:
    """Return the workspace as a tar archive from the agent's own `tar`, which may be unpacked in a sandbox only.

    Raises:
        InvalidTask: It has more than `MAX_TREE_BYTES`, or cannot be read; the agent can correct that.
    """
    done = await sandbox.run(
        ["sh", "-c", COLLECT, WORKSPACE],
        cwd="/",
        env=ENVIRONMENT,
        timeout_s=PREPARE_S,
        output_bytes=MAX_TREE_BYTES,
    )
    if done.truncated:
        raise InvalidTask(f"{WORKSPACE} has more than {MAX_TREE_BYTES} bytes")
    if done.status != 0 or done.timed_out:
        raise InvalidTask(f"{WORKSPACE} cannot be read")
    return done.stdout


async def checked(sandbox: Sandbox, argv: list[str], failure: str, *, stdin: bytes = b"") -> None:
    """Run a step that must succeed.

    Raises:
        InvalidTask: It ended with a status other than 0; the error starts with *failure*.
        SandboxFault: It did not end.
    """
    done = await sandbox.run(argv, stdin=stdin, cwd="/", env=ENVIRONMENT, timeout_s=PREPARE_S)
    if done.timed_out:
        raise SandboxFault(f"{failure}: not done in {PREPARE_S:g} s")
    if done.status != 0:
        raise InvalidTask(f"{failure}: {done.stderr.decode('utf-8', 'replace').strip()[-500:]}")


def _decoded(bundle: str) -> bytes:
    try:
        data = base64.b64decode(bundle, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidTask("config.git.bundle must be base64") from None
    if len(data) > MAX_TREE_BYTES:
        raise InvalidTask(f"config.git.bundle must have at most {MAX_TREE_BYTES} bytes")
    return data
