"""Commands that strain a shell, over AReaL's steps: afterwards the shell answers and the task can be solved."""

import re
from collections.abc import Iterator
from functools import partial

import pytest

from tests.envs.complaints import complaints
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import STACK
from tests.wire.os_catalog import counting, serving_os
from tests.wire.os_episodes import playing
from tests.wire.os_torture import HUNG, TORTURES, Torture

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:os")]

AT_ONCE = 8
TASK = "count"


@pytest.fixture(scope="module")
def client() -> Iterator[ArealClient]:
    with serving_os(STACK, tasks=[counting(TASK)]) as gateway:
        yield ArealClient(gateway.url)


async def survived(client: ArealClient, torture: Torture) -> None:
    """Run one torture, continue in the same shell, and solve the task."""
    async with playing(client, TASK) as play:
        for script, pattern in ((torture.script, torture.seen), (torture.then, torture.seen_then)):
            if script:
                seen = await play.run(script)
                assert re.search(pattern, seen) is not None, f"after {script!r}: {seen!r}"
        # The second output counts, because the first may still report that the shell was replaced.
        counted = [await play.run("set +xvef; command ls /srv/data | wc -l") for _ in range(2)]
        assert "3" in counted[-1], f"the shell does not answer any more: {counted}"
        verdict = await play.answer("3")
    assert verdict.reward == 1.0, dict(verdict.info)


async def test_after_every_torture_the_shell_answers_and_the_task_can_be_solved(client: ArealClient) -> None:
    assert await complaints(partial(survived, client), TORTURES, at_once=AT_ONCE) == {}


async def test_a_command_that_waits_forever_is_stopped_and_the_task_can_be_solved(client: ArealClient) -> None:
    assert await complaints(partial(survived, client), HUNG, at_once=len(HUNG)) == {}


async def test_orphaned_processes_that_ended_are_reaped_and_do_not_count_against_the_process_limit(
    client: ArealClient,
) -> None:
    orphans = "for i in $(seq 100); do (true &); done"

    async with playing(client, TASK) as play:
        for _ in range(4):  # more processes than the 256 that a session may have
            assert await play.run(orphans) == ""
        seen = await play.run("ps -eo stat= | grep -c Z")
        verdict = await play.answer("3")

    assert seen == "0"
    assert verdict.reward == 1.0
