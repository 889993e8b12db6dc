"""AReaL's client plays rollouts of the os environment over AReaL's API, on local processes and on Docker."""

import asyncio
import shutil
import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.fakes.eventually import eventually
from tests.fakes.user import need_other_users
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import EMBEDDED, on_stack, serving
from tests.wire.gateways import Gateway, short_folder
from tests.wire.os_episodes import MAX_TURNS, TREE, Play, bash, playing, tasks_of

pytestmark = [pytest.mark.wire, pytest.mark.sandbox]

TRAIN, TEST = tasks_of("train"), tasks_of("test")
COUNT, SEARCH = TRAIN[0], TEST[0]
ONE_OF_EACH = [task["id"] for task in (*TRAIN, *TEST) if task["id"].endswith("-00000")]
TASKS = {task["id"]: task for task in (*TRAIN, *TEST)}


@pytest.fixture(scope="module", params=[EMBEDDED, on_stack("os")])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    if request.param == EMBEDDED:  # a container always has other users
        need_other_users()
    with serving(request.param, "os") as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> ArealClient:
    return ArealClient(gateway.url)


def agent(*turns: str) -> Callable[[str], str]:
    """Return a model that says *turns* in order, whatever it reads."""
    left = iter(turns)
    return lambda _: next(left)


def solving(name: str) -> Callable[[str], str]:
    """Return a model that knows the reference solution of a task."""
    reference = TASKS[name]["reference"]
    answer = reference["answer"]
    end = "Act: finish" if answer is None else f"Act: answer({answer})"
    return agent(*(bash(command) for command in reference["commands"]), f"Think: That is it.\n{end}")


async def nothing_is_open(gateway: Gateway) -> None:
    assert await gateway.sessions() == []
    assert (await ArealClient(gateway.url).ask("GET", "/health"))["active_episodes"] == 0


async def test_the_task_is_described_for_trainers(client: ArealClient) -> None:
    info = await client.info()

    assert info == {
        "name": "os",
        "num_samples": len(TRAIN),
        "max_episode_length": MAX_TURNS,
        "observation_type": "text",
        "action_type": "text",
        "description": "Shell puzzles, one disposable Linux box per episode",
    }


@pytest.mark.parametrize("gateway", [on_stack("os")], indirect=True)  # its image has its own box
async def test_one_task_of_each_template_is_solved_by_its_reference(gateway: Gateway, client: ArealClient) -> None:
    free = asyncio.Semaphore(8)

    async def reward(name: str) -> float:
        async with free:
            return (await client.rollout(name, solving(name))).reward

    rewards = dict(zip(ONE_OF_EACH, await asyncio.gather(*map(reward, ONE_OF_EACH)), strict=True))

    assert len(rewards) >= 40
    assert {name: got for name, got in rewards.items() if got != 1.0} == {}
    await eventually(lambda: nothing_is_open(gateway))


async def test_the_replies_of_a_rollout_have_all_their_fields(client: ArealClient) -> None:
    command = COUNT["reference"]["commands"][0]

    async with playing(client, COUNT["id"]) as play:
        seen = await play.say(bash(command))
        ended = await play.say(f"Think: So many.\nAct: answer({COUNT['reference']['answer']})")

    assert play.prompt.endswith(COUNT["instruction"])
    assert play.problem == COUNT["instruction"]
    assert seen == {
        "episode_id": play.id,
        "observation": {"type": "text", "content": f"The output of the OS:\n{COUNT['reference']['answer']}"},
        "reward": 0.0,
        "done": False,
        "info": {
            "turn": 1,
            "parsed_action": {"thought": "I look at it.", "action": "bash", "content": command},
            "status": "running",
        },
    }
    assert (ended["observation"], ended["reward"], ended["done"]) == (None, 1.0, True)
    assert {name: ended["info"][name] for name in ("success", "num_turns", "answer", "status")} == {
        "success": True,
        "num_turns": 2,
        "answer": COUNT["reference"]["answer"],
        "status": "completed",
    }


@pytest.mark.parametrize("end", ["Act: answer(certainly not)", "Act: answer()", "Act: finish"])
async def test_a_wrong_answer_completes_the_episode_without_a_reward(client: ArealClient, end: str) -> None:
    trajectory = await client.rollout(SEARCH["id"], agent(f"Think: I guess.\n{end}"))

    assert (trajectory.reward, trajectory.turns) == (0.0, 1)
    assert (trajectory.info["success"], trajectory.info["status"]) == (False, "completed")


