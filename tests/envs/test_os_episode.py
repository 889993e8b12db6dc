"""The box of a session: prepared once for a group, fresh where necessary, and always closed at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tests.envs.os_sandboxes import opening_sandboxes, os_module
from tests.wire.os_episodes import TREE

pytestmark = pytest.mark.sandbox

episodes = os_module("os_episode")
problems = os_module("os_problem")

TASK: dict[str, Any] = {
    "instruction": "How many entries are in /srv?",
    "config": {"init": ["touch /srv/a /srv/b"], "start": "cd /srv"},
    "evaluation": {"check": [None, {"matcher": "integer-match"}], "example": "ls /srv | wc -l"},
}


def problem(**config: Any) -> Any:
    return problems.Problem.read({**TASK, "config": {**TASK["config"], **config}})


@pytest.fixture
async def sandboxes() -> AsyncIterator[Any]:
    async with opening_sandboxes() as sandboxes:
        yield sandboxes


class Watched:
    """Sandboxes that count openings and runs, and cancel the caller at its n-th call."""

    def __init__(self, inner: Any, *, cancel_at: int = 0) -> None:
        self._inner = inner
        self._cancel_at = cancel_at
        self.calls = 0
        self.open_now = 0
        self.builds = 0
        self.scripts: list[str] = []

    async def open(self, layer: Any = None) -> Any:
        await self.turn()
        sandbox = WatchedSandbox(await self._inner.open(layer), self)
        self.open_now += 1
        return sandbox

    async def layer(self, key: str, build: Callable[[Any], Awaitable[None]], **more: Any) -> Any:
        await self.turn()

        async def watched(sandbox: Any) -> None:
            self.builds += 1
            await build(WatchedSandbox(sandbox, self))

        return await self._inner.layer(key, watched, **more)

    async def turn(self) -> None:
        self.calls += 1
        if self.calls == self._cancel_at:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)


class WatchedSandbox:
    """A sandbox that reports each use to its `Watched`."""

    oom_kills = 0

    def __init__(self, inner: Any, watch: Watched) -> None:
        self._inner = inner
        self._watch = watch
        self._is_open = True

    @property
    def killed(self) -> str | None:
        return None

    async def run(self, argv: Any, **more: Any) -> Any:
        await self._watch.turn()
        self._watch.scripts.append(argv[2])
        return await self._inner.run(argv, **more)

    async def terminal(self, argv: Any, **more: Any) -> Any:
        await self._watch.turn()
        return await self._inner.terminal(argv, **more)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._watch.turn()
        await self._inner.write_file(path, data, mode=mode)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        await self._watch.turn()
        return bytes(await self._inner.read_file(path, max_bytes=max_bytes))

    async def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._watch.open_now -= 1
        await self._inner.close()


async def test_a_groups_box_is_prepared_once_and_its_expected_value_is_computed_once(sandboxes: Any) -> None:
    watch = Watched(sandboxes)
    worker = episodes.Episodes(watch)

    group = [await worker.open(problem(), seed=1) for _ in range(4)]
    verdicts = [await episode.judge("2") for episode in group]
    for episode in group:
        await episode.close()

    assert verdicts == [True] * 4
    assert watch.scripts == ["touch /srv/a /srv/b", "ls /srv | wc -l"]
    assert watch.open_now == 0


async def test_a_box_with_live_processes_is_prepared_for_each_session(sandboxes: Any) -> None:
    watch = Watched(sandboxes)
    worker = episodes.Episodes(watch)

    for _ in range(2):
        await (await worker.open(problem(live_init=True), seed=1)).close()

    assert watch.scripts == ["touch /srv/a /srv/b", "ls /srv | wc -l"] * 2


async def test_a_different_seed_means_a_different_state_only_where_chance_is_used(sandboxes: Any) -> None:
    watch = Watched(sandboxes)
    worker = episodes.Episodes(watch)
    chance = problem(init=["echo $RANDOM > /srv/a"])

    for seed in (1, 2):
        await (await worker.open(problem(), seed=seed)).close()
        await (await worker.open(chance, seed=seed)).close()

    assert watch.builds == 3


CONTENTS = "find /srv -type f -print0 | sort -z | xargs -0 sha256sum"
HOUR = 1_800_000_000
"""A time, in seconds since the epoch, at which an hour starts."""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("date +%s > /srv/a; cd /srv; echo b > b; rm a; ln -s b c; mkdir -p d/e", id="files' times"),
        pytest.param("touch -d '2020-02-02 10:11:12.5' /srv/old; touch /srv/old/x 2> /srv/said || :", id="a set time"),
        pytest.param("for i in 1 2 3; do od -An -tx8 -N8 /dev/urandom > /srv/$i; done", id="three draws"),
        pytest.param("cat /dev/random | tr -dc a-z | head -c 40 > /srv/a", id="a draw that ends early"),
        pytest.param(
            "dd if=/dev/urandom of=/srv/a bs=1M count=2; seq 99 | shuf -n 9 > /srv/b", id="large and shuffled"
        ),
        pytest.param("su nobody -s /bin/sh -c 'head -c 9 </dev/urandom' > /srv/a", id="another user"),
    ],
)
async def test_members_of_a_group_that_open_within_one_hour_start_alike_in_two_workers(script: str) -> None:
    async def beginning(late_s: float) -> str:
        async with opening_sandboxes() as sandboxes:
            worker = episodes.Episodes(sandboxes, clock=lambda: HOUR + late_s)
            episode = await worker.open(problem(init=[script]), seed=7)
            output = await episode.bash(f"{TREE}; {CONTENTS}; find /srv -printf '%P %T+\\n'; ls /run; pgrep -c python3")
            await episode.close()
            return str(output.text)

    one, other = await beginning(0.0), await beginning(3599.0)

    assert one == other
    assert one.endswith("command\n0\n")  # no process of the random source is left


async def test_three_draws_differ_and_a_different_seed_draws_differently(sandboxes: Any) -> None:
    worker = episodes.Episodes(sandboxes)
    draws = problem(init=["for i in 1 2 3; do head -c 12 /dev/urandom | base64 >> /srv/a; done"])
    drawn = []
    for seed in (1, 2):
        episode = await worker.open(draws, seed=seed)
        drawn += (await episode.bash("cat /srv/a")).text.split()
        await episode.close()

    assert len(set(drawn)) == 6


async def test_files_that_an_init_script_separates_by_a_pause_keep_their_order(sandboxes: Any) -> None:
    worker = episodes.Episodes(sandboxes, clock=lambda: HOUR)
    episode = await worker.open(problem(init=["touch /srv/a; sleep 1.1; touch /srv/b"]), seed=1)

    output = await episode.bash("ls -1t /srv; date -r /srv/a +%s")
    await episode.close()

    assert output.text == f"b\na\n{HOUR}\n"


async def test_files_of_an_init_script_are_new_and_newer_than_files_that_it_dates_days_ago(sandboxes: Any) -> None:
    """AgentBench's items require this: a date that never changes would make their answers 0."""
    scripts = ["touch /srv/new; touch -d '3 days ago' /srv/older; touch -d '9 days ago' /srv/oldest"]
    episode = await episodes.Episodes(sandboxes).open(problem(init=scripts), seed=1)

    output = await episode.bash("find /srv -type f -mtime -1; find /srv -type f -mtime -7 | wc -l; ls -1t /srv")
    await episode.close()

    assert output.text == "/srv/new\n2\nnew\nolder\noldest\n"


