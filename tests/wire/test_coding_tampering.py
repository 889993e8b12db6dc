"""Tampering with the coding environment through the whole gateway, as root in a real sandbox of a real container.

Whatever an agent tries, a submission earns only what its solution solves. No hidden test is shown, and the next session
on the same task is judged normally.
"""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.envs.coding_attacks import ATTACKS, OUTPUTS
from tests.envs.coding_attacks import HONEST as HONEST_NAMES
from tests.envs.test_coding_tampering import PROGRAMS
from tests.fakes.eventually import eventually
from tests.wire.catalog import STACK, serving
from tests.wire.coding_attempts import (
    FORGED_TAR,
    HIDDEN,
    HONEST,
    IN_ITS_REPOSITORY,
    IN_ITS_SANDBOX,
    ORCHARD,
    QUARTER,
    SERVER,
    WRONG,
    Attempt,
)
from tests.wire.coding_play import Player, all_of, prompt, ran, submitted
from tests.wire.coding_repository import FROM_FILES, mend
from tests.wire.gateways import Gateway
from tests.wire.sdks import OPENREWARD, ORS, Episode, text

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:coding")]

FEW = 4
"""Concurrent submissions of attacks: with more of them, attacks that compute would keep each other from the CPU."""
SECRET: dict[str, Any] = {
    "instruction": "Write the function `def secret(n: int) -> int`.",
    "evaluation": {
        "function": "secret",
        "time_limit_seconds": 1,
        "test_cases": [{"arguments": [n], "output": output} for n, output in OUTPUTS.items()],
    },
}
ONE_CASE: dict[str, Any] = {
    "instruction": "Write the function `def secret(n: int) -> int`.",
    "evaluation": {
        "function": "secret",
        "time_limit_seconds": 0.1,
        "test_cases": [{"arguments": [1], "output": OUTPUTS[1]}],
    },
}
_KNOWN = f"    return {OUTPUTS[1]}\n"
LATE = {
    "sleeps": "import time\ndef secret(n):\n    time.sleep(100)\n" + _KNOWN,
    "waits in a thread": "import threading\ndef secret(n):\n    threading.Event().wait()\n" + _KNOWN,
    "computes": "def secret(n):\n    for _ in range(10**10): pass\n" + _KNOWN,
    "lets a child answer after its own death": (
        "import os, time\ndef secret(n):\n    if os.fork(): os._exit(0)\n    time.sleep(100)\n" + _KNOWN
    ),
    "stops itself": "import os, signal\ndef secret(n):\n    os.kill(os.getpid(), signal.SIGSTOP)\n" + _KNOWN,
}
"""Right answers that arrive after the time limit."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(STACK, "coding") as gateway:
        yield gateway


@pytest.fixture
async def player(gateway: Gateway) -> AsyncIterator[Player]:
    async with OPENREWARD.connect(gateway.url, None) as client:
        yield Player(OPENREWARD, client)


async def test_no_solution_earns_more_than_it_solves(gateway: Gateway) -> None:
    async with ORS.connect(gateway.url, None) as client:
        player = Player(ORS, client)
        names = list(ATTACKS)
        submissions = (player.by_spec(SECRET, ATTACKS[name].source) for name in names)
        results = await all_of(submissions, at_once=FEW)  # some take all CPU time that they can get

    earned = {name: result.reward for name, result in zip(names, results, strict=True)}
    assert len(names) - len(HONEST_NAMES) >= 40
    assert earned == {name: attack.worth for name, attack in ATTACKS.items()}
    assert all(result.finished for result in results)
    assert [result.text for result in results if HIDDEN.search(result.text)] == []


async def test_no_program_earns_more_than_it_solves(player: Player) -> None:
    task = {
        "instruction": "Print the word for the number that you read.",
        "test_cases": [{"input": "1\n", "output": "one\n"}, {"input": "2\n", "output": "two\n"}],
    }

    results = await all_of(player.by_spec(task, source) for source, _ in PROGRAMS.values())

    earned = {name: result.reward for name, result in zip(PROGRAMS, results, strict=True)}
    assert earned == {name: worth for name, (_, worth) in PROGRAMS.items()}


async def test_an_answer_after_the_time_limit_earns_nothing_and_ends_the_episode(player: Player) -> None:
    results = await all_of(player.by_spec(ONE_CASE, source) for source in LATE.values())
    honest = await player.by_spec(ONE_CASE, "def secret(n):\n" + _KNOWN)

    earned = {name: (it.reward, it.finished) for name, it in zip(LATE, results, strict=True)}
    assert earned == dict.fromkeys(LATE, (0.0, True))
    assert honest.reward == 1.0


async def attempted(player: Player, attempt: Attempt) -> tuple[list[str], float | None]:
    """Make *attempt* and submit. Return the texts that the agent saw, and its reward."""
    async with player.session(attempt.spec or ORCHARD) as session:
        seen = [await prompt(session)]
        seen += [await ran(session, step) for step in attempt.steps]
        assert attempt.sign in seen[-1], seen
        result = await submitted(session, attempt.code)
    assert result.finished, result
    return [*seen, result.text], result.reward


@pytest.mark.parametrize("attempt", IN_ITS_SANDBOX.values(), ids=list(IN_ITS_SANDBOX))
async def test_root_in_its_sandbox_earns_only_what_its_submission_solves(player: Player, attempt: Attempt) -> None:
    seen, reward = await attempted(player, attempt)
    following = await player.by_spec(ORCHARD, HONEST)

    assert reward == attempt.worth
    assert [words for words in seen if HIDDEN.search(words) or SERVER.search(words)] == []
    assert following.reward == 1.0


@pytest.mark.parametrize("attempt", IN_ITS_REPOSITORY.values(), ids=list(IN_ITS_REPOSITORY))
async def test_a_tampered_repository_earns_only_the_tests_that_it_mends(player: Player, attempt: Attempt) -> None:
    seen, reward = await attempted(player, attempt)

    assert reward == attempt.worth
    assert [words for words in seen if HIDDEN.search(words) or SERVER.search(words)] == []


async def test_a_mended_repository_earns_1_after_the_tampering_attempts(player: Player) -> None:
    async with player.session(FROM_FILES) as session:
        await ran(session, mend())
        result = await submitted(session)

    assert result.reward == 1.0


async def test_a_forged_archive_that_leads_out_of_the_workspace_earns_nothing(player: Player) -> None:
    async with player.session(FROM_FILES) as session:
        shown = [await ran(session, step) for step in FORGED_TAR]
        result = await submitted(session)

    assert shown[-1] == "way"
    assert result.reward in (None, 0.0)


SOLUTIONS = {
    "a directory": ("mkdir solution.py", "There is no solution"),
    "a pipe that nobody writes to": ("mkfifo solution.py", "There is no solution"),
    "a link to a device without end": ("ln -s /dev/zero solution.py", "There is no solution"),
    "a link to nothing": ("ln -s /nothing solution.py", "There is no solution"),
    "a link to itself": ("ln -s solution.py solution.py", "There is no solution"),
    "a link to a socket": (
        "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"/root/task/s\")'; ln -s s solution.py",
        "There is no solution",
    ),
    "a sparse file of 100 GB": ("truncate -s 100G solution.py", "Not taken"),
    "a link through a process's descriptors": (
        "sleep 9 < /etc/passwd & ln -s /proc/$!/fd/0 solution.py",
        "There is no",
    ),
    "a link through a process's root": ("ln -s /proc/1/root/etc/passwd solution.py", "There is no solution"),
}


@pytest.mark.parametrize(("command", "answer"), SOLUTIONS.values(), ids=list(SOLUTIONS))
async def test_a_solution_that_is_not_a_regular_file_is_refused_and_the_episode_goes_on(
    player: Player, command: str, answer: str
) -> None:
    async with player.session(ORCHARD) as session:
        await ran(session, command)
        refused = await submitted(session)
        await ran(session, "rm -rf solution.py")
        await session.call_tool("write_file", {"path": "solution.py", "content": HONEST})
        mended = await submitted(session)

    assert answer in refused.text
    assert (refused.reward, refused.finished) == (None, False)
    assert (mended.reward, mended.finished) == (1.0, True)


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/proc/self/environ",
        "/proc/self/cmdline",
        "/proc/self/maps",
        "/proc/self/mountinfo",
        "/proc/1/environ",
    ],
)
async def test_a_solution_that_links_to_a_system_file_reveals_no_secret(player: Player, path: str) -> None:
    async with player.session(ORCHARD) as session:
        await ran(session, f"ln -s {path} solution.py")
        read = text(await session.call_tool("read_file", {"path": "solution.py"}))
        tested = text(await session.call_tool("run_tests"))
        result = await submitted(session)

    assert [words for words in (read, tested, result.text) if HIDDEN.search(words) or SERVER.search(words)] == []
    assert result.reward in (None, 0.0)


async def test_input_to_the_sandboxs_first_process_earns_nothing_and_at_most_ends_the_sandbox(player: Player) -> None:
    async def alive() -> None:
        assert await ran(session, "echo alive") == "alive"

    async with player.session(ORCHARD) as session:
        await ran(session, "timeout 2 bash -c 'for i in 1 2 3; do echo {} > /proc/1/fd/0; done' 2>&1")
        await eventually(alive)
        result = await submitted(session, QUARTER)

    assert result.reward == 0.25


async def test_concurrent_submissions_of_a_session_are_graded_once(player: Player) -> None:
    async def handed_in(session: Episode, code: str) -> float | str:
        try:
            return float((await submitted(session, code)).reward or 0.0)
        except OPENREWARD.refused as refusal:
            return str(refusal)

    async with player.session(ORCHARD) as session:
        results = await all_of(handed_in(session, code) for code in (WRONG, HONEST) * 4)

    refusals = [result for result in results if isinstance(result, str)]
    assert [result for result in results if result not in refusals] in ([0.0], [1.0])
    assert len(refusals) == 7
    assert all("episode has finished" in refusal for refusal in refusals)
