"""Load from wrk, a load generator in C that costs less CPU than any measured server.

All calls of a session are the same. The sessions take turns, and there are several for each caller, so that two callers
hardly ever call the same session at the same moment.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

from bench.load.episodes import TOKEN_LENGTH, Episode, WrongAnswer
from bench.load.http1 import Address

SESSIONS_PER_CALLER = 4
GRACE_S = 30.0
"""Seconds that wrk may take beyond the duration of its round."""
_SCRIPT = """\
local requests = {{
{requests}
}}
local place = 0
request = function()
  place = place % #requests + 1
  return requests[place]
end
"""
_RATE = re.compile(r"^Requests/sec:\s+([\d.]+)$", re.MULTILINE)
_ERRORS = re.compile(r"^\s*(?:Socket errors:|Non-2xx or 3xx responses:).*$", re.MULTILINE)


async def rate(
    program: Path, address: Address, episodes: Sequence[Episode], *, callers: int, duration_s: int, script: Path
) -> float:
    """Run one round of wrk with one thread. Return calls a second.

    Args:
        callers: Number of connections. Each has one request in flight.
        script: File that this function writes: wrk's script with the requests.

    Raises:
        WrongAnswer: wrk reports a failed call or no rate, or does not end in time.
    """
    requests = [json.dumps(episode.call_bytes("0" * TOKEN_LENGTH).decode("ascii")) for episode in episodes]
    await asyncio.to_thread(script.write_text, _SCRIPT.format(requests=",\n".join(requests)))
    process = await asyncio.create_subprocess_exec(
        *(str(program), "-t1", f"-c{callers}", f"-d{duration_s}s", "-s", str(script)),
        f"http://127.0.0.1:{address.port}/",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(duration_s + GRACE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise WrongAnswer(f"wrk did not end within {GRACE_S:.0f} s after its round of {duration_s} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return read_rate(output.decode(errors="replace"))


def read_rate(output: str) -> float:
    """Return the calls a second in wrk's *output*.

    Raises:
        WrongAnswer: wrk reports failed calls or no rate.
    """
    if errors := _ERRORS.search(output):
        raise WrongAnswer(f"wrk reports: {errors[0].strip()}")
    if found := _RATE.search(output):
        return float(found[1])
    raise WrongAnswer(f"wrk reports no rate: {output[-500:]}")
