"""Attacks from inside a box over AReaL's steps: they reach nothing, and the episode is judged correctly.

Each attack is played twice concurrently, once to a right and once to a wrong answer. A neighbour in the same worker has
its own secrets.
"""

import asyncio
import hashlib
import hmac
import re
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.fakes.eventually import eventually
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import STACK
from tests.wire.gateways import Gateway
from tests.wire.os_attacks import ATTACKS, GHOST, NEIGHBOUR, Attack
from tests.wire.os_catalog import counting, serving_os
from tests.wire.os_episodes import TREE, Play, bash, playing

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:os")]

GATEWAY_SECRET = uuid.uuid4().hex
ANSWER = f"answer-{uuid.uuid4().hex}"
NEIGHBOURS_SECRET = f"neighbour-{uuid.uuid4().hex}"
WRITING = {
    "id": "writing",
    "instruction": "Write hello into /srv/note.",
    "evaluation": {"check": [{"read": "/srv/note"}, {"equals": "hello"}]},
}
FLAGGING = {
    "id": "flagging",
    "instruction": "Make /srv/flag.",
    "evaluation": {"check": [{"code": "test -f /srv/flag && echo here"}, {"equals": "here"}]},
}
TASKS = [
    counting("count"),
    counting("neighbour", max_turns=200),
    {"id": "secret", "instruction": "Guess.", "evaluation": {"match": ANSWER}, "reference": {"answer": ANSWER}},
    WRITING,
    FLAGGING,
]
STATE = (
    "cat /root/neighbour /tmp/neighbour /dev/shm/neighbour; pgrep -fc '^python3 /tmp/listen.py'; pgrep -xc sleep;"
    f" ipcs -m -q -s | grep -c ^0x; {TREE}"
)


@dataclass(frozen=True)
class Street:
    """A gateway with one worker, and one neighbour session in it that must not notice any attack."""

    gateway: Gateway
    client: ArealClient
    neighbour: Play
    state: str
    """The neighbour's view of itself before any attack."""
    fresh: str
    """The digest of an unused box."""


@pytest.fixture(scope="module")
def street() -> Iterator[Street]:
    patient = {"max_turns = 8": "max_turns = 200"}  # the neighbour runs commands throughout all tests
    with serving_os(STACK, tasks=TASKS, changes=patient, GATEWAY_SECRET=GATEWAY_SECRET) as gateway:
        yield asyncio.run(furnished(gateway))


async def furnished(gateway: Gateway) -> Street:
    client = ArealClient(gateway.url)
    neighbour = Play(client, await client.start("neighbour"))
    await neighbour.run(NEIGHBOUR.replace("$SECRET", NEIGHBOURS_SECRET))
    state = await neighbour.run(STATE)
    assert state.count(NEIGHBOURS_SECRET) == 3, state
    assert state.split()[3:6] == ["1", "1", "3"], state
    async with playing(client, "count") as play:
        return Street(gateway, client, neighbour, state, await play.run(TREE))


async def played(client: ArealClient, attack: Attack, answer: str, named: dict[str, str]) -> float | None:
    """Attack, check the shell and answer. Return the reward, or None if the attack ended the box.

    A box that ends is a failure of the agent's own and earns no reward.
    """
    script = attack.whole
    for name, value in named.items():
        script = script.replace(f"{{{name}}}", value)
    async with playing(client, "count") as play:
        for said in (bash(script), bash("echo still; ls /srv/data"), f"Think: So.\nAct: answer({answer})"):
            reply = await play.say(said)
            if reply["done"]:
                break
            seen = reply["observation"]["content"]
            assert "ESCAPED" not in seen, seen
            assert said != bash(script) or not attack.says_tried or re.search(r"\btried\b", seen), seen
    assert reply["done"], reply
    if reply["info"]["status"] == "agent invalid action":
        assert (attack.may_end, reply["reward"]) == (True, 0.0), reply
        return None
    assert reply["info"]["status"] == "completed", reply
    return float(reply["reward"])


@pytest.mark.parametrize("attack", [pytest.param(attack, id=name) for name, attack in ATTACKS.items()])
async def test_an_attack_reaches_nothing_and_changes_no_verdict(street: Street, attack: Attack) -> None:
    name = f"machine-{uuid.uuid4().hex}"
    with socket.create_server(("0.0.0.0", 0)) as server, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(f"\0{name}")
        abstract.listen()
        named = {"port": str(server.getsockname()[1]), "socket": name}
        right, wrong, beside = await asyncio.gather(
            played(street.client, attack, "3", named),
            played(street.client, attack, "4", named),
            street.neighbour.run(STATE),
        )
    after = await street.neighbour.run(STATE)

    assert right in ((1.0, None) if attack.may_end else (1.0,))
    assert wrong in ((0.0, None) if attack.may_end else (0.0,))
    assert (beside, after) == (street.state, street.state)


_SEARCH = """
import os, re
words = [word[::-1].encode() for word in {words!r}]
found, files, bytes_read = set(), 0, 0

def look(path, data):
    for word in words:
        if word in data:
            found.add((path, word.decode()[:12]))

for folder, folders, names in os.walk("/"):
    if folder in ("/proc", "/sys"):
        folders.clear()
        continue
    for name in names:
        path = os.path.join(folder, name)
        try:
            if not os.path.isfile(path):
                continue
            with open(path, "rb") as file:
                data = file.read()
        except OSError:
            continue
        files, bytes_read = files + 1, bytes_read + len(data)
        look(path, data)
for pid in filter(str.isdigit, os.listdir("/proc")):
    for name in ("cmdline", "environ", "maps", "mountinfo", "status", "net/unix", "net/tcp"):
        try:
            look(f"/proc/{{pid}}/{{name}}", open(f"/proc/{{pid}}/{{name}}", "rb").read())
        except OSError:
            pass
    if int(pid) == os.getpid():
        continue
    try:
        memory = open(f"/proc/{{pid}}/mem", "rb", buffering=0)
        for line in open(f"/proc/{{pid}}/maps"):
            first, last = (int(end, 16) for end in line.split()[0].split("-"))
            memory.seek(first)
            look(f"memory of {{pid}}", memory.read(last - first))
    except (OSError, OverflowError):  # the kernel's own pages come last: nobody can read them, or seek to them
        pass
print(files > 5000, bytes_read > 50_000_000, sorted(found))
"""
"""The words come reversed, because the script itself is a file of the box and a text in its shell's memory."""


