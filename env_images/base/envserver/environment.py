"""What an environment's author writes, a subclass of ``Environment``, and the ``Task`` that it gets.

An instance is one session. Code in plain ``def`` runs in a thread, code in ``async def`` on a loop beside the
server's: neither can hold up the server or another session, even where it blocks.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

from envserver.content import GroupCandidate, GroupScore, Message, Prompt, Split, ToolCall
from envserver.tasks.files import TaskFiles

if TYPE_CHECKING:  # a server without sandboxes imports nothing of them
    from envserver.sandbox import Limits, Sandboxes

_Value = TypeVar("_Value")
Maybe: TypeAlias = _Value | Awaitable[_Value]
"""What a hook returns, which may be written as ``def`` or as ``async def``."""


class Task(Mapping[str, Any]):
    """One problem as data: a frozen view of a task's JSON object, read like a mapping (``task.get("hint")``).

    The values are the environment author's own; the server never looks into them but for the id.
    """

    __slots__ = ("_id", "_spec")

    def __init__(self, spec: Mapping[str, Any], *, task_id: str | None = None) -> None:
        named = spec.get("id", spec.get("task_id"))
        self._spec = dict(spec)
        self._id = str(named) if isinstance(named, str | int) else task_id

    @property
    def id(self) -> str | None:
        """The object's own ``id`` or ``task_id``; else ``<split>-<index>`` where it was opened by reference."""
        return self._id

    @property
    def spec(self) -> dict[str, Any]:
        """The task as a new plain dict."""
        return dict(self._spec)

    def __getitem__(self, key: str) -> Any:
        return self._spec[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spec)

    def __len__(self) -> int:
        return len(self._spec)

    def __repr__(self) -> str:
        return f"<Task {self._id}>"


class Environment:
    """One episode on one task; override ``reset`` (or ``messages``) and mark at least one method with ``@tool``.

    ``__init__`` may be overridden; it takes nothing and finds ``task``, ``seed``, ``config`` and ``secrets`` set.
    """

    name: ClassVar[str] = ""
    """The wire name; empty: the class's name in lower case."""
    default_tool: ClassVar[str | None] = None
    """The tool that free text and dict actions go to; None: the only tool, where there is just one."""
    terminal_tool: ClassVar[str | None] = None
    """The tool that takes the agent's final message; ``@tool(terminal=True)`` says the same."""
    lanes: ClassVar[Literal["own", "shared"]] = "own"
    """``shared``: all sessions' ``async def`` code on one loop, as it is needed for a common connection pool. Code
    that blocks there holds up the other sessions of the class, though never the server."""
    sandbox_limits: ClassVar["Limits | None"] = None
    """Bounds of a session's sandbox; None: sessions are objects, there is no sandbox. With limits all of the class's
    ``async def`` code is on one lane that lives as long as the server, as with ``lanes = "shared"``."""
    sandboxes: ClassVar["Sandboxes"]
    """Where the class's sandboxes come from; set by the server where *sandbox_limits* is given, before any session
    begins. To be used in ``async def`` code only."""
    config_keys: ClassVar[Sequence[str]] = ()
    """Keys of *config* that the class reads. An OpenEnv client's reset with another key is refused."""
    env_types: ClassVar[Sequence[str]] = ()
    """Other names that tasks may call this environment by, as ``browsergym`` is one of ``browser``."""
    resolves_ids: ClassVar[bool] = True
    """A task that is nothing but ``{"id": …}`` is one that the server looks up and hands over whole; one that it does
    not find is refused. False: such a task is passed on where it is not found, for classes that know ids themselves."""
    task_files: ClassVar[TaskFiles] = TaskFiles(None)
    """The class's task files; set by the server as it starts."""

    task: Task
    """This episode's task."""
    seed: int
    """From the trainer, or drawn at random."""
    config: Mapping[str, Any]
    """Free JSON from the trainer for this episode."""
    secrets: Mapping[str, str]
    """Secrets for this episode only; never put them into what a tool returns."""
    client_state: Mapping[str, Any] = MappingProxyType({})
    """JSON that OpenEnv's ``state()`` shows beside the episode's id, task and number of steps; set it as it changes."""

    def reset(self, task: Task, *, seed: int) -> Maybe[Prompt | None]:
        """Prepare the episode and say what the agent is told first."""
        raise NotImplementedError

    def messages(self) -> Maybe[Sequence[Message]]:
        """Give the opening as a conversation, asked once after ``reset``; ``reset`` may then return None."""
        raise NotImplementedError

    def close(self) -> Maybe[None]:
        """Give back what ``reset`` took. Called once, also after a failed ``reset`` and while a call still runs."""

    def task_tools(self, task: Task) -> Maybe[Sequence[Callable[..., Any]]]:
        """Offer further tools for this task alone: bound methods or functions, asked once after ``reset``."""
        return ()

    def parse_text(self, text: str) -> Maybe[ToolCall | str]:
        """Understand an agent's free text as a tool call; a string instead is the error that the agent reads.

        Without an override the text fills the only required argument of the default tool, else its only one, unless
        that is a list or an object.
        """
        raise NotImplementedError

    def score_group(self, candidates: Sequence[GroupCandidate]) -> Maybe[Sequence[GroupScore | float]]:
        """Judge a group's rollouts against each other: one score each, in their order."""
        raise NotImplementedError

    @classmethod
    def splits(cls) -> Sequence[Split | str]:
        """Name the splits; asked once, as the server starts."""
        return cls.task_files.splits

    @classmethod
    def tasks(cls, split: str) -> Maybe[Sequence[Mapping[str, Any]]]:
        """List a split's tasks, always in the same order.

        For very large sets override ``num_tasks`` and ``get_task`` instead; then the whole is never listed.
        """
        return cls.task_files.read(split, 0, cls.task_files.count(split))

    @classmethod
    def num_tasks(cls, split: str) -> Maybe[int]:
        """Count a split's tasks."""
        return cls.task_files.count(split)

    @classmethod
    def get_task(cls, split: str, index: int) -> Maybe[Mapping[str, Any]]:
        """Give the task at *index*, which is within 0 and ``num_tasks``."""
        return cls.task_files.read(split, index, index + 1)[0]
