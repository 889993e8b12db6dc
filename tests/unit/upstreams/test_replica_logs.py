"""One view of the step logs of replicas on several machines."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgpack
import pytest

from gateway.core.errors import InvalidRequest, StoreUnavailable, UpstreamGone
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.ports.step_log import MESSAGE, EpisodeEnd, EpisodeFilter, Rollout
from gateway.core.session import CloseReason
from gateway.stores.step_log.reader import StepLogReader
from gateway.stores.step_log.writer import StepLogWriter
from gateway.upstreams.replica_client import ReplicaClient
from gateway.upstreams.replica_logs import LOG, ReplicaLogs, answer
from tests.unit.stores.test_step_log import MATH, a_call, request, session

END = EpisodeEnd(reason=CloseReason.DELETED, outcome=EpisodeOutcome.FINISHED, reward=1.0)


class Machine:
    """A machine: its folder, and the log that its replica writes."""

    def __init__(self, folder: Path, name: str) -> None:
        self.address = f"http://{name}"
        self.log = StepLogWriter(folder / name, name, max_bytes=2**30, max_days=14)
        self.own = StepLogReader(folder / name)


@dataclass
class Network:
    """Carries requests between the replicas of machines, as `ReplicaClient` does."""

    machines: dict[str, Machine]
    me: str
    is_store_down: bool = False

    async def ask(self, peer: str, operation: str, session: object, message: bytes, *, within_s: float) -> bytes:
        assert (operation, session) == (LOG, None)
        if peer not in self.machines:
            raise UpstreamGone("the replica is not there", sent=False)
        machine = self.machines[peer]
        return await answer(machine.log, machine.own, message)

    async def peers(self) -> list[str]:
        if self.is_store_down:
            raise StoreUnavailable("the store does not answer")
        return [*self.machines, "http://dead"]


@pytest.fixture
async def machines(tmp_path: Path) -> AsyncIterator[list[Machine]]:
    found = [Machine(tmp_path, name) for name in ("here", "there", "shared")]
    found[2].own, found[2].log = found[1].own, found[1].log  # two replicas on one machine share a folder
    yield found
    for machine in found[:2]:
        await machine.log.aclose()


@pytest.fixture
def network(machines: list[Machine]) -> Network:
    return Network({machine.address: machine for machine in machines}, machines[0].address)


@pytest.fixture
def logs(machines: list[Machine], network: Network) -> ReplicaLogs:
    return ReplicaLogs(machines[0].own, client=cast(ReplicaClient, network), peers=network.peers)


async def test_an_episode_that_two_machines_served_is_shown_whole(machines: list[Machine], logs: ReplicaLogs) -> None:
    here, there, _ = machines
    there.log.opened(session(), MATH, request(seed=7, of_split="train"), open_s=0.25)
    there.log.called(a_call(b'{"name":"first"}', b"1"))
    await there.log.flush()
    here.log.called(a_call(b'{"name":"second"}', b"2"))
    here.log.closed(session(), MATH, END)
    await here.log.flush()

    (row,) = await logs.episodes(EpisodeFilter(environment="math"), limit=5)
    episode = await logs.episode("a" * 32)
    by_name = await logs.episode("one")
    assert episode is not None
    calls, _ = await logs.calls(episode)

    assert (row["seed"], row["reward"], row["reason"]) == (7, 1.0, "deleted")
    assert (episode["begin"]["spec"], episode["reward"], episode["split"]) == ({"question": "1+1"}, 1.0, "train")
    assert by_name == episode
    assert [call[4] for call in calls] == [b'{"name":"first"}', b'{"name":"second"}'], "each once, by time"
    assert await logs.episode("none") is None


async def test_the_newest_episodes_of_all_machines_are_listed_in_pages(
    machines: list[Machine], logs: ReplicaLogs
) -> None:
    leases = [f"{number:032x}" for number in range(6)]
    for number, lease in enumerate(leases):
        machine = machines[number % 2]
        machine.log.opened(session(lease, f"s{number}"), MATH, request(), open_s=0.1)
        await machine.log.flush()

    first = await logs.episodes(EpisodeFilter(), limit=4)
    last = first[-1]
    rest = await logs.episodes(EpisodeFilter(before=(last["at"], last["lease"])), limit=4)

    assert [row["lease"] for row in (*first, *rest)] == leases[::-1]


async def test_images_and_messages_are_found_on_every_machine(machines: list[Machine], logs: ReplicaLogs) -> None:
    here, there, _ = machines
    data = bytes(range(256)) * 20
    there.log.opened(session(), MATH, request(), open_s=0.1)
    there.log.called(a_call(b"{}", b'{"image":"' + base64.b64encode(data) + b'"}'))
    rollout = Rollout(
        key="k", id="r", owner=session().owner, run="run", name="n", environment="math", split="", started_at=0, info={}
    )
    await there.log.flush()
    began_at = (await there.own.episodes(EpisodeFilter(), limit=1))[0]["at"]
    for number, machine in enumerate((here, there)):
        machine.log.rollout(Rollout(**{**{f: getattr(rollout, f) for f in rollout.__slots__}, "started_at": began_at}))
        machine.log.called(("k", MESSAGE, 0.0, 0.0, "ok", _message(number), None, None, (), 0))
        await machine.log.flush()
    episode = await logs.episode("a" * 32)
    assert episode is not None
    (call,), _ = await logs.calls(episode)
    digest = call[5].decode().partition("sha256:")[2][:64]
    (found,) = await logs.rollouts(episode)
    await logs.link("k", "a" * 32)

    assert await logs.blob(digest) == data
    assert await logs.blob("0" * 64) is None
    assert [message["id"] for message in found["messages"]] == ["m0", "m1"]
    assert [row["lease"] for row in await here.own.rollouts(episode)] == ["a" * 32]


async def test_a_task_with_values_that_few_formats_know_is_shown(machines: list[Machine], logs: ReplicaLogs) -> None:
    spec = {"big": 2**200, "odd": "\ud800"}
    for machine in machines[:2]:
        machine.log.opened(session(), MATH, request(spec=spec), open_s=0.1)
        machine.log.called(a_call(b"{}", b"1"))
        await machine.log.flush()
    episode = await logs.episode("a" * 32)
    assert episode is not None

    assert episode["begin"]["spec"]["big"] == 2**200
    assert len((await logs.calls(episode)).calls) == 2
    assert await logs.rollouts(episode) == []


async def test_the_own_log_is_shown_while_the_store_is_down(
    machines: list[Machine], network: Network, logs: ReplicaLogs
) -> None:
    for machine in machines[:2]:
        machine.log.opened(session(machine.address[-4:] * 8), MATH, request(), open_s=0.1)
        await machine.log.flush()
    network.is_store_down = True

    assert [row["lease"] for row in await logs.episodes(EpisodeFilter(), limit=5)] == ["here" * 8]


async def test_an_unknown_request_of_a_replica_is_refused(machines: list[Machine]) -> None:
    with pytest.raises(InvalidRequest, match="do not ask their logs for 'remove'"):
        await answer(machines[0].log, machines[0].own, msgpack.packb(["remove", "a"]))


async def test_filters_of_a_newer_replica_are_ignored(machines: list[Machine]) -> None:
    body = await answer(machines[0].log, machines[0].own, msgpack.packb(["episodes", {"colour": "red"}, 5]))

    assert msgpack.unpackb(body) == [[]]


def _message(number: int) -> dict[str, Any]:
    return {"id": f"m{number}", "index": number, "at": float(number), "type": "user_message", "content": "x"}