async def searched(play: Play, search: str) -> str:
    """Run *search* next to the episode's commands, which have 30 s each. Return the output of the search."""
    await play.run(f"cat > /tmp/search.py <<'END'\n{search}\nEND")
    await play.run("((python3 -I /tmp/search.py > /tmp/found 2>&1; touch /tmp/searched) &)")
    waiting = "for i in $(seq 100); do [ -e /tmp/searched ] && cat /tmp/found && break; sleep 0.1; done"

    async def ended() -> str:
        found = await play.run(waiting)
        assert found, "the search still runs"
        return found

    return await eventually(ended)


async def test_no_secret_is_anywhere_in_a_box(street: Street) -> None:
    async with playing(street.client, "secret") as play:
        # Listed now, with the worker of this episode: the pool starts a second one if openings come fast.
        workers = [worker["id"] for worker in await street.gateway.workers("os")]
        serving = {session["worker"] for session in await street.gateway.sessions() if session["environment"] == "os"}
        tokens = [hmac.new(GATEWAY_SECRET.encode(), worker.encode(), hashlib.sha256).hexdigest() for worker in workers]
        words = [ANSWER, NEIGHBOURS_SECRET, GATEWAY_SECRET, "ENVSERVER_", *workers, *tokens]
        found = await searched(play, _SEARCH.format(words=[word[::-1] for word in words]))
        verdict = await play.answer(ANSWER)

    assert serving
    assert serving <= set(workers)
    assert found == "True True []"
    assert verdict.reward == 1.0


async def test_the_search_for_secrets_finds_a_planted_word(street: Street) -> None:
    word = f"planted-{uuid.uuid4().hex}"
    search = _SEARCH.format(words=[word[::-1]])

    async with playing(street.client, "secret") as play:
        await play.run(f"X={word[:20]}; export X=${{X}}{word[20:]}; sleep 300 &")
        await play.run("echo $X > /var/lib/planted")
        found = await searched(play, search)

    assert "/var/lib/planted" in found
    assert "/environ" in found
    assert "memory of" in found


async def test_a_new_box_after_all_attacks_is_identical_to_the_first(street: Street) -> None:
    async with playing(street.client, "count") as play:
        fresh = await play.run(TREE)

    assert len(fresh) == 64
    assert fresh == street.fresh


@pytest.mark.parametrize(
    ("script", "reward"),
    [
        pytest.param("echo hello > /srv/note", 1.0, id="a file"),
        pytest.param("echo hello > /root/x; ln -s /root/x /srv/note", 1.0, id="a link to a file of the box"),
        pytest.param(f"echo hello > /srv/note; {GHOST}", 1.0, id="a file, and only programs that lie"),
        pytest.param("echo hello > /srv/note; rm -rf /usr /bin /lib*", 1.0, id="a file, and no program"),
        pytest.param(GHOST, 0.0, id="programs that lie, and no file"),
        pytest.param("mkfifo /srv/note; echo hello > /srv/note &", 0.0, id="a fifo"),
        pytest.param("ln -s /dev/zero /srv/note", 0.0, id="a device"),
        pytest.param("ln -s note /srv/note", 0.0, id="a link to itself"),
        pytest.param("mkdir /srv/note", 0.0, id="a folder"),
        pytest.param("ln -s /proc/1/root/etc/passwd /srv/note", 0.0, id="a link through a process"),
        pytest.param("exec 9<<< hello; ln -s /proc/$$/fd/9 /srv/note", 0.0, id="a link to an open file"),
        pytest.param("head -c 100M /dev/zero > /srv/note", 0.0, id="a large file"),
        pytest.param(
            "(while :; do echo hello > /srv/n; mv /srv/n /srv/note; done) & sleep 0.2; kill %1; rm -f /srv/note",
            0.0,
            id="a file that is gone",
        ),
        pytest.param("printf 'hello\\0' > /srv/note", 0.0, id="another text"),
    ],
)
async def test_the_contents_of_a_file_are_judged_without_any_program_of_the_box(
    street: Street, script: str, reward: float
) -> None:
    async with playing(street.client, "writing") as play:
        await play.observed(script)
        verdict = await play.finish()

    assert (verdict.reward, verdict.status) == (reward, "completed")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("true", id="nothing"),
        pytest.param("cd /; rm -rf /root", id="no home"),
        pytest.param("rm -f /usr/bin/bash", id="no bash"),
        pytest.param("rm -rf /usr /bin /lib*", id="no program"),
        pytest.param(
            "mkdir /evil; ln -s /bin/true /evil/test; export PATH=/evil; test() { :; }; export -f test", id="a path"
        ),
        pytest.param("mkdir /srv/flag", id="a folder"),
    ],
)
async def test_a_check_that_the_agent_broke_is_not_a_success(street: Street, script: str) -> None:
    async with playing(street.client, "flagging") as play:
        await play.observed(script)
        reply = await play.say("Act: finish")
        if not reply["done"]:  # the agent learns that the action failed, and may repair its box
            assert reply["observation"]["content"].endswith("The action failed. Try another one.")

    assert reply["reward"] == 0.0
