"""Prepared states: made once, forked often, never changed, dropped in time."""

import asyncio
import os
from pathlib import Path

import pytest
from envserver.sandbox import Box, Sandbox, SandboxError, Sandboxes
from envserver.sandbox.bootstrap import Dates

from tests.envserver.eventually import eventually
from tests.sandbox.conftest import LIMITS, MIB
from tests.sandbox.inside import bash, said


async def prepare(sandbox: Sandbox) -> None:
    await said(
        sandbox, "echo prepared > /root/state; rm /usr/bin/sed; mkdir /srv/made; chmod 750 /srv/made; useradd jack"
    )


@pytest.mark.parametrize(
    ("since_ns", "is_new"),
    [
        pytest.param(0, True, id="at the start"),
        pytest.param(1_500_000_000, True, id="later"),
        pytest.param(-10_000_000, True, id="at the last tick of the kernel's clock"),
        pytest.param(-700_000_000, True, id="in the second of the start, by a program that cuts the fraction off"),
        pytest.param(-100_000_001, False, id="shortly before, with a fraction"),
        pytest.param(-1_700_000_000, False, id="an earlier whole second"),
    ],
)
def test_a_file_time_of_the_build_becomes_the_moment_and_an_earlier_one_stays(since_ns: int, is_new: bool) -> None:
    began = 1_795_918_327_700_000_000
    dates = Dates(moment=5, began=began)

    assert dates.of(began + since_ns) == (5 if is_new else began + since_ns)


async def test_a_layer_that_was_lost_with_its_spawner_is_named_and_can_be_built_again(sandboxes: Sandboxes) -> None:
    lost = await sandboxes.layer("key", prepare)
    sandbox = await sandboxes.open(lost)
    assert sandboxes._spawner is not None
    sandboxes._spawner.process.kill()

    async def is_lost() -> bool:
        return sandbox.is_closed

    await eventually(is_lost)
    with pytest.raises(SandboxError, match="'key' was lost") as raised:
        await sandboxes.open(lost)
    again = await sandboxes.open(await sandboxes.layer("key", prepare))

    assert raised.value.code == "ended"
    assert await said(again, "cat /root/state") == "prepared\n"


async def test_forks_have_the_same_content_and_are_isolated_afterwards(sandboxes: Sandboxes) -> None:
    layer = await sandboxes.layer("key", prepare)
    first, second = await sandboxes.open(layer), await sandboxes.open(layer=layer)

    await said(first, "echo changed > /root/state; rm -r /srv/made; mkdir /srv/made; touch /srv/made/own")

    look = "cat /root/state; test -e /usr/bin/sed || echo gone; stat -c %a /srv/made; ls /srv/made; id -u jack"
    assert await said(second, look) == "prepared\ngone\n750\n1000\n"
    assert await said(await sandboxes.open(layer), look) == await said(second, look)


async def test_concurrent_callers_build_a_layer_once(sandboxes: Sandboxes) -> None:
    built = []

    async def build(sandbox: Sandbox) -> None:
        built.append(sandbox)
        await prepare(sandbox)

    layers = await asyncio.gather(*(sandboxes.layer("key", build) for _ in range(20)))

    assert len(built) == 1
    assert len(set(layers)) == 1
    assert built[0].is_closed


async def test_a_failed_build_leaves_nothing_and_can_be_tried_again(sandboxes: Sandboxes, work: Path) -> None:
    tries = []

    async def build(sandbox: Sandbox) -> None:
        tries.append(sandbox)
        if len(tries) == 1:
            raise ValueError("the first one fails")
        await prepare(sandbox)

    first = await asyncio.gather(*(sandboxes.layer("key", build) for _ in range(3)), return_exceptions=True)
    layer = await sandboxes.layer("key", build)

    assert [str(error) for error in first] == ["the first one fails"] * 3
    assert (len(tries), tries[0].is_closed) == (2, True)
    assert await said(await sandboxes.open(layer), "cat /root/state") == "prepared\n"


async def test_a_build_that_kills_its_sandbox_fails(sandboxes: Sandboxes) -> None:
    async def build(sandbox: Sandbox) -> None:
        with pytest.raises(SandboxError):
            await bash(sandbox, "b() { b | b & }; b; sleep 60", timeout_s=60)

    with pytest.raises(SandboxError, match="pids"):
        await sandboxes.layer("key", build)


def rooms(sandboxes: Sandboxes) -> set[str]:
    """List the folders of the spawner's work folder, as its own mount namespace shows them."""
    assert sandboxes._spawner is not None
    return set(os.listdir(f"/proc/{sandboxes._spawner.process.pid}/cwd")) - {"0"}


async def has_rooms(sandboxes: Sandboxes, count: int) -> bool:
    return len(rooms(sandboxes)) == count


async def test_the_cache_is_bounded_and_layers_in_use_stay(box: Box, work: Path) -> None:
    async with Sandboxes(box, work, LIMITS, most_layers=2) as sandboxes:
        oldest = await sandboxes.open(await sandboxes.layer("0", prepare))
        for key in range(1, 6):
            await sandboxes.layer(str(key), prepare)
        await eventually(lambda: has_rooms(sandboxes, 4))  # two in the cache, the oldest, and the sandbox on it

        assert await said(oldest, "cat /root/state; ls /srv") == "prepared\nmade\n"
        await oldest.close()
        await eventually(lambda: has_rooms(sandboxes, 2))


async def test_the_bytes_of_all_layers_are_bounded(box: Box, work: Path) -> None:
    async def write(sandbox: Sandbox) -> None:
        await said(sandbox, "head -c 5M /dev/zero > /root/big")

    async with Sandboxes(box, work, LIMITS, most_layer_bytes=16 * MIB) as sandboxes:
        used = await sandboxes.open(await sandboxes.layer("0", write))
        for key in range(1, 6):
            await sandboxes.layer(str(key), write)
        await eventually(lambda: has_rooms(sandboxes, 4))  # two in the cache, the oldest, and the sandbox on it
        await used.close()
        await sandboxes.layer("6", write)

        await eventually(lambda: has_rooms(sandboxes, 3))


async def test_a_build_is_cancelled_with_the_last_of_its_callers(sandboxes: Sandboxes) -> None:
    begun = asyncio.Event()
    built: list[Sandbox] = []

    async def build(sandbox: Sandbox) -> None:
        built.append(sandbox)
        begun.set()
        await sandbox.run(["sleep", "300"], timeout_s=300)

    callers = [asyncio.create_task(sandboxes.layer("key", build)) for _ in range(2)]
    await begun.wait()
    callers[0].cancel()
    await asyncio.wait({callers[0]})
    assert repr(built[0]) == "<Sandbox 1 open>"

    callers[1].cancel()
    await asyncio.wait({callers[1]})

    assert built[0].is_closed
    assert rooms(sandboxes) == set()
    assert await sandboxes.layer("key", prepare)


async def test_a_layer_is_dropped_if_the_request_to_keep_it_fails(
    sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = sandboxes._tell_spawner

    async def unheard(message: dict[str, object]) -> None:
        await tell(message)
        if message["op"] == "keep":
            raise SandboxError("the spawner does not answer", code="ended")

    monkeypatch.setattr(sandboxes, "_tell_spawner", unheard)
    with pytest.raises(SandboxError):
        await sandboxes.layer("key", prepare)

    await eventually(lambda: has_rooms(sandboxes, 0))
