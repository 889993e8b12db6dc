"""The API of an environment's author: a subclass of ``Environment``, and the ``Task`` that each session gets.

Each session has its own instance. Plain ``def`` code runs in a thread, and ``async def`` code runs on a loop apart from
the server's. Code that blocks therefore delays neither the server nor another session.
"""

import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar

from envserver.content import GroupCandidate, GroupScore, Message, Prompt, Split, ToolCall
from envserver.tasks.files import TaskFiles

if TYPE_CHECKING:  # a server without sandboxes does not import their modules
    from envserver.sandbox import Limits, Sandboxes

_Value = TypeVar("_Value")
STEP_ENDS_AT: ContextVar[float] = ContextVar("envserver_step_ends_at", default=math.inf)
"""The end of the running step by ``time.monotonic``, as the client's limit sets it; infinite without a limit."""
_ANSWER_SHARE, _ANSWER_S = 0.1, 5.0
"""Share of a step's remaining time, and the most seconds, that are left for its answer."""
Maybe: TypeAlias = _Value | Awaitable[_Value]
"""Return type of a hook that may be written as ``def`` or as ``async def``."""


class Task(Mapping[str, Any]):
    """A task as data: a frozen view of its JSON object, read like a mapping (``task.get("hint")``).

    The environment's author chooses the keys and values. The server reads only the id.
    """

    __slots__ = ("_id", "_spec")

    def __init__(self, spec: Mapping[str, Any], *, task_id: str | None = None) -> None:
        named = spec.get("id", spec.get("task_id"))
        self._spec = dict(spec)
        self._id = str(named) if isinstance(named, str | int) else task_id

    @property
    def id(self) -> str | None:
        """The object's ``id`` or ``task_id``, else ``<split>-<index>`` if the task was opened by split and index."""
        return self._id

    @property
    def spec(self) -> dict[str, Any]:
        """A new plain dict with the task's keys and values."""
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
    """One episode on one task: override ``reset`` (or ``messages``) and mark at least one method with ``@tool``.

    A subclass may override ``__init__``. It takes no arguments, and ``task``, ``seed``, ``config`` and ``secrets`` are
    already set.
    """

    name: ClassVar[str] = ""
    """The environment's name on the wire. Empty: the class's name in lower case."""
    default_tool: ClassVar[str | None] = None
    """The tool that receives free text and dict actions. None: the only tool, if there is exactly one."""
    terminal_tool: ClassVar[str | None] = None
    """The tool that receives the agent's final message, as ``@tool(terminal=True)`` marks it."""
    lanes: ClassVar[Literal["own", "shared"]] = "own"
    """``own``: each session runs its ``async def`` code on a loop of its own while enough loops are free. ``shared``:
    all sessions use one loop, so that they can share a connection pool. Blocking code on it delays the class's other
    sessions, but never the server."""
    sandbox_limits: ClassVar["Limits | None"] = None
    """Limits of each session's sandbox. None: sessions are plain objects without a sandbox. With limits, all
    ``async def`` code of the class shares one lane that lives as long as the server, as with ``lanes = "shared"``."""
    sandboxes: ClassVar["Sandboxes"]
    """The source of the class's sandboxes. The server sets it before the first session if *sandbox_limits* is set. Use
    it in ``async def`` code only."""
    config_keys: ClassVar[Sequence[str]] = ()
    """Keys of *config* that the class reads. The gateway refuses an OpenEnv client's reset with any other key."""
    env_types: ClassVar[Sequence[str]] = ()
    """Further names by which tasks may refer to this environment, as ``browsergym`` refers to ``browser``."""
    resolves_ids: ClassVar[bool] = True
    """Whether the server refuses a task ``{"id": …}`` that it cannot resolve to a whole task. False: the server passes
    the id on as it is, for classes that resolve ids themselves."""
    task_files: ClassVar[TaskFiles] = TaskFiles(None)
    """The class's task files. The server sets them at start."""

    task: Task
    """The task of this episode."""
    seed: int
    """The trainer's seed, or a random number."""
    config: Mapping[str, Any]
    """Free JSON from the trainer for this episode."""
    secrets: Mapping[str, str]
    """Secrets for this episode only. A tool must never return them."""
    client_state: Mapping[str, Any] = MappingProxyType({})
    """JSON that OpenEnv's ``state()`` shows next to the episode's id, task and number of steps. Assign it on each
    change."""

    @property
    def step_left_s(self) -> float:
        """Seconds that a tool may still use in this step, at least 0.1; infinite if the client set no limit.

        A tool with a limit of its own, such as a command's, uses the smaller of both. If a step takes longer than the
        client's limit, the episode is lost. A judge does not use it: a judgement without its time would be wrong.
        """
        left_s = STEP_ENDS_AT.get() - time.monotonic()
        return max(0.1, left_s - min(_ANSWER_S, left_s * _ANSWER_SHARE))

    def reset(self, task: Task, *, seed: int) -> Maybe[Prompt | None]:
        """Prepare the episode and return the agent's first prompt."""
        raise NotImplementedError

    def messages(self) -> Maybe[Sequence[Message]]:
        """Return the opening as a conversation. Called once after ``reset``, which may then return None."""
        raise NotImplementedError

    def close(self) -> Maybe[None]:
        """Release the resources of ``reset``. Called once, also after a failed ``reset`` or during a call."""

    def task_tools(self, task: Task) -> Maybe[Sequence[Callable[..., Any]]]:
        """Return further tools for this task alone: bound methods or functions. Called once after ``reset``."""
        return ()

    def parse_text(self, text: str) -> Maybe[ToolCall | str]:
        """Parse an agent's free text into a tool call. Return a string instead to show the agent an error.

        Without an override, the text becomes the default tool's only required argument, or else its only argument. An
        argument that is a list or an object is not filled.
        """
        raise NotImplementedError

    def score_group(self, candidates: Sequence[GroupCandidate]) -> Maybe[Sequence[GroupScore | float]]:
        """Judge the rollouts of a group against each other. Return one score each, in the same order."""
        raise NotImplementedError

    @classmethod
    def check_task(cls, task: Task) -> Maybe[None]:
        """Raise ``ValueError`` if no episode can begin on *task*, which a trainer wrote into its request.

        The request is then refused (400) with the error's text. Tasks of task files and of ``tasks`` are not checked: a
        mistake in these is the author's, and no trainer can correct it.
        """

    @classmethod
    def splits(cls) -> Sequence[Split | str]:
        """Return the splits. Called once, when the server starts."""
        return cls.task_files.splits

    @classmethod
    def tasks(cls, split: str) -> Maybe[Sequence[Mapping[str, Any]]]:
        """Return the tasks of a split, always in the same order.

        For very large sets, override ``num_tasks`` and ``get_task`` instead. The server then never lists the whole
        split.
        """
        return cls.task_files.read(split, 0, cls.task_files.count(split))

    @classmethod
    def num_tasks(cls, split: str) -> Maybe[int]:
        """Return the number of tasks in a split."""
        return cls.task_files.count(split)

    @classmethod
    def get_task(cls, split: str, index: int) -> Maybe[Mapping[str, Any]]:
        """Return the task at *index*, from 0 to below ``num_tasks``."""
        return cls.task_files.read(split, index, index + 1)[0]
