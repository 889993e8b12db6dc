"""Tools: the ``@tool`` decorator, and each tool's schema, checks and execution."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, overload

from envserver.content import StepResult
from envserver.errors import ConfigError, InvalidInput
from envserver.http.json_text import encode_result
from envserver.schema.signatures import parameters_of
from envserver.schema.validators import Fault, Shape, Str, fault

Mode: TypeAlias = Literal["serial", "concurrent", "exclusive"]
"""How a call runs next to the session's other calls. ``serial``: alone among serial calls, in arrival order.
``concurrent``: next to any others. ``exclusive``: with no other call."""
Ran: TypeAlias = tuple[bytes, float | None, bool]
"""A result's JSON, its reward, and whether it ends the episode."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARK = "__envserver_tool__"


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The options of ``@tool``."""

    concurrent: bool = False
    exclusive: bool = False
    terminal: bool = False
    inline: bool = False
    listed: bool = True


@overload
def tool(function: _Function, /) -> _Function: ...
@overload
def tool(
    *,
    concurrent: bool = False,
    exclusive: bool = False,
    terminal: bool = False,
    inline: bool = False,
    listed: bool = True,
) -> Callable[[_Function], _Function]: ...
def tool(
    function: Any = None,
    /,
    *,
    concurrent: bool = False,
    exclusive: bool = False,
    terminal: bool = False,
    inline: bool = False,
    listed: bool = True,
) -> Any:
    """Offer a method to the agent: its name, docstring and signature become the tool's name, description and schema.

    Args:
        concurrent: Run next to the session's other calls instead of one at a time.
        exclusive: Wait for all running calls of the session and hold back new ones.
        terminal: Hide the tool from the tool list. A harness passes the agent's final message to it. Implies
            *exclusive*.
        inline: Run on the server's own loop, which is fast. The code must never block, not even for a millisecond.
        listed: False for a method that only ``task_tools`` may offer.

    Raises:
        ConfigError: *concurrent* is combined with *exclusive* or *terminal*.
    """
    if concurrent and (exclusive or terminal):
        raise ConfigError("a tool cannot be concurrent and exclusive (or terminal) at once")
    options = ToolOptions(concurrent, exclusive or terminal, terminal, inline, listed)

    def mark(marked: _Function) -> _Function:
        setattr(marked, _MARK, options)
        return marked

    return mark if function is None else mark(function)


class Tool:
    """A tool, ready to be listed, checked and run."""

    def __init__(self, name: str, function: Callable[..., Any], *, bound: bool) -> None:
        options: ToolOptions = getattr(function, _MARK, ToolOptions())
        self.name = name
        self.function = function
        self.is_bound = bound
        """Whether *function* already has its ``self``. Otherwise its first argument is the environment."""
        self.description = (inspect.getdoc(function) or "").strip()
        self.listed = options.listed
        self.terminal = options.terminal
        self.inline = options.inline
        self.mode: Mode = "exclusive" if options.exclusive else "concurrent" if options.concurrent else "serial"
        self.is_async = inspect.iscoroutinefunction(function)
        self._shape = Shape(parameters_of(function, bound=bound))

    def spec(self) -> dict[str, Any]:
        """Return the tool's wire form with its three keys. ``input_schema`` is null if the tool takes no arguments."""
        schema = self._shape.schema() if self._shape.fields else None
        return {"name": self.name, "description": self.description, "input_schema": schema}

    def terminal_spec(self) -> dict[str, Any]:
        """Return the wire form of a terminal tool. ``arg`` is the argument that receives the final message."""
        names = [field.name for field in self._shape.fields]
        return {"name": self.name, "arg": names[0] if names else None, "description": self.description}

    def input_of(self, text: str) -> dict[str, Any] | None:
        """Return the tool input for a free text, or None if the text cannot be an input.

        The text becomes the only required argument, or else the only argument. That argument must not be a list or an
        object.
        """
        fields = [field for field in self._shape.fields if field.required] or list(self._shape.fields)
        if len(fields) != 1 or fields[0].node.schema().get("type") in ("array", "object"):
            return None
        return {fields[0].name: text if isinstance(fields[0].node, Str) else text.strip()}

    def takes(self) -> int:
        return len(self._shape.fields)

    def arguments(self, given: dict[str, Any], *, strict: bool = False) -> dict[str, Any]:
        """Check *given* against the signature and return the arguments. Ignore unknown keys unless *strict*.

        Raises:
            InvalidInput: *given* does not match the signature.
        """
        faults: list[Fault] = []
        if strict:
            names = {field.name for field in self._shape.fields}
            extra = [key for key in given if key not in names]
            faults = [fault("extra_forbidden", (key,), "Extra inputs are not permitted", given[key]) for key in extra]
        if not self._shape.fields and not faults:
            return {}
        arguments: dict[str, Any] = self._shape.check(given, (), faults)
        if faults:
            raise InvalidInput(f"Tool input validation error: {faults}")
        return arguments

    def run(self, environment: object, arguments: dict[str, Any]) -> Ran:
        """Run a plain tool of *environment* in the calling thread and encode its result."""
        return self._written(self._called(environment, arguments))

    async def run_async(self, environment: object, arguments: dict[str, Any]) -> Ran:
        """Run an asynchronous tool of *environment* on the calling loop and encode its result."""
        return self._written(await self._called(environment, arguments))

    def _called(self, environment: object, arguments: dict[str, Any]) -> Any:
        return self.function(**arguments) if self.is_bound else self.function(environment, **arguments)

    def _written(self, result: object) -> Ran:
        if not isinstance(result, StepResult):
            if hasattr(result, "close"):
                result.close()  # a coroutine that is never awaited would warn
            raise TypeError(f"{self.name!r} returned {type(result).__name__}; expected {StepResult.__name__}")
        output = result.wire()
        return encode_result(output), output["reward"], output["finished"]