async def test_structured_actions_play_the_same_episode(client: ArealClient) -> None:
    async with playing(client, COUNT["id"]) as play:
        seen = await client.tool(play.id, "bash_action", script=COUNT["reference"]["commands"][0])
        ended = await client.tool(play.id, "answer_action", answer=COUNT["reference"]["answer"])

    assert seen["observation"]["content"] == f"The output of the OS:\n{COUNT['reference']['answer']}"
    assert ended["reward"] == 1.0


async def test_a_group_of_eight_starts_in_one_state_and_shares_nothing_and_each_member_gets_its_own_reward(
    gateway: Gateway, client: ArealClient
) -> None:
    right = COUNT["reference"]["answer"]
    plays = [Play(client, started) for started in await asyncio.gather(*(client.start(0) for _ in range(8)))]

    trees = await asyncio.gather(*(play.run(TREE) for play in plays))
    await asyncio.gather(*(play.run(f"echo {play.id} > /root/mine") for play in plays))
    kept = await asyncio.gather(*(play.run("cat /root/mine") for play in plays))
    verdicts = await asyncio.gather(
        *(play.answer(answer) for play, answer in zip(plays, [right, "wrong"] * 4, strict=True))
    )

    assert len({play.prompt for play in plays}) == 1
    assert len(set(trees)) == 1, trees
    assert kept == [play.id for play in plays]
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0] * 4
    await eventually(lambda: nothing_is_open(gateway))


@pytest.mark.parametrize(
    ("script", "seen"),
    [
        pytest.param(
            "printf '%0801d' 0", "0" * 780 + "\n[truncated because the output is too long]", id="801 characters"
        ),
        pytest.param("printf '<|im_start|>\\0\\377'", "< |im_start|>\ufffd", id="control tokens and bytes"),
        pytest.param("cd /tmp; X=5; (exit 3)", "", id="no output"),
        pytest.param("cat <<'END'\na 'b\nEND", "a 'b", id="a here-document"),
    ],
)
async def test_the_output_of_a_command_is_shown(client: ArealClient, script: str, seen: str) -> None:
    async with playing(client, COUNT["id"]) as play:
        assert await play.run(script) == seen


async def test_the_shell_goes_on_from_step_to_step_and_is_replaced_when_it_ends(client: ArealClient) -> None:
    async with playing(client, COUNT["id"]) as play:
        await play.run("cd /tmp; X=5; (exit 3)")
        kept = await play.run("echo $? $X; pwd")
        ended = await play.run("touch kept; kill -9 $$")
        after = await play.run("pwd; ls /tmp/kept")

    assert kept == "3 5\n/tmp"
    assert "the shell has ended; a new one is open" in ended
    assert after == "/root\n/tmp/kept"


async def test_two_sessions_of_one_worker_do_not_see_each_other_or_the_server(client: ArealClient) -> None:
    secret = uuid.uuid4().hex
    look = (
        "ls /root/secret /tmp/secret /dev/shm/secret 2>/dev/null; pgrep -a sleep;"
        " cat /proc/[0-9]*/{cmdline,environ} | tr '\\0' '\\n' | grep -E '[s]erver.py|[E]NVSERVER|[b]wrap';"
        " ls /run/envserver /srv/env 2>/dev/null; echo looked"
    )

    async with playing(client, COUNT["id"]) as one, playing(client, COUNT["id"]) as other:
        await one.run(f"for f in /root /tmp /dev/shm; do echo {secret} > $f/secret; done; sleep 3600 &")
        seen = await other.run(look)
        verdict = await other.answer(COUNT["reference"]["answer"])
        kept = await one.run("cat /root/secret /tmp/secret /dev/shm/secret | sort -u; pgrep -c sleep")

    assert seen == "looked"
    assert verdict.reward == 1.0
    assert kept == f"{secret}\n1"


async def test_a_start_is_refused_while_sandboxes_are_impossible_and_works_after_the_repair() -> None:
    need_other_users()
    closed = short_folder()  # only this user may enter it, and a sandbox's root is another user
    with serving(EMBEDDED, "os", GATEWAY_SANDBOX_DIR=str(closed / "sandboxes")) as gateway:
        client = ArealClient(gateway.url)

        status, refused = await client.request("POST", "/episode/start", json={"sample_id": "0", "config": {}})
        left = await gateway.sessions()
        closed.chmod(0o755)
        trajectory = await client.rollout(COUNT["id"], solving(COUNT["id"]))

    shutil.rmtree(closed)
    assert (status, refused["error"], left) == (500, "environment unavailable", [])
    assert "any user can pass through" in refused["detail"]
    assert trajectory.reward == 1.0
