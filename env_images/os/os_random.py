"""Random numbers of init scripts: what they read from the kernel's random devices is made from the session's seed.

The members of a group may be in two workers, and have to begin alike. So a script reads a named pipe in place of the
device. A program in the box feeds it: each reader gets a stream of its own, made from the seed and the reader's number.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator

from os_box import ENVIRONMENT, Sandbox, is_refusal

PIPE = "/run/urandom"
_DEVICE = re.compile(r"/dev/u?random\b")
_DD = re.compile(r"\bif=/dev/u?random\b")
_SHUF = re.compile(r"(^|[|;&(`!]|\b(?:do|then|else|xargs)\s)(\s*)shuf\b(?![^\n|;&]*--random-source)", re.MULTILINE)
_TIMEOUT_S = 10.0

# A reader waits in its open until the pipe has a writer, and then in its read until something is written. In between
# another pipe takes the name, so that two readers, one after the other, never share a stream.
_FEEDER = """
import os, random, sys, threading
path, seed = sys.argv[1:]
os.umask(0)
os.mkfifo(path, 0o666)
if child := os.fork():
    print(child)
    sys.exit()
os.setsid()
def feed(pipe, number):
    stream = random.Random(f"{seed} {number}")
    try:
        while True:
            os.write(pipe, stream.randbytes(65536))
    except OSError:
        os.close(pipe)
number = 0
while True:
    pipe = os.open(path, os.O_WRONLY)
    os.mkfifo(path + ".next", 0o666)
    os.rename(path + ".next", path)
    threading.Thread(target=feed, args=(pipe, number), daemon=True).start()
    number += 1
"""


def reads_devices(code: str) -> bool:
    """Say whether a script draws from the kernel, by a device or with `shuf`."""
    return bool(_DEVICE.search(code) or _SHUF.search(code))


def with_pipe(code: str, *, language: str) -> str:
    """Write a script so that it draws from `PIPE` instead; bash's `dd` then has to wait for whole blocks."""
    if language == "bash":
        code = _DD.sub(f"if={PIPE} iflag=fullblock", code)
        code = _SHUF.sub(rf"\1\2shuf --random-source={PIPE}", code)
    return _DEVICE.sub(PIPE, code)


@contextlib.asynccontextmanager
async def feeding(sandbox: Sandbox, *, seed: int) -> AsyncIterator[bool]:
    """Feed `PIPE` in *sandbox* and remove it at the end; False where the box has no Python for that."""
    try:
        started = await sandbox.run(
            ["/usr/bin/python3", "-c", _FEEDER, PIPE, str(seed)], cwd="/", env=ENVIRONMENT, timeout_s=_TIMEOUT_S
        )
    except Exception as error:
        if not is_refusal(error):
            raise
        yield False
        return
    if started.status != 0:
        raise RuntimeError(f"{PIPE} cannot be made: {started.stderr.decode('utf-8', 'replace')[-200:]}")
    yield True
    stop = ["/bin/sh", "-c", f'kill "$0"; rm -f {PIPE} {PIPE}.next', started.stdout.decode().strip()]
    await sandbox.run(stop, cwd="/", env=ENVIRONMENT, timeout_s=_TIMEOUT_S)
