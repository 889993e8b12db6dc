"""Opening a session's box: prepared once for a group, fresh where it must be, and given back whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.envs.plain_box import os_module, sandboxes_of

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
async def sandboxes(tmp_path: Path) -> AsyncIterator[Any]:
    async with sandboxes_of("best", tmp_path) as sandboxes:
        yield sandboxes


class Watched:
    """Sandboxes that count what is open and what ran, and cancel the caller at its n-th call."""

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

    async def layer(self, key: str, build: Callable[[Any], Awaitable[None]]) -> Any:
        await self.turn()

        async def watched(sandbox: Any) -> None:
            self.builds += 1
            await build(WatchedSandbox(sandbox, self))

        return await self._inner.layer(key, watched)

    async def turn(self) -> None:
        self.calls += 1
        if self.calls == self._cancel_at:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)


class WatchedSandbox:
    """A sandbox that reports each use to its `Watched`."""

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


async def test_a_groups_box_is_prepared_and_its_expected_value_worked_out_once(sandboxes: Any) -> None:
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


async def test_another_seed_is_another_state_only_where_chance_is_used(sandboxes: Any) -> None:
    watch = Watched(sandboxes)
    worker = episodes.Episodes(watch)
    chance = problem(init=["echo $RANDOM > /srv/a"])

    for seed in (1, 2):
        await (await worker.open(problem(), seed=seed)).close()
        await (await worker.open(chance, seed=seed)).close()

    assert watch.builds == 3


async def test_several_init_scripts_run_in_order_as_processes_of_their_own(sandboxes: Any) -> None:
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
async def test_a_cancellation_at_any_call_leaves_no_box_open(sandboxes: Any, is_live: bool) -> None:
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
