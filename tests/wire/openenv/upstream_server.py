"""OpenEnv servers of any release since 0.2.0, as in images, for tests of the gateway's OpenEnv upstream.

Run with the Python of a venv that scripts/openenv-clients made. The program imports the package once, which takes a
second of CPU. It then forks a server for each line that it reads: the arguments of `serve` as JSON. It ends its servers
when its input ends.
"""

import gc
import json
import os
import signal
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Literal

import uvicorn
from openenv.core.env_server import create_app  # type: ignore[import-not-found]  # not installed where types are checked
from openenv.core.env_server.interfaces import Environment  # type: ignore[import-not-found]
from openenv.core.env_server.types import Action, Observation, State  # type: ignore[import-not-found]
from pydantic import Field
from starlette.applications import Starlette
from starlette.routing import Mount

SPLITS = {"train": (20, 3, 5), "test": (5, 2, 3)}
"""For each split: its number of tasks, the first task's target, and the number of targets after which they repeat."""
WORDS = ("river", "candle", "shadow")


class CounterAction(Action):  # type: ignore[misc]
    op: Literal["inc", "dec", "noop", "raise", "wait", "kill", "long", "size"]
    by: int = Field(default=1, ge=0)
    file: str = Field(default="", description="What wait waits for; FILE.began is made as the step begins.")


class CounterObservation(Observation):  # type: ignore[misc]
    value: int
    target: int
    text: str


class Plain(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State(episode_id=None, step_count=0)
        self._value = 0
        self._target = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> CounterObservation:
        if kwargs.get("fails"):
            raise ValueError("no such level")
        if "waits_for" in kwargs:
            Path(f"{kwargs['waits_for']}.began").touch()
            wait_for(kwargs["waits_for"])
        return self._begun(3 + (seed or 0) % 5, episode_id)

    def step(self, action: CounterAction, timeout_s: float | None = None, **kwargs: Any) -> CounterObservation:
        self._state.step_count += 1
        if action.file and action.op != "size":
            Path(f"{action.file}.began").touch()
        if action.op == "raise":
            raise RuntimeError("boom from env")
        if action.op == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if action.op == "wait":
            wait_for(action.file)
        if action.op == "long":
            return self._told("x" * action.by)
        if action.op == "size":
            return self._told(str(len(action.file)))
        self._value += {"inc": action.by, "dec": -action.by}.get(action.op, 0)
        won = self._value == self._target
        return self._told(f"value={self._value}", reward=float(won), done=won)

    @property
    def state(self) -> State:
        return self._state

    def _begun(self, target: int, episode_id: str | None) -> CounterObservation:
        self._target, self._value = target, 0
        self._state = State(episode_id=episode_id or str(uuid.uuid4()), step_count=0)
        return self._told(f"Count to {target}.")

    def _told(self, text: str, **fields: Any) -> CounterObservation:
        return CounterObservation(value=self._value, target=self._target, text=text, **fields)


class Counter(Plain):
    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        split: str = "train",
        index: int | None = None,
        **kwargs: Any,
    ) -> CounterObservation:
        if index is None:
            return super().reset(seed, episode_id, **kwargs)
        return self._begun(self.get_task(split, index)["target"], episode_id)

    def list_splits(self) -> list[Any]:
        return list(SPLITS)

    def num_tasks(self, split: str) -> int:
        return SPLITS[split][0]

    def get_task(self, split: str, index: int) -> Any:
        _, first, turns = SPLITS[split]
        return {"id": f"{split}-{index}", "target": first + index % turns}

    def get_task_range(self, split: str, start: int | None, stop: int | None) -> list[Any]:
        return [self.get_task(split, index) for index in range(SPLITS[split][0])[start:stop]]


class Broken(Plain):
    def __init__(self) -> None:
        raise RuntimeError("no licence")


def riddle() -> tuple[Any, Any, Any]:
    """Return the classes of the environment with tools, its action and its observation. Release 0.2.0 has no tools."""
    from fastmcp import FastMCP  # type: ignore[import-not-found]
    from openenv.core.env_server.mcp_environment import MCPEnvironment  # type: ignore[import-not-found]
    from openenv.core.env_server.mcp_types import (  # type: ignore[import-not-found]
        CallToolAction,
        CallToolObservation,
    )

    class Riddle(MCPEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            mcp = FastMCP("riddle")

            @mcp.tool  # type: ignore[untyped-decorator]
            def echo_message(message: str) -> str:
                """Echo back the provided message."""
                return message

            @mcp.tool  # type: ignore[untyped-decorator]
            def fail() -> str:
                """Fail."""
                raise RuntimeError("the tool is broken")

            @mcp.tool  # type: ignore[untyped-decorator]
            def finish(word: str) -> str:
                """Answer the riddle."""
                return "right" if word == self._word else "wrong"

            super().__init__(mcp)
            self._word = ""
            self._state = State(episode_id=None, step_count=0)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            self._word = WORDS[(seed or 0) % len(WORDS)]
            self._state = State(episode_id=episode_id, step_count=0)
            return Observation(done=False, reward=0.0, metadata={"word": self._word})

        def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            return self._judged(super().step(action, timeout_s=timeout_s, **kwargs))

        async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            return self._judged(await super().step_async(action, timeout_s=timeout_s, **kwargs))

        def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            return Observation()

        def _judged(self, observation: Observation) -> Observation:
            self._state.step_count += 1
            if getattr(observation, "tool_name", "") == "finish" and not observation.error:
                observation.reward = float("right" in str(observation.result))
                observation.done = True
            return observation

        @property
        def state(self) -> State:
            return self._state

    return Riddle, CallToolAction, CallToolObservation


def wait_for(file: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not Path(file).exists():
        time.sleep(0.01)


def serve(kind: str, capacity: int, log: str, path: str) -> None:
    """Serve one environment on a free port of the loopback, or on the Unix socket *path*, and write to *log*.

    Args:
        kind: ``counter`` (a Gym environment with tasks), ``plain`` (a Gym environment without tasks), ``riddle``
            (tools), ``broken`` (its constructor fails) or ``prefixed`` (the counter, only below ``/at/a/prefix``).
    """
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    gym = {"counter": Counter, "plain": Plain, "broken": Broken, "prefixed": Counter}
    parts = riddle() if kind == "riddle" else (gym[kind], CounterAction, CounterObservation)
    app = create_app(*parts, env_name=kind, max_concurrent_envs=capacity)
    if kind == "prefixed":
        app = Starlette(routes=[Mount("/at/a/prefix", app=app)])
    if path:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        address = f"unix:{path}"
    else:
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
    listener.listen(128)
    print(f"upstream_ready pid={os.getpid()} address={address}", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="info")).run(sockets=[listener])


def main() -> None:
    uvicorn.Config(Starlette()).load()  # imports the protocols
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the servers
    gc.freeze()  # a collection in a server would copy the pages that it shares with the others
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(**json.loads(line))
            return
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
