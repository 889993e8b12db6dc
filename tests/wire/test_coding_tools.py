"""The coding environment's tools through the gateway, on local processes and on Docker, and their replies."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.envs.plain_sandbox import need_bubblewrap
from tests.fakes.user import need_other_users
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import EMBEDDED, edited, on_stack, serving
from tests.wire.coding_attempts import HONEST, ORCHARD, QUARTER, WRONG
from tests.wire.coding_play import SPECS, Player, all_of, problem_of, prompt, ran, rolled_out, submitted
from tests.wire.gateways import Gateway
from tests.wire.openenv.frames import socket
from tests.wire.sdks import OPENREWARD, Episode, text

pytestmark = [pytest.mark.wire]

ONE_TREE = {
    **ORCHARD,
    "evaluation": {**ORCHARD["evaluation"], "test_cases": ORCHARD["evaluation"]["test_cases"][:2]},
}
"""A task with one hidden case, for sessions whose submission only shows that they still work."""
HASTY = {**ORCHARD, "config": {"execute_timeout_s": 1}}
SHOWN_BYTES = 64 * 1024
ON_EMBEDDED = pytest.param(EMBEDDED, marks=pytest.mark.sandbox)
embedded = pytest.mark.parametrize("gateway", [ON_EMBEDDED], indirect=True)
"""For decisions that need no container: the environment makes them alone, or test_coding.py checks them on Docker."""


@pytest.fixture(scope="module", params=[ON_EMBEDDED, on_stack("coding")])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    if request.param == EMBEDDED:
        need_bubblewrap()
        need_other_users()
    with serving(request.param, "coding") as gateway:
        yield gateway


@pytest.fixture
async def player(gateway: Gateway) -> AsyncIterator[Player]:
    async with OPENREWARD.connect(gateway.url, None) as client:
        yield Player(OPENREWARD, client)


@pytest.fixture
async def session(player: Player) -> AsyncIterator[Episode]:
    async with player.session(ORCHARD) as session:
        yield session


async def used(session: Episode, tool: str, **arguments: Any) -> str:
    """Call *tool* and return the text that the agent gets."""
    return text(await session.call_tool(tool, arguments))


@embedded
async def test_right_and_wrong_solutions_get_their_rewards_over_ors_and_areal(gateway: Gateway, player: Player) -> None:
    specs = [next(spec for spec in SPECS["train"] if kind in spec["tags"]) for kind in ("function", "program")]

    right = await all_of(player.by_spec(spec, problem_of(spec).reference) for spec in specs)
    wrong = await all_of(
        player.by_index("train", SPECS["train"].index(spec), problem_of(spec).wrong_solution) for spec in specs
    )
    areal = await rolled_out(ArealClient(gateway.url), specs[0]["id"], problem_of(specs[0]).reference)

    assert [it.reward for it in right] == [1.0] * len(specs)
    assert [it.reward for it in wrong if it.reward is None or not it.reward < 1.0] == []
    assert areal == 1.0


async def test_the_prompt_states_the_task_and_shows_the_public_example(session: Episode) -> None:
    said = await prompt(session)

    assert ORCHARD["instruction"] in said
    assert "harvest('apple') == 5" in said
    assert "/root/task/solution.py" in said
    assert "`submit`" in said


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        pytest.param("pwd; id -un", "/root/task\nroot", id="as root in the workspace"),
        pytest.param("echo out; echo err >&2; exit 3", "out\nerr\n[exit status 3]", id="both streams and the status"),
        pytest.param("true", "[no output]", id="nothing"),
        pytest.param("kill -9 $$", "[exit status -9]", id="a signal"),
        pytest.param("no-such", "no-such: command not found\n[exit status 127]", id="an unknown command"),
        pytest.param("cat", "[no output]", id="no input to wait for"),
        pytest.param("printf '\\xff\\x00a'", "\ufffd\0a", id="bytes that are not text"),
        pytest.param("echo $0 $HOME $TERM", "bash /root dumb", id="its variables"),
    ],
)
async def test_a_commands_output_and_status_are_shown(session: Episode, command: str, shown: str) -> None:
    assert (await ran(session, command)).endswith(shown)


async def test_a_command_that_takes_too_long_is_stopped_and_the_next_one_runs(player: Player) -> None:
    async with player.session(HASTY) as session:
        stopped = await ran(session, "echo begun; tail -f /dev/null; echo never")
        then = await ran(session, "while pgrep -x tail >/dev/null; do sleep 0.02; done; echo alive")

    assert stopped == "begun\n[stopped after 1 s]"
    assert then == "alive"


async def test_long_output_is_cut_with_a_notice(session: Episode) -> None:
    shown = await ran(session, "yes | head -c 300000; yes e | head -c 300000 >&2; false")

    assert shown.endswith("\n[the output was cut]\n[exit status 1]")
    assert 2 * SHOWN_BYTES - 10 < len(shown) < 2 * SHOWN_BYTES + 100


async def test_a_background_job_outlives_its_command(session: Episode) -> None:
    process = await ran(session, "sleep 300 & echo $!")

    assert await ran(session, f"kill -0 {process} && echo alive; kill {process}") == "alive"


async def test_background_processes_that_have_ended_do_not_count_against_the_limit(session: Episode) -> None:
    # As a build or a test run leaves them: more processes than a sandbox may have concurrently.
    told = await ran(
        session,
        "for i in $(seq 200); do (true &); done; while ps -e -o stat= | grep -q Z; do sleep 0.05; done; echo alive",
    )

    assert told == "alive"  # the command was not stopped at its time limit


@pytest.mark.parametrize(
    ("path", "place"),
    [
        pytest.param("a.txt", "/root/task/a.txt", id="relative"),
        pytest.param("deep/er/a.txt", "/root/task/deep/er/a.txt", id="into directories that are not there"),
        pytest.param("/srv/new/a.txt", "/srv/new/a.txt", id="absolute"),
        pytest.param("../a.txt", "/root/a.txt", id="above the workspace"),
        pytest.param("-rf 'a\" $b\n.txt", "/root/task/-rf 'a\" $b\n.txt", id="a name that shells would misread"),
    ],
)
async def test_a_file_is_read_back_exactly_as_it_was_written(session: Episode, path: str, place: str) -> None:
    content = "  ä\t€ 🌍\r\n\n" + "x" * 1000 + "\n\n"

    told = await used(session, "write_file", path=path, content=content)
    there = await used(session, "read_file", path=place)

    assert told.startswith(f"Wrote {len(content.encode())} bytes to ")
    assert there == content


async def test_links_inside_the_sandbox_are_followed(session: Episode) -> None:
    await ran(session, "mkdir /data; ln -s /data/real.txt link.txt; ln -s /data folder")
    await used(session, "write_file", path="link.txt", content="one")
    await used(session, "write_file", path="folder/other.txt", content="two")

    assert await ran(session, "cat /data/real.txt /data/other.txt; readlink link.txt") == "onetwo/data/real.txt"
    assert await used(session, "read_file", path="folder/real.txt") == "one"


async def test_large_files_are_cut_and_binary_files_are_shown_with_replacement_characters(session: Episode) -> None:
    await ran(session, "yes | head -c 100000 > large; printf 'a\\xff\\0b' > binary; touch empty")

    large = await used(session, "read_file", path="large")

    assert large.startswith("y\ny\n")
    assert large.endswith(f"\n[cut after {SHOWN_BYTES} bytes]")
    assert await used(session, "read_file", path="binary") == "a\ufffd\0b"
    assert await used(session, "read_file", path="empty") == ""


@embedded
@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        pytest.param("execute", {"command": "echo a\0b"}, "The command was not run: ", id="a command with a zero byte"),
        pytest.param(
            "execute", {"command": "echo \ud800"}, "The command was not run: ", id="a command that is not text"
        ),
        pytest.param("execute", {"command": ": " + "x" * 140_000}, "Argument list too long", id="too long a command"),
        pytest.param("read_file", {"path": "x" * 5000}, " cannot be read: ", id="too long a path"),
        pytest.param(
            "write_file", {"path": "\ud800", "content": ""}, " was not written: ", id="a path that is not text"
        ),
        pytest.param("read_file", {"path": "no"}, "/root/task/no cannot be read: ", id="no such file"),
        pytest.param("read_file", {"path": "/etc"}, "/etc cannot be read: ", id="a directory to read"),
        pytest.param("read_file", {"path": "/dev/zero"}, "/dev/zero cannot be read: ", id="a device to read"),
        pytest.param("read_file", {"path": "a\0"}, "Not read: the path has a zero byte.", id="a zero byte"),
        pytest.param(
            "write_file", {"path": "/etc", "content": ""}, "/etc was not written: ", id="a directory to write"
        ),
        pytest.param(
            "write_file", {"path": "/proc/x", "content": ""}, "was not written: ", id="a filesystem without new files"
        ),
        pytest.param("write_file", {"path": "/etc/passwd/x", "content": ""}, "was not written: ", id="below a file"),
        pytest.param(
            "write_file",
            {"path": "x", "content": "é" * 524_289},
            "Not written: a file may have 1048576 bytes here.",
            id="too large",
            # The client itself warns about such a request.
            marks=pytest.mark.filterwarnings("ignore:.*Sending a large body:ResourceWarning"),
        ),
        pytest.param("submit", {}, "There is no solution: /root/task/solution.py cannot be read", id="no solution"),
        pytest.param("submit", {"code": "x" * 262_145}, "Not submitted: a solution may have 262144", id="too long"),
        pytest.param(
            "run_tests", {}, "There is no solution: /root/task/solution.py cannot be read", id="no solution to test"
        ),
    ],
)
async def test_a_failed_tool_call_is_reported_with_its_reason_and_the_episode_goes_on(
    player: Player, tool: str, arguments: dict[str, Any], told: str
) -> None:
    async with player.session(ONE_TREE) as session:
        output = await session.call_tool(tool, arguments)
        after = await submitted(session, HONEST)

    assert told in text(output)
    assert (output.reward, output.finished) == (None, False)
    assert (after.reward, after.finished) == (1.0, True)


@embedded
@pytest.mark.parametrize(
    ("tool", "arguments", "told"),
    [
        pytest.param("excute", {"command": "ls"}, "'excute' is not a valid tool", id="an unknown tool"),
        pytest.param("execute", {}, "command", id="a missing argument"),
        pytest.param("execute", {"command": True}, "command", id="a truth value for a text"),
        pytest.param("execute", {"command": ["ls"]}, "command", id="a list for a text"),
        pytest.param("execute", {"command": None}, "command", id="nothing for a text"),
        pytest.param("write_file", {"path": "x"}, "content", id="a file without content"),
        pytest.param("write_file", {"path": "x", "content": {"a": 1}}, "content", id="an object for content"),
        pytest.param("submit", {"code": [3]}, "code", id="a list for code"),
    ],
)
async def test_a_call_with_wrong_arguments_is_refused_by_argument_name_and_nothing_runs(
    session: Episode, tool: str, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(OPENREWARD.refused) as refused:
        await session.call_tool(tool, arguments)

    assert told in str(refused.value)
    assert await ran(session, "ls -A | wc -l") == "0"


async def test_public_tests_report_the_failure_and_earn_no_reward(session: Episode) -> None:
    told = []
    for source in ("def harvest(tree): return 7", "def harvest(tree): return tree + 1", "def yield_(: 1", WRONG):
        await used(session, "write_file", path="solution.py", content=source)
        output = await session.call_tool("run_tests", {})
        assert (output.reward, output.finished) == (None, False)
        told.append(text(output))

    wrong, raised, unread, right = told
    assert wrong.startswith("Passed 0 of 1 public tests.")
    assert "your answer: 7" in wrong
    assert "expected: 5" in wrong
    assert "TypeError" in raised
    assert "line 1" in raised
    assert "SyntaxError" in unread
    assert right.startswith("Passed 1 of 1 public tests.")
    assert (await submitted(session)).reward == 0.0


HOGS = {
    "memory": "for i in 1 2 3 4; do python3 -c 'b = b\"x\" * (200 << 20); import time; time.sleep(60)' & done; wait",
    "pids": "while :; do sleep 60 & done 2>/dev/null",
}


@pytest.mark.parametrize("reason", HOGS)
async def test_a_sandbox_that_exceeds_its_limits_is_replaced_and_the_agent_is_notified(
    session: Episode, reason: str
) -> None:
    await used(session, "write_file", path="solution.py", content=HONEST)

    told = await ran(session, HOGS[reason])
    left = await ran(session, "ls -A; pgrep -c sleep")
    await used(session, "write_file", path="solution.py", content=QUARTER)
    result = await submitted(session)

    assert told.startswith(f"Your sandbox was ended by its watchdog ({reason}). A new one is open")
    assert "is gone" in told
    assert left == "0\n[exit status 1]"
    assert result.reward == 0.25


async def test_a_full_disk_is_reported_and_can_be_emptied(session: Episode) -> None:
    full = await ran(session, "head -c 400000000 /dev/zero > /root/full")
    refused = await used(session, "write_file", path="solution.py", content=HONEST * 100)
    await ran(session, "rm /root/full")
    await used(session, "write_file", path="solution.py", content=HONEST)

    assert "No space left on device" in full
    assert "was not written: " in refused
    assert "space" in refused.lower()
    assert (await submitted(session)).reward == 1.0


@pytest.mark.sandbox
async def test_a_command_that_outlasts_its_step_is_stopped_and_the_episode_goes_on(tmp_path: Path) -> None:
    need_bubblewrap()
    need_other_users()
    catalog = edited(tmp_path, "coding", _with_short_steps)
    with serving(EMBEDDED, "coding", GATEWAY_CATALOG_DIR=str(catalog)) as gateway:
        texts = await asyncio.gather(_sleeps_over_openenv(gateway), _sleeps_over_areal(gateway))

    assert [("[stopped after " in first, "alive" in second) for first, second in texts] == [(True, True)] * 2


def _with_short_steps(text: str) -> str:
    """Return an ``environment.toml`` whose steps may take 6 s. Commands may take 60 s."""
    short, steps = re.subn(r"(?m)^step_s = .*$", "step_s = 6", text)
    short, judges = re.subn(r"(?m)^judge_s = .*$", "judge_s = 5", short)
    assert (steps, judges) == (2, 1)
    return short


async def _sleeps_over_openenv(gateway: Gateway) -> tuple[str, str]:
    async with socket(f"{gateway.url}/openenv/coding") as ws:
        await ws.reset(split="train", index=0)
        call = {"type": "call_tool", "tool_name": "execute"}
        replies = [await ws.step(**call, arguments={"command": command}) for command in ("sleep 100", "echo alive")]
    return str(replies[0]), str(replies[1])


async def _sleeps_over_areal(gateway: Gateway) -> tuple[str, str]:
    client = ArealClient(f"{gateway.url}/areal/coding")
    episode = (await client.start(0))["episode_id"]
    replies = [await client.tool(episode, "execute", command=command) for command in ("sleep 100", "echo alive")]
    await client.cancel(episode)
    return str(replies[0]), str(replies[1])
