"""Many sessions that step until the test stops them. Each step is checked: none is lost, and none runs twice."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.wire.raw import create, new_sid, parse

TURNS = 500
PAUSE_S = 2.0
"""Seconds between two steps of a session. One machine runs all machines of the cluster."""
ENVIRONMENT = "game"
TASK = {
    "id": "walk",
    "instruction": "Walk.",
    "config": {
        "game": "grid",
        "level": {"width": 5, "height": 5, "walls": 15, "doors": 0, "hazards": 0, "seed": 15137},
        "max_turns": TURNS,
    },
    "evaluation": {"reward_function": "efficiency(slack=1.5)"},
}
MOVE = "[open]"
"""A move without effect: there is no door, so it costs a turn and never ends the game."""


@dataclass(eq=False)
class Player:
    """One session."""

    sid: str
    steps: int = 0
    failure: str = ""
    """The error of the step that failed, which ends the session."""
    broken: list[str] = field(default_factory=list)
    """Steps that ended without an answer, and answers that the test cannot explain."""


class Players:
    """Sessions that step."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.players: list[Player] = []
        self._http = http
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def alive(self) -> list[Player]:
        """The sessions that still step."""
        return [player for player in self.players if not player.failure and not player.broken]

    @property
    def lost(self) -> list[Player]:
        """The sessions that failed."""
        return [player for player in self.players if player.failure]

    def broken(self) -> list[str]:
        """The errors of all sessions that must never happen."""
        return [what for player in self.players for what in player.broken]

    async def open(self, count: int) -> list[Player]:
        """Open *count* more sessions and let them step."""
        players = await asyncio.gather(*(self._opened() for _ in range(count)))
        self.players += players
        self._tasks += [asyncio.ensure_future(self._play(player)) for player in players]
        return list(players)

    async def go_on(self, *, steps: int = 3) -> None:
        """Return once each live session took *steps* more steps."""
        before = {player: player.steps for player in self.alive}
        await until(
            lambda: all(player.failure or player.broken or player.steps >= n + steps for player, n in before.items()),
        )

    async def aclose(self) -> None:
        """Let the steps under way end, then end the sessions."""
        self._stopping.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=HANG_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._deleted(player) for player in self.players), return_exceptions=True)

    async def _opened(self) -> Player:
        """Create a session. As trainers do, repeat a create that found no free worker in time."""
        player = Player(new_sid())
        deadline = time.monotonic() + HANG_S
        while True:
            answer = await create(self._http, player.sid, env_name=ENVIRONMENT, task_spec=TASK)
            if answer.status_code == 200:
                return player
            assert answer.json()["code"] == "pool_exhausted", answer.text
            assert time.monotonic() < deadline, answer.text

    async def _deleted(self, player: Player) -> None:
        await self._http.post("/delete", headers={"X-Session-ID": player.sid})

    async def _play(self, player: Player) -> None:
        while not self._stopping.is_set() and player.steps < TURNS - 1:
            try:
                answer = await self._http.post(
                    f"/{ENVIRONMENT}/call",
                    headers={"X-Session-ID": player.sid, "Accept": "text/event-stream"},
                    json={"name": "act", "input": {"message": MOVE}},
                )
            except httpx.HTTPError as error:
                player.broken.append(f"{type(error).__name__} {error}")
                return
            if answer.status_code != 200:
                player.failure = f"{answer.status_code} {answer.text}"
                return
            outcome = parse(answer.text)
            if outcome.events[-1].name == "error":
                player.failure = outcome.error
                return
            player.steps += 1
            left = re.search(r"Turns left: (\d+)", outcome.text)
            if left is None or int(left[1]) != TURNS - player.steps:
                player.broken.append(f"after {player.steps} steps: {outcome.text}")
                return
            await asyncio.sleep(PAUSE_S)


@asynccontextmanager
async def playing(url: str, key: str) -> AsyncIterator[Players]:
    """Players whose sessions end with the block."""
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=100)
    headers = {"X-API-Key": key}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, verify=False, trust_env=False, timeout=HANG_S, limits=limits
    ) as http:
        players = Players(http)
        try:
            yield players
        finally:
            await players.aclose()
