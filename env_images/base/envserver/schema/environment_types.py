"""The environment classes as the server sees them: checked once at start, prepared for every request."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

from envserver.content import BLOCK_TYPES, Split
from envserver.environment import Environment
from envserver.errors import ConfigError, describe
from envserver.execution.runner import Place
from envserver.http.json_text import encode
from envserver.tasks.files import TaskFiles
from envserver.tools import Tool, terminal_of, tools_of

OPERATIONS = frozenset(
    ("tools", "splits", "tasks", "num_tasks", "task", "task_range", "prompt", "task_tools", "call", "messages")
) | {"score_group", "registered", "state"}
"""Second path segments. They are also served without a first segment."""
ROOTS = frozenset(
    ("health", "version", "ping", "list_environments", "create", "delete", "create_session", "delete_session")
) | {"docs", "redoc", "openapi.json", "sessions"}
"""First path segments that are not environments."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


class Kind:
    """An environment that the server offers."""

    def __init__(self, cls: type[Environment], *, tasks: str | None) -> None:
        """
        Raises:
            ConfigError: The class cannot be served. The message states the reason.
        """
        self.cls = cls
        self.name = (cls.name or cls.__name__).lower()
        self.env_types = (self.name, *(name for name in cls.env_types if name != self.name))
        """Accepted values of ``env_type`` in a task for this environment."""
        try:
            _check_name(self.name)
            if cls.reset is Environment.reset and cls.messages is Environment.messages:
                raise ConfigError("it has no prompt: override reset or messages")
            cls.task_files = TaskFiles.of(tasks, self.name)
            _check_task_hooks(cls)
            self.splits = _splits_of(cls)
            self.terminal = terminal_of(cls, cls.terminal_tool)
            hidden = self.terminal.name if self.terminal else None
            self.listed = {name: one for name, one in tools_of(cls).items() if name != hidden}
            self.tools = self.listed | ({self.terminal.name: self.terminal} if self.terminal else {})
            if not self.tools:
                raise ConfigError("it has no tool: mark a method with @tool")
            self.default_tool = self._find_default()
        except ConfigError as error:
            raise ConfigError(f"environment {cls.__name__}: {error}") from error
        self.has_init = cls.__init__ is not Environment.__init__
        self.checks_tasks = overrides(cls, "check_task")
        self.has_reset = cls.reset is not Environment.reset
        self.has_messages = cls.messages is not Environment.messages
        self.has_task_tools = cls.task_tools is not Environment.task_tools
        self.has_close = cls.close is not Environment.close
        self.parses_text = cls.parse_text is not Environment.parse_text
        self.scores_groups = cls.score_group is not Environment.score_group
        self.place = Place()
        """Place of the class's own hooks, and of its sessions' code if they share a lane."""
        self.shares_lane = cls.lanes == "shared" or cls.sandbox_limits is not None
        """Whether all sessions' asynchronous code runs on one loop. Sandboxes require one loop."""
        self.tools_json = self.list_tools(())
        self.splits_json = encode([split.wire() for split in self.splits])

    def list_tools(self, further: Sequence[Tool]) -> bytes:
        """Return the tool list as JSON: the environment's own tools, then a task's *further* tools."""
        listing: dict[str, Any] = {
            "tools": [one.spec() for one in (*self.listed.values(), *further)],
            "terminal_tool": self.terminal.terminal_spec() if self.terminal else None,
            "supports_score_group": self.cls.score_group is not Environment.score_group,
            "message_block_types": list(BLOCK_TYPES),
        }
        return encode(listing)

    def _find_default(self) -> Tool | None:
        named = self.cls.default_tool
        if named is not None and named not in self.tools:
            raise ConfigError(f"default_tool: {named!r} is not a tool")
        if named is not None:
            return self.tools[named]
        return next(iter(self.tools.values())) if len(self.tools) == 1 else None


def kinds_of(classes: Sequence[type[Environment]], *, tasks: str | None) -> dict[str, Kind]:
    """Prepare *classes*. The first is the default.

    Raises:
        ConfigError: There is no class, two have the same name, or a class cannot be served.
    """
    kinds: dict[str, Kind] = {}
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, Environment)):
            raise ConfigError(f"serve: {cls!r} is not a subclass of Environment")
        kind = Kind(cls, tasks=tasks)
        if kind.name in kinds:
            raise ConfigError(f"two environments are called {kind.name!r}")
        kinds[kind.name] = kind
    if not kinds:
        raise ConfigError("serve: name at least one environment")
    return kinds


def overrides(cls: type[Environment], hook: str) -> bool:
    """Return True if *cls* has its own class-level *hook*."""
    return getattr(cls, hook).__func__ is not getattr(Environment, hook).__func__


def _check_task_hooks(cls: type[Environment]) -> None:
    has_index = {overrides(cls, "num_tasks"), overrides(cls, "get_task")}
    if has_index == {True, False} and not overrides(cls, "tasks"):
        raise ConfigError("num_tasks and get_task must be overridden together, or tasks beside them")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"the name {name!r} must be letters, digits, '.', '_' or '-'")
    if name in ROOTS or name in OPERATIONS:
        raise ConfigError(f"the name {name!r} is already the path of a route: choose another name")


def _splits_of(cls: type[Environment]) -> list[Split]:
    try:
        declared = cls.splits()
    except Exception as error:  # the author's code: any exception ends the start with a message
        raise ConfigError(f"splits() failed: {describe(error)}") from error
    if inspect.isawaitable(declared) or isinstance(declared, str):
        raise ConfigError("splits() must be a plain classmethod that returns a list")
    splits = [Split.of(split) for split in declared]
    names = [split.name for split in splits]
    if not splits:
        raise ConfigError("it has no split")
    if len(set(names)) < len(names):
        raise ConfigError(f"two splits have one name: {', '.join(names)}")
    return splits
