"""Coding sessions on Docker and Redis: groups on one task, failing judges, and no processes left behind."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.catalog import PROJECT, STACK, serving
from tests.wire.coding_attempts import HONEST, ORCHARD, QUARTER
from tests.wire.coding_machine import AT_REST, Machine
from tests.wire.coding_play import AT_ONCE, SPECS, Player, all_of, problem_of, ran, rolled_out, submitted
from tests.wire.coding_repository import FROM_FILES, mend
from tests.wire.gateways import Gateway
from tests.wire.raw import RawEpisode, create, episode, new_sid
from tests.wire.sdks import OPENREWARD, SDKS, Episode, Sdk

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:coding")]

LONG: dict[str, Any] = {
    "instruction": "Write the function `def wait() -> int`.",
    "evaluation": {
        "function": "wait",
        "time_limit_seconds": 30,
        "test_cases": [{"arguments": [], "output": 777_310_645_982}],
    },
}
WAITING = "import time\ndef wait():\n    time.sleep(90)\n    return 777310645982\n"
"""A right solution that runs in its judge for longer than the test's other actions."""
AT_ONCE_DONE = "def wait(): return 777310645982\n"
ONE_TREE, TWO_TREES = (
    {
        **ORCHARD,
        "evaluation": {
            **ORCHARD["evaluation"],
            # CPU time: little for the hogs, and more for the others, whose starts cost more of it beside a fork bomb.
            "time_limit_seconds": 1 if trees == 1 else 4,
            "test_cases": ORCHARD["evaluation"]["test_cases"][: 1 + trees],
        },
    }
    for trees in (1, 2)
)
RIGHT = problem_of(SPECS["train"][0]).reference


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The coding environment, and a copy of it named `hasty` whose sessions expire after two seconds."""
    folder = tmp_path_factory.mktemp("catalog")
    described = (PROJECT / "env_images" / "coding" / "environment.toml").read_text()
    hasty = re.sub(r"(?m)^idle_s = .*$", "idle_s = 2", described.replace('name = "coding"', 'name = "hasty"'))
    for name, text in {"coding": described, "hasty": 'upstream_name = "coding"\n' + hasty}.items():
        (folder / "environments" / name).mkdir(parents=True)
        (folder / "environments" / name / "environment.toml").write_text(text)
    (folder / "tasks").symlink_to(PROJECT / "tasks")
    return folder / "environments"


@pytest.fixture(scope="module")
def gateway(catalog: Path) -> Iterator[Gateway]:
    with serving(STACK, "coding", "hasty", GATEWAY_CATALOG_DIR=str(catalog)) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
async def machine(gateway: Gateway) -> AsyncIterator[Machine]:
    """Assert after each test that no session and no process is left."""
    machine = Machine(gateway)
    try:
        yield machine
        await eventually(machine.is_at_rest)
    finally:
        machine.close()


@pytest.fixture
async def player(gateway: Gateway) -> AsyncIterator[Player]:
    async with OPENREWARD.connect(gateway.url, None) as client:
        yield Player(OPENREWARD, client)


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANG_S, trust_env=False) as http:
        yield http


class Group:
    """Sessions on one task that act concurrently."""

    def __init__(self, player: Player, spec: dict[str, Any], *, size: int = AT_ONCE) -> None:
        self._openings = [player.session(spec) for _ in range(size)]
        self.sessions: list[Episode] = []

    async def __aenter__(self) -> "Group":
        self.sessions = await asyncio.gather(*(opening.__aenter__() for opening in self._openings))
        return self

    async def __aexit__(self, *error: Any) -> None:
        await asyncio.gather(*(opening.__aexit__(*error) for opening in self._openings))

    async def all_run(self, command: str) -> list[str]:
        """Run *command* in every session; `{}` in it is replaced by the session's number."""
        return await asyncio.gather(
            *(ran(session, command.replace("{}", str(number))) for number, session in enumerate(self.sessions))
        )


# -- groups ---------------------------------------------------------------------------------------------------------

STATE = (
    "find . -type f -exec md5sum {} + | sort; find / -xdev -newer /proc/1/cmdline -type f 2>/dev/null | sort; "
    "env | sort; hostname; id; ls -ld . | cut -c1-10; ls -A /tmp /root; ps -eo args --no-headers | head -3; "
    "df --output=size / | tail -1"
)


