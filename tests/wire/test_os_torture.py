"""Commands that are hard on a shell, over AReaL's steps: after each the shell answers and the task can be solved."""

import asyncio
import re
from collections.abc import Iterator, Mapping

import pytest

from tests.wire.areal_client import ArealClient
from tests.wire.catalog import STACK
from tests.wire.os_catalog import counting, serving_os
from tests.wire.os_episodes import playing
from tests.wire.os_torture import HUNG, TORTURES, Torture

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.slow, pytest.mark.parallel]

AT_ONCE = 8
TASK = "count"


@pytest.fixture(scope="module")
def client() -> Iterator[ArealClient]:
    with serving_os(STACK, tasks=[counting(TASK)]) as gateway:
        yield ArealClient(gateway.url)


async def complaint(client: ArealClient, torture: Torture) -> str:
    """Play one torture, go on in the same shell, and solve the task; what is wrong, nothing if nothing is."""
    async with playing(client, TASK) as play:
        for script, pattern in ((torture.script, torture.seen), (torture.then, torture.seen_then)):
            if script and re.search(pattern, seen := await play.run(script)) is None:
                return f"after {script!r}: {seen!r}"
        # The second time, as the first may still tell that a shell was replaced.
        counted = [await play.run("set +xvef; command ls /srv/data | wc -l") for _ in range(2)]
        if "3" not in counted[-1]:
            return f"the shell does not answer any more: {counted}"
        verdict = await play.answer("3")
    return "" if verdict.reward == 1.0 else f"not solved: {dict(verdict.info)}"


async def complaints(client: ArealClient, tortures: Mapping[str, Torture], *, at_once: int) -> dict[str, str]:
    free = asyncio.Semaphore(at_once)
    found: dict[str, str] = {}

    async def played(name: str, torture: Torture) -> None:
        async with free:
            try:
                said = await complaint(client, torture)
            except Exception as error:  # noqa: BLE001  # the others go on, and the test fails with this one's name
                said = repr(error)
        if said:
            found[name] = said

    await asyncio.gather(*(played(*item) for item in tortures.items()))
    return found


async def test_after_every_torture_the_shell_answers_and_the_task_can_be_solved(client: ArealClient) -> None:
    assert await complaints(client, TORTURES, at_once=AT_ONCE) == {}


async def test_what_waits_for_ever_is_stopped_and_the_task_can_be_solved(client: ArealClient) -> None:
    assert await complaints(client, HUNG, at_once=len(HUNG)) == {}


async def test_what_ends_without_a_parent_is_gone_and_does_not_count_against_the_limit_of_processes(
    client: ArealClient,
) -> None:
    orphans = "for i in $(seq 100); do (true &); done"

    async with playing(client, TASK) as play:
        for _ in range(4):  # more than the 256 processes of a session
            assert await play.run(orphans) == ""
        seen = await play.run("ps -eo stat= | grep -c Z")
        verdict = await play.answer("3")

    assert seen == "0"
    assert verdict.reward == 1.0