def tools_of(cls: type) -> dict[str, Tool]:
    """Return the tools of an environment class, sorted by name, without the terminal tool and unlisted tools."""
    return {name: found for name, found in _all(cls).items() if found.listed and not found.terminal}


def terminal_of(cls: type, named: str | None) -> Tool | None:
    """Return the class's terminal tool: the marked tool, or the tool *named*.

    Raises:
        ConfigError: There are several, *named* is not a tool, or the tool takes more than one argument.
    """
    tools = _all(cls)
    if named is not None and named not in tools:
        raise ConfigError(f"{cls.__name__}.terminal_tool: {named!r} is not a tool")
    found = [candidate for candidate in tools.values() if candidate.terminal or candidate.name == named]
    if len(found) > 1:
        raise ConfigError(f"{cls.__name__}: several terminal tools: {', '.join(one.name for one in found)}")
    if found and found[0].takes() > 1:
        raise ConfigError(f"{cls.__name__}.{found[0].name}: a terminal tool takes one argument or none")
    if found:
        found[0].mode = "exclusive"
    return found[0] if found else None


def task_tools_of(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Build tools from the result of ``task_tools``: bound methods or functions, in their order.

    Raises:
        ConfigError: Two tools have the same name, or a signature cannot be read.
    """
    tools: dict[str, Tool] = {}
    for function in functions:
        name = function.__name__
        if name in tools:
            raise ConfigError(f"task_tools: two tools are called {name!r}")
        tools[name] = Tool(name, function, bound=True)
    return tools


def _all(cls: type) -> dict[str, Tool]:
    marked = {name: getattr(cls, name, None) for name in dir(cls)}
    return {
        name: Tool(name, member, bound=isinstance(inspect.getattr_static(cls, name), staticmethod | classmethod))
        for name, member in marked.items()
        if callable(member) and hasattr(member, _MARK)
    }