async def test_several_init_scripts_run_in_order_in_separate_processes(sandboxes: Any) -> None:
    scripts = [
        "cd /srv; mkdir made",
        {"language": "python", "code": "import os; os.rename('/srv/made', '/root/moved')"},
        "ls ~ > ~/seen",
    ]
    episode = await episodes.Episodes(sandboxes).open(problem(init=scripts), seed=1)

    output = await episode.bash("pwd; cat ~/seen")
    await episode.close()

    assert output.text == "/srv\nmoved\nseen\n"


@pytest.mark.parametrize("is_live", [True, False])
async def test_an_init_script_that_fails_leaves_nothing(sandboxes: Any, is_live: bool) -> None:
    watch = Watched(sandboxes)
    broken = problem(init=["true", "echo sorry >&2; exit 4"], live_init=is_live)

    with pytest.raises(episodes.SetupFailed, match="init script 1 ended with 4: sorry"):
        await episodes.Episodes(watch).open(broken, seed=1)

    assert watch.open_now == 0


@pytest.mark.parametrize("is_live", [True, False])
async def test_a_cancellation_at_any_call_leaves_no_open_box(sandboxes: Any, is_live: bool) -> None:
    calls = 0
    for cancel_at in range(1, 100):
        watch = Watched(sandboxes, cancel_at=cancel_at)
        opening = asyncio.ensure_future(episodes.Episodes(watch).open(problem(live_init=is_live), seed=cancel_at))
        await asyncio.wait({opening})
        if not opening.cancelled():
            await opening.result().close()
            break
        assert watch.open_now == 0, f"cancelled at call {cancel_at}"
        calls = cancel_at

    assert calls >= 5
    assert watch.open_now == 0
