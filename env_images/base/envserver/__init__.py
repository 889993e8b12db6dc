"""A lean environment server for the Open Reward Standard (ORS): subclass ``Environment`` and call ``serve``."""

from envserver.content import (
    Block,
    GroupCandidate,
    GroupScore,
    ImageBlock,
    Message,
    Prompt,
    ReasoningBlock,
    Split,
    StepResult,
    TextBlock,
    ToolCall,
    ToolCallBlock,
    ToolResultBlock,
)
from envserver.environment import Environment, Task
from envserver.errors import SessionFailed, SessionLost, ToolError
from envserver.server import serve
from envserver.tasks import openenv_names as _openenv_names
from envserver.tools import tool
from envserver.version import VERSION as __version__

_openenv_names.install()  # the only side effect of the import: task modules use these names before a server exists

__all__ = [
    "Block",
    "Environment",
    "GroupCandidate",
    "GroupScore",
    "ImageBlock",
    "Message",
    "Prompt",
    "ReasoningBlock",
    "SessionFailed",
    "SessionLost",
    "Split",
    "StepResult",
    "Task",
    "TextBlock",
    "ToolCall",
    "ToolCallBlock",
    "ToolError",
    "ToolResultBlock",
    "__version__",
    "serve",
    "tool",
]
