"""Shorthands for running programs inside a sandbox."""

from envserver.sandbox import Completed, Sandbox


async def bash(sandbox: Sandbox, script: str, *, timeout_s: float = 30.0, user: str = "root") -> Completed:
    return await sandbox.run(["bash", "-c", script], timeout_s=timeout_s, user=user, cwd="/")


async def said(sandbox: Sandbox, script: str) -> str:
    """Return the standard output of *script*, which must succeed."""
    done = await bash(sandbox, script)
    assert done.status == 0, done
    return done.stdout.decode()


async def python(sandbox: Sandbox, code: str, *, timeout_s: float = 30.0) -> Completed:
    return await sandbox.run(["python3", "-I", "-c", code], timeout_s=timeout_s, cwd="/")


async def has_no_process(sandbox: Sandbox, name: str) -> bool:
    return await said(sandbox, f"pgrep -c {name} || true") == "0\n"


async def has_file(sandbox: Sandbox, path: str) -> bool:
    return (await sandbox.run(["test", "-e", path])).status == 0
