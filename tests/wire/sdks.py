"""The two official clients, unmodified, behind one interface: their common methods, and how each reports a failure."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import ors.client
from openreward import AsyncOpenReward
from openreward.api.environments import ToolCallError, ToolFailed
from openreward.api.environments.types import Task as OpenRewardTask


class Output(Protocol):
    """The result of a call."""

    @property
    def blocks(self) -> Sequence[Any]: ...
    @property
    def metadata(self) -> Mapping[str, Any] | None: ...
    @property
    def reward(self) -> float | None: ...
    @property
    def finished(self) -> bool: ...


class Episode(Protocol):
    """An open session."""

    sid: str

    async def get_prompt(self) -> list[Any]: ...
    async def list_tools(self, format: str | None = None) -> list[Any]: ...
    async def call_tool(self, tool_name: str, input: Mapping[str, Any] = ...) -> Output: ...


class EnvironmentClient(Protocol):
    """A client's view of one environment."""

    async def list_splits(self) -> list[str]: ...
    async def list_tasks(self, split: str) -> list[Any]: ...
    async def num_tasks(self, split: str) -> int: ...
    async def get_task(self, split: str, index: int) -> Any: ...
    async def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]: ...
    async def list_tools(self, format: str | None = None) -> list[Any]: ...
    def session(
        self,
        task: Any = None,
        secrets: Mapping[str, Any] | None = None,
        *,
        split: str | None = None,
        index: int | None = None,
    ) -> AbstractAsyncContextManager[Episode]: ...


@dataclass(frozen=True, kw_only=True)
class Sdk:
    """One of the two packages."""

    name: str
    refused: type[Exception]
    """The exception for ``ok: false``: the tool did not run."""
    failed: type[Exception]
    """The exception for an ``error`` event: the tool failed, or its worker did."""
    connect: Callable[[str, str | None], AbstractAsyncContextManager["Client"]]
    """Maps a base URL and a key to an open client."""
    task: Callable[[str, Mapping[str, Any]], Any]
    """Maps an environment and a specification to a task outside all splits."""
    secrets: Callable[[Mapping[str, str]], Mapping[str, Any]]
    """Converts plain secrets to the package's own form."""


@dataclass(frozen=True)
class Client:
    """An open client of either package."""

    environment: Callable[[str], EnvironmentClient]


@asynccontextmanager
async def _ors(url: str, key: str | None) -> AsyncIterator[Client]:
    client = ors.client.AsyncORS(base_url=url, api_key=key)
    try:
        yield Client(lambda name: cast(EnvironmentClient, client.environment(name)))
    finally:
        for session in client.environments._clients.values():  # the package has no close method for async users
            await session.close()


@asynccontextmanager
async def _openreward(url: str, key: str | None) -> AsyncIterator[Client]:
    client = AsyncOpenReward(api_key=key)
    try:
        yield Client(lambda name: cast(EnvironmentClient, client.environments.get(name, variant=name, base_url=url)))
    finally:
        await client.environments.aclose()


def _ors_task(environment: str, spec: Mapping[str, Any]) -> Any:
    return ors.client.Task(environment_name=environment, task_spec=spec)


def _openreward_task(environment: str, spec: Mapping[str, Any]) -> Any:
    return OpenRewardTask(server_name=environment, environment_name=environment, task_spec=spec, namespace=None)


ORS = Sdk(
    name="ors",
    refused=ors.client.ToolCallError,
    failed=RuntimeError,
    connect=_ors,
    task=_ors_task,
    secrets=dict,
)
OPENREWARD = Sdk(
    name="openreward",
    refused=ToolCallError,
    failed=ToolFailed,
    connect=_openreward,
    task=_openreward_task,
    secrets=lambda plain: {name: (value, ["localhost"]) for name, value in plain.items()},
)
SDKS = {sdk.name: sdk for sdk in (ORS, OPENREWARD)}


def text(output: Output) -> str:
    """Return the text of an output that has one text block."""
    assert [block.type for block in output.blocks] == ["text"], output
    return str(output.blocks[0].text)


def names(tools: Sequence[Any]) -> list[str]:
    """Return the names of listed tools."""
    return [tool.name for tool in tools]
