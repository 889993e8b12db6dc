"""The scripts of a task: their languages, and their execution in a box."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from os_box import ENVIRONMENT, HOME, Completed, Sandbox
from os_random import reads_devices

LANGUAGES = ("bash", "python", "c", "c++")
_INTERPRETERS = {"bash": "/bin/bash", "python": "/usr/bin/python3", "c": "/usr/bin/cc", "c++": "/usr/bin/c++"}
"""Absolute paths, because the agent controls the shell's own PATH."""
_SUFFIXES = {"c": ".c", "c++": ".cc"}
_COMPILE_TIMEOUT_S = 30.0
_WITHOUT_HOME = "import sys; del sys.path[0]; exec(sys.argv.pop(1))"
"""Python code that runs the code in the first argument without the current folder in the path of modules."""


@dataclass(frozen=True, slots=True)
class Script:
    """A program's text and its language."""

    code: str
    language: str = "bash"

    @classmethod
    def read(cls, data: object) -> Script:
        """Read a text, which is bash, or `{"language", "code"}`.

        Raises:
            ValueError: The value is neither, or the language is unknown.
        """
        given: Mapping[str, Any] = (
            {"code": data} if isinstance(data, str) else data if isinstance(data, Mapping) else {}
        )
        code, language = given.get("code"), given.get("language") or "bash"
        if not isinstance(code, str):
            raise ValueError("a script is a text, or an object with code")
        if language not in LANGUAGES:
            raise ValueError(f"no language {language!r}; there are {', '.join(LANGUAGES)}")
        return cls(code, language)

    @property
    def interpreter(self) -> str:
        """The program that runs or compiles the script."""
        return _INTERPRETERS[self.language]

    @property
    def draws(self) -> bool:
        """True if the seed determines the script's behavior."""
        return (self.language == "bash" and "RANDOM" in self.code) or reads_devices(self.code)

    def seeded(self, seed: int) -> Script:
        """Return the script with bash's `$RANDOM` set, if used, so that all sessions of one task and seed agree.

        Bash draws again in a subshell, so the seed does not determine `$(echo $RANDOM)`.
        """
        if self.language != "bash" or "RANDOM" not in self.code:
            return self
        return Script(f"RANDOM={seed % 32_768}\n{self.code}", self.language)


async def run_script(sandbox: Sandbox, script: Script, *, arguments: Sequence[str] = (), timeout_s: float) -> Completed:
    """Run *script* as a separate process in the box; *arguments* are its `$1`, `$2` … or `sys.argv[1:]`."""
    if script.language in _SUFFIXES:
        return await _run_compiled(sandbox, script, arguments=arguments, timeout_s=timeout_s)
    argv = [script.interpreter, "-c", script.code, *(["--"] if script.language == "bash" else []), *arguments]
    return await sandbox.run(argv, cwd=HOME, env=ENVIRONMENT, timeout_s=timeout_s)


async def run_check(sandbox: Sandbox, script: Script, *, arguments: Sequence[str] = (), timeout_s: float) -> Completed:
    """Run *script* in a box in which an agent has acted. Python loads no module from the agent's folders and caches."""
    if script.language in _SUFFIXES:
        return await _run_compiled(sandbox, script, arguments=arguments, timeout_s=timeout_s)
    argv = [script.interpreter, "-c", script.code, "--", *arguments]
    if script.language == "python":
        argv = [script.interpreter, "-s", "-c", _WITHOUT_HOME, script.code, *arguments]
    caches = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPYCACHEPREFIX": f"/run/{secrets.token_hex(8)}"}
    return await sandbox.run(argv, cwd=HOME, env={**ENVIRONMENT, **caches}, timeout_s=timeout_s)


async def _run_compiled(sandbox: Sandbox, script: Script, *, arguments: Sequence[str], timeout_s: float) -> Completed:
    source, program = f"/run/script{_SUFFIXES[script.language]}", "/run/script"
    await sandbox.write_file(source, script.code.encode(), mode=0o600)
    built = await sandbox.run(
        [script.interpreter, "-o", program, source],
        cwd=HOME,
        env=ENVIRONMENT,
        timeout_s=min(timeout_s, _COMPILE_TIMEOUT_S),
    )
    if built.timed_out or built.status != 0:
        return built
    done = await sandbox.run([program, *arguments], cwd=HOME, env=ENVIRONMENT, timeout_s=timeout_s)
    await sandbox.run(["/bin/rm", "-f", source, program], cwd=HOME, env=ENVIRONMENT, timeout_s=timeout_s)
    return done
