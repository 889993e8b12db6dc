"""Random numbers of init scripts: reads of the kernel's random devices are replaced by numbers from the session's seed.

The members of a group may be in two workers, and must start alike. Therefore a script reads a named pipe instead of the
device. A program in the box feeds it: each reader gets its own stream, made from the seed and the reader's number.
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

# A reader waits in its open until the pipe has a writer, and then in its read until bytes are written. Meanwhile
# another pipe takes the name, so that two successive readers never share a stream.
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
    """Return True if a script draws from the kernel, by a device or with `shuf`."""
    return bool(_DEVICE.search(code) or _SHUF.search(code))


def with_pipe(code: str, *, language: str) -> str:
    """Return a script that draws from `PIPE` instead; bash's `dd` then must wait for whole blocks."""
    if language == "bash":
        code = _DD.sub(f"if={PIPE} iflag=fullblock", code)
        code = _SHUF.sub(rf"\1\2shuf --random-source={PIPE}", code)
    return _DEVICE.sub(PIPE, code)


@contextlib.asynccontextmanager
async def feeding(sandbox: Sandbox, *, seed: int) -> AsyncIterator[bool]:
    """Feed `PIPE` in *sandbox* and remove it at the end; yield False if the box has no Python for that."""
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
