"""The noop environment on an official server: the yardstick.

Run as ``server.py ors`` or ``server.py openreward``: with the HTTP parser and the event loop that the package itself
brings, which are h11 and asyncio's. With ``fast`` as a second word it may use uvloop and httptools, which are there
because the gateway needs them, and which uvicorn takes by itself where it finds them.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

PACKAGES = {"ors": "ors", "openreward": "openreward.environments"}
PROMPT = "Say something."

if "fast" not in sys.argv[2:]:
    # An import of these now fails, as it does where only the package and what it requires is installed.
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # the import system's own way to say "not there"
    sys.modules["httptools"] = None  # type: ignore[assignment]  # as above

sdk: Any = importlib.import_module(PACKAGES[sys.argv[1]])


class Text(BaseModel):
    """What the tool takes."""

    text: str


class Noop(sdk.Environment):  # type: ignore[misc]  # the base class is chosen at run time
    """One task, which says nothing."""

    @classmethod
    def list_splits(cls) -> list[str]:
        """Name the one split."""
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        """List the one task."""
        return [{"id": "only"}]

    def get_prompt(self) -> Sequence[Any]:
        """Do nothing."""
        return [sdk.TextBlock(text=PROMPT)]

    @sdk.tool  # type: ignore[untyped-decorator]  # it is chosen at run time
    async def echo(self, params: Text) -> sdk.ToolOutput:
        """Give the text back."""
        return sdk.ToolOutput(blocks=[sdk.TextBlock(text=params.text)], reward=0.0)


if __name__ == "__main__":
    sdk.Server([Noop]).run(host="127.0.0.1", port=0)
