"""The scripts of a task: what they are written in, and how one is run in a box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from os_box import ENVIRONMENT, HOME, Completed, Sandbox

LANGUAGES = ("bash", "python", "c", "c++")
_COMPILERS = {"c": ("/usr/bin/cc", ".c"), "c++": ("/usr/bin/c++", ".cc")}
_COMPILE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Script:
    """A program's text and its language."""

    code: str
    language: str = "bash"

    @classmethod
    def read(cls, data: object) -> Script:
        """Take a text, which is bash, or `{"language", "code"}`.

        Raises:
            ValueError: it is neither, or the language is unknown.
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

    def seeded(self, seed: int) -> Script:
        """Set bash's `$RANDOM`, where it is used, so that all sessions of one task and seed agree."""
        if self.language != "bash" or "RANDOM" not in self.code:
            return self
        return Script(f"RANDOM={seed % 32_768}\n{self.code}", self.language)


async def run_script(sandbox: Sandbox, script: Script, *, arguments: Sequence[str] = (), timeout_s: float) -> Completed:
    """Run *script* as a process of its own in the box; *arguments* are its `$1`, `$2` …, `sys.argv[1:]` or `argv + 1`.

    Interpreters are named by absolute paths: the shell's own PATH is the agent's.
    """
    match script.language:
        case "python":
            argv = ["/usr/bin/python3", "-c", script.code]
        case "bash":
            argv = ["/bin/bash", "-c", script.code, "--"]
        case _:
            return await _run_compiled(sandbox, script, arguments=arguments, timeout_s=timeout_s)
    return await sandbox.run([*argv, *arguments], cwd=HOME, env=ENVIRONMENT, timeout_s=timeout_s)


async def _run_compiled(sandbox: Sandbox, script: Script, *, arguments: Sequence[str], timeout_s: float) -> Completed:
    compiler, suffix = _COMPILERS[script.language]
    source, program = f"/run/script{suffix}", "/run/script"
    await sandbox.write_file(source, script.code.encode(), mode=0o600)
    built = await sandbox.run(
        [compiler, "-o", program, source], cwd=HOME, env=ENVIRONMENT, timeout_s=min(timeout_s, _COMPILE_TIMEOUT_S)
    )
    if built.timed_out or built.status != 0:
        return built
    done = await sandbox.run([program, *arguments], cwd=HOME, env=ENVIRONMENT, timeout_s=timeout_s)
    await sandbox.run(["/bin/rm", "-f", source, program], cwd=HOME, env=ENVIRONMENT, timeout_s=timeout_s)
    return done
