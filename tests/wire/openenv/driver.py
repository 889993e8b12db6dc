"""The official clients at the end of a pipe, run by the Python of a venv that scripts/openenv-clients made.

A request is a line of JSON, ``{"id", "client", "do", …}``. Its answer is also a line, ``{"id", "value"}`` or ``{"id",
"error": {"type", "message"}}``. Answers are sent when they are ready. The packages are used as their users do, and no
part of them is replaced. Long texts do not cross the pipe: ``{"$text": n}`` is a text of n characters, and a text
longer than `LONG` is returned as ``{"$length": n}``.
"""

import asyncio
import dataclasses
import json
import sys
import threading
import types
import typing
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from openenv import core  # type: ignore[import-not-found]  # it is in the venv that this runs in

LONG = 100_000


@dataclasses.dataclass
class Move:
    """The typed action of the counting environment."""

    op: str
    by: int = 1


@dataclasses.dataclass
class Sight:
    """The typed observation of the counting environment."""

    value: int
    target: int
    text: str


@dataclasses.dataclass
class Standing:
    """The typed state of the counting environment."""

    episode_id: str | None
    step_count: int


class CountingEnv(core.EnvClient):  # type: ignore[misc]  # the package is not installed where types are checked
    """A typed client, written as in the package's documentation."""

    def _step_payload(self, action: Any) -> dict[str, Any]:
        return dataclasses.asdict(action) if isinstance(action, Move) else dict(action)

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        seen = payload.get("observation", {})
        sight = Sight(seen["value"], seen["target"], seen["text"]) if "value" in seen else seen
        result = {"observation": sight, "reward": payload.get("reward"), "done": payload.get("done", False)}
        return core.client_types.StepResult(**result)

    def _parse_state(self, payload: dict[str, Any]) -> Standing:
        return Standing(payload.get("episode_id"), payload.get("step_count", 0))


@dataclasses.dataclass
class Page:
    """The typed observation of the browser environment, with the fields that BrowserGym's own client reads."""

    text: str
    url: str
    screenshot: list[list[list[int]]] | None
    goal: str
    axtree_txt: str
    pruned_html: str
    error: str
    last_action_error: bool
    metadata: dict[str, Any]


@dataclasses.dataclass
class Browsing:
    """The typed state of the browser environment, with the fields that BrowserGym's own client reads."""

    episode_id: str | None
    step_count: int
    benchmark: str
    task_name: str
    task_id: str | None
    goal: str
    current_url: str
    max_steps: int | None
    cum_reward: float


class BrowserEnv(core.EnvClient):  # type: ignore[misc]  # as above
    """A typed client like BrowserGym's. A missing field is an error, where BrowserGym's client uses a default."""

    def _step_payload(self, action: Any) -> dict[str, Any]:
        return {"action_str": action["action_str"], "metadata": {}}

    def _parse_result(self, payload: dict[str, Any]) -> Any:
        return core.client_types.StepResult(
            observation=_typed(Page, payload["observation"]), reward=payload["reward"], done=payload["done"]
        )

    def _parse_state(self, payload: dict[str, Any]) -> Any:
        return _typed(Browsing, payload)


def _typed(kind: Any, given: dict[str, Any]) -> Any:
    """Make the dataclass *kind* from the fields in *given*, and check their JSON types."""
    fields = {field.name: given[field.name] for field in dataclasses.fields(kind)}
    for field in dataclasses.fields(kind):
        kinds = typing.get_args(field.type) if isinstance(field.type, types.UnionType) else (field.type,)
        if not isinstance(fields[field.name], tuple(typing.get_origin(one) or one for one in kinds)):
            raise TypeError(f"{field.name}: {fields[field.name]!r} is no {field.type}")
    return kind(**fields)


def client_class(kind: str) -> Any:
    """Return the client class for *kind*."""
    if kind in ("typed", "browser"):
        return CountingEnv if kind == "typed" else BrowserEnv
    return getattr(core, {"generic": "GenericEnvClient", "mcp": "MCPToolClient"}[kind])


class Client:
    """One client in one of its modes. Its calls run in sequence.

    ``async``: awaited on this program's loop. ``sync``: through ``.sync()``. ``direct``: unchanged, without a loop.
    """

    def __init__(self, inner: Any, mode: str) -> None:
        self.inner = inner
        self._facade = inner.sync() if mode == "sync" else inner
        self._mode = mode
        self._thread = None if mode == "async" else ThreadPoolExecutor(1)

    async def call(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        function: Callable[..., Any] = getattr(self._facade, method)
        if self._thread is None:
            return await function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))


class Driver:
    """All clients of this program, by the names that the test chose."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}

    async def do(self, request: dict[str, Any]) -> Any:
        """Execute a request, and return its result in JSON types."""
        name = request["client"]
        if request["do"] == "make":
            inner = client_class(request["kind"])(**request["options"])
            self._clients[name] = Client(inner, request["mode"])
            return None
        client = self._clients[name]
        if request["do"] == "child":
            self._clients[request["as"]] = Client(await client.call("new_session", [], {}), "async")
            return None
        if request["do"] == "abort":  # like a machine that loses its network: no close frame, no end of stream
            client.inner._ws.transport.abort()
            return None
        args = [_action(argument) for argument in request["args"]]
        return _plain(await client.call(request["do"], args, _filled(request["kwargs"])))


def _action(argument: Any) -> Any:
    """Return the typed form of an argument that requests it, or else the argument."""
    if isinstance(argument, dict) and "$move" in argument:
        return Move(**argument["$move"])
    if isinstance(argument, dict) and "$call_tool" in argument:
        return core.CallToolAction(**_filled(argument["$call_tool"]))
    return _filled(argument)


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        if "$text" in value:
            return "x" * value["$text"]
        return {name: _filled(inner) for name, inner in value.items()}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, str) and len(value) > LONG:
        return {"$length": len(value)}
    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="json")
    elif dataclasses.is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value if value is None or isinstance(value, (str, int, float, bool)) else None


async def main() -> None:
    """Serve the pipe until it ends."""
    loop, driver = asyncio.get_running_loop(), Driver()
    requests: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
    running: set[asyncio.Task[None]] = set()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(requests.put_nowait, None)

    async def answer(request: dict[str, Any]) -> None:
        try:
            said = {"value": await driver.do(request)}
        except Exception as error:  # noqa: BLE001  # the test gets any error
            said = {"error": {"type": type(error).__name__, "message": str(error)}}
        print(json.dumps({"id": request["id"], **said}), flush=True)

    threading.Thread(target=read, daemon=True).start()
    print(json.dumps({"id": 0, "value": "ready"}), flush=True)
    while (request := await requests.get()) is not None:
        running.add(task := asyncio.create_task(answer(request)))
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(main())