async def test_eight_sessions_of_one_task_start_in_the_same_state_and_share_nothing(player: Player) -> None:
    async with Group(player, FROM_FILES) as group:
        states = await asyncio.gather(*(ran(session, STATE) for session in group.sessions))
        await group.all_run("echo {} | tee mark /tmp/mark /dev/shm/mark /root/mark; sleep 30{} & ")
        marks = await group.all_run("cat mark /tmp/mark /dev/shm/mark /root/mark | sort -u; pgrep -fc 'sleep 30.'")
        moved = mend()
        for session in group.sessions[::2]:
            await ran(session, moved)
        results = await asyncio.gather(*(submitted(session) for session in group.sessions))

    assert len(set(states)) == 1, states
    assert "calc/ops.py" in states[0]
    assert [shown.split()[0] for shown in marks] == [str(number) for number in range(AT_ONCE)]
    assert [it.reward for it in results] == [1.0, 0.0] * (AT_ONCE // 2)


async def test_parallel_submissions_each_get_their_own_verdict(player: Player) -> None:
    worth = {HONEST: 1.0, QUARTER: 0.25}

    async with Group(player, ORCHARD) as group:
        codes = [*worth] * (AT_ONCE // 2)
        results = await asyncio.gather(
            *(submitted(session, code) for session, code in zip(group.sessions, codes, strict=True))
        )

    assert [it.reward for it in results] == [worth[code] for code in codes]


HOGS = {
    # Its processes stay at the limit until they are killed. A shell's fork bomb gives up after some failed forks.
    "a fork bomb": "python3 -c 'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass'",
    "memory": "python3 -c 'held = [b\"x\" * (1 << 20) * 64 for _ in range(99)]'",
    "processors": "for i in 1 2 3 4; do timeout 3 sh -c 'while :; do :; done' & done; wait",
    "a disk": "head -c 400M /dev/zero > /root/full; for i in $(seq 9999); do : > /root/$i || break; done",
}


async def test_resource_hogs_in_sandboxes_change_no_reward_of_other_sessions(player: Player) -> None:
    async with Group(player, ORCHARD) as group:
        hogs = [
            asyncio.create_task(ran(session, command))
            for session, command in zip(group.sessions, HOGS.values(), strict=False)
        ]
        results = await all_of(submitted(session, HONEST) for session in group.sessions[len(HOGS) :])
        told = await asyncio.gather(*hogs)
        after = await all_of(submitted(session, QUARTER) for session in group.sessions[: len(HOGS)])

    assert [it.reward for it in results] == [1.0] * (AT_ONCE - len(HOGS))
    assert [it.reward for it in after] == [0.25] * len(HOGS)
    assert "ended by its watchdog (pids)" in told[0]
    assert "MemoryError" in told[1] or "ended by its watchdog (memory)" in told[1]


async def test_resource_hogs_in_judges_change_no_reward_of_other_sessions(player: Player) -> None:
    hogs = (
        "import os\ndef harvest(tree):\n    while True: os.fork()\n",
        "import os\ndef harvest(tree):\n    any(os.fork() == 0 for _ in range(100))\n    while True: pass\n",
        "def harvest(tree):\n    held = []\n    while True: held.append(bytearray(1 << 24))\n",
        "import os\ndef harvest(tree):\n    while True: os.write(3, b'x' * 65536)\n",
        "def harvest(tree):\n    with open('/tmp/x', 'wb') as file:\n        while True: file.write(bytes(1 << 20))\n",
    )

    async with Group(player, ONE_TREE, size=len(hogs)) as group, Group(player, TWO_TREES, size=len(hogs)) as beside:
        plays = [*zip(group.sessions, hogs, strict=True), *((session, HONEST) for session in beside.sessions)]
        results = await all_of((submitted(*play) for play in plays), at_once=len(plays))

    assert [it.reward for it in results] == [0.0] * len(hogs) + [1.0] * len(hogs), results


# -- judges that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sdk", SDKS.values(), ids=list(SDKS))
async def test_a_killed_judge_is_a_failed_call_without_a_reward(gateway: Gateway, machine: Machine, sdk: Sdk) -> None:
    async with sdk.connect(gateway.url, None) as client, asyncio.timeout(HANG_S):
        player = Player(sdk, client)
        async with player.session(LONG) as session:
            await ran(session, "true")
            before = await machine.tree(session.sid)
            submission = asyncio.create_task(submitted(session, WAITING))
            await machine.kill(await eventually(lambda: machine.judged_in(session.sid, before)))
            with pytest.raises(sdk.failed) as failed:
                await submission
        following = await player.by_spec(LONG, AT_ONCE_DONE)

    assert "sandbox" in str(failed.value)
    assert "reward" not in str(failed.value)
    assert following.reward == 1.0


async def test_a_session_whose_judge_failed_is_refused_and_its_neighbour_goes_on(
    http: httpx.AsyncClient, machine: Machine
) -> None:
    async with episode(http, LONG, environment="coding") as opened, episode(http, LONG, environment="coding") as beside:
        await opened.call("execute", {"command": "true"})
        await beside.call("execute", {"command": "echo mine > kept"})
        before = await machine.tree(opened.sid)
        submission = asyncio.create_task(opened.call("submit", {"code": WAITING}))
        await machine.kill(await eventually(lambda: machine.judged_in(opened.sid, before)))
        failed = await submission
        after = [await opened.ask("submit", {"code": AT_ONCE_DONE}), await opened.get("prompt")]
        kept = (await beside.call("execute", {"command": "cat kept"})).text
        neighbour = (await beside.call("submit", {"code": AT_ONCE_DONE})).result

    assert [event.name for event in failed.events] == ["task_id", "error"]
    assert {answer.status_code for answer in after} <= {410, 500}
    assert [answer.text for answer in after if "reward" in answer.text or "sandbox" not in answer.text] == []
    assert kept == "mine"
    assert neighbour["output"]["reward"] == 1.0


async def test_the_loss_of_an_agents_sandbox_is_an_error_and_not_a_fresh_sandbox(
    http: httpx.AsyncClient, machine: Machine
) -> None:
    async with episode(http, ORCHARD, environment="coding") as opened:
        await opened.call("write_file", {"path": "solution.py", "content": HONEST})
        await machine.kill((await machine.tree(opened.sid)).supervisors[-1])
        failed = await opened.call("submit")

    assert "lost" in failed.error


async def test_a_killed_spawner_fails_the_sessions_of_its_worker_and_later_sessions_are_judged(
    player: Player, http: httpx.AsyncClient, machine: Machine
) -> None:
    async with episode(http, LONG, environment="coding") as judged, episode(http, LONG, environment="coding") as idle:
        await idle.call("execute", {"command": "true"})
        before = await machine.tree(judged.sid)
        submission = asyncio.create_task(judged.call("submit", {"code": WAITING}))
        await eventually(lambda: machine.judged_in(judged.sid, before))
        # Usually the same spawner: a worker has room for both sessions.
        for spawner in {before.spawner, (await machine.tree(idle.sid)).spawner}:
            await machine.kill(spawner)
        outcomes = [await submission, await idle.call("execute", {"command": "true"})]
    following = await all_of(player.by_spec(spec, code) for spec, code in ((LONG, AT_ONCE_DONE), (ORCHARD, HONEST)))

    assert [outcome.events[-1].name for outcome in outcomes] == ["error", "error"]
    assert [it.reward for it in following] == [1.0, 1.0]


async def test_a_killed_judge_is_500_environment_failed_over_areal(gateway: Gateway, machine: Machine) -> None:
    client = ArealClient(gateway.url)
    episode_id = (await client.start(0))["episode_id"]
    await client.tool(episode_id, "execute", command="true")
    before = await machine.tree(episode_id)
    submission = asyncio.create_task(client.step(episode_id, "```python\nimport time\ntime.sleep(90)\n```"))
    await machine.kill(await eventually(lambda: machine.judged_in(episode_id, before)))

    with pytest.raises(Failed) as failed:
        await submission
    with pytest.raises(Failed) as after:
        await client.step(episode_id, RIGHT)
    reward = await rolled_out(client, 0, RIGHT)

    assert (failed.value.status, failed.value.body["status"]) == (500, "environment_failed")
    assert "reward" not in failed.value.body
    assert (after.value.status, after.value.body["status"]) == (404, "environment_failed")
    assert reward == 1.0


async def test_a_worker_that_dies_while_it_judges_is_500_environment_lost_over_areal(
    gateway: Gateway, machine: Machine
) -> None:
    client = ArealClient(gateway.url)
    episode_id = (await client.start(0))["episode_id"]
    await client.tool(episode_id, "execute", command="true")
    before = await machine.tree(episode_id)
    submission = asyncio.create_task(client.step(episode_id, "```python\nimport time\ntime.sleep(90)\n```"))
    await eventually(lambda: machine.judged_in(episode_id, before))
    worker = await machine.worker_of(episode_id)
    await machine.kill(before.server)

    with pytest.raises(Failed) as failed:
        await submission
    await eventually(lambda: lost(gateway, worker))  # until then another episode may still get one of its slots
    reward = await rolled_out(client, 0, RIGHT)

    assert (failed.value.status, failed.value.body["status"]) == (500, "environment_lost")
    assert "reward" not in failed.value.body
    assert reward == 1.0


async def lost(gateway: Gateway, worker: str) -> None:
    assert worker not in [each["id"] for each in await gateway.workers()]


# -- processes and mounts that are left -------------------------------------------------------------------------------


async def test_a_deletion_after_a_disconnect_in_mid_command_leaves_no_process(
    http: httpx.AsyncClient,
) -> None:
    async with episode(http, ORCHARD, environment="coding") as opened:
        await opened.drop_after_task_id("execute", {"command": "sleep 300 & echo begun > mark; sleep 300"})
    # The fixture waits until no process is left: both sleeps must have ended.


async def test_a_trainer_that_disconnects_during_its_creates_leaves_no_process(
    http: httpx.AsyncClient, gateway: Gateway
) -> None:
    sids = [new_sid() for _ in range(AT_ONCE)]
    openings = [asyncio.create_task(create(http, sid, env_name="coding", task_spec=ORCHARD)) for sid in sids]
    await eventually(lambda: some_session(gateway))
    for opening in openings:
        opening.cancel()
    answers = await asyncio.gather(*openings, return_exceptions=True)
    for sid in sids:  # for sessions that were open before the client disconnected
        await RawEpisode(http, sid, "coding").delete()

    assert len(answers) == AT_ONCE


async def some_session(gateway: Gateway) -> None:
    assert await gateway.sessions()


async def test_an_idle_session_expires_with_all_its_processes(http: httpx.AsyncClient, machine: Machine) -> None:
    left = RawEpisode(http, new_sid(), "hasty")
    created = await create(http, left.sid, env_name="hasty", task_spec=ORCHARD)
    await left.call("execute", {"command": "setsid sleep 300 & python3 -c 'import time; time.sleep(300)' &"})

    await eventually(machine.is_at_rest)
    call = await left.ask("execute", {"command": "true"})

    assert created.status_code == 200
    assert call.status_code == 410
    assert "expired" in call.json()["detail"]


async def test_ended_sessions_leave_no_mounts_except_the_layer_of_their_task(player: Player, machine: Machine) -> None:
    async def mounted() -> list[int]:
        await eventually(machine.is_at_rest)
        return [await machine.mounts(tree.spawner) for tree in await machine.trees() if len(tree.parents) == AT_REST]

    await player.by_spec(ORCHARD, HONEST)
    first = await mounted()
    await all_of((player.by_spec(ORCHARD, HONEST) for _ in range(AT_ONCE)), at_once=AT_ONCE // 2)
    then = await mounted()

    assert first
    # A worker that had no session of this task before keeps the task's layer.
    assert sum(then) - sum(first) <= 2 * len(then)
    assert len(then) <= 3


async def test_a_deletion_ends_a_running_judgement_without_a_reward(http: httpx.AsyncClient, machine: Machine) -> None:
    async with episode(http, LONG, environment="coding") as opened, asyncio.timeout(HANG_S):
        await opened.call("execute", {"command": "sleep 300 &"})
        before = await machine.tree(opened.sid)
        submission = asyncio.create_task(opened.ask("submit", {"code": WAITING}))
        await eventually(lambda: machine.judged_in(opened.sid, before))
        deleted = await opened.delete()
        await eventually(machine.is_at_rest)
        answer = await submission

    assert deleted.status_code == 200
    assert '"reward": 1' not in answer.text
    assert '"reward":1' not in answer.text
    assert "error" in answer.text or answer.status_code in (404, 410)
