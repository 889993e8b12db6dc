"""The noop environment on an official server: the reference of the comparison.

Run as ``server.py ors`` or ``server.py openreward``, with the package's own HTTP parser and event loop: h11 and
asyncio's. With ``fast`` as a second word, uvicorn may use uvloop and httptools. They are installed because the gateway
needs them, and uvicorn selects them automatically.
"""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

PACKAGES = {"ors": "ors", "openreward": "openreward.environments"}
PROMPT = "Say something."

if "fast" not in sys.argv[2:]:
    # An import of these now fails, as in an installation of the package and its requirements alone.
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # the import system's own way to mark a module as missing
    sys.modules["httptools"] = None  # type: ignore[assignment]  # as above

sdk: Any = importlib.import_module(PACKAGES[sys.argv[1]])


class Text(BaseModel):
    """The input of the tool."""

    text: str


class Noop(sdk.Environment):  # type: ignore[misc]  # the base class is chosen at run time
    """One task with a fixed prompt."""

    @classmethod
    def list_splits(cls) -> list[str]:
        """Return the only split."""
        return ["train"]

    @classmethod
    def list_tasks(cls, split: str) -> list[Any]:
        """Return the only task."""
        return [{"id": "only"}]

    def get_prompt(self) -> Sequence[Any]:
        """Return the fixed prompt."""
        return [sdk.TextBlock(text=PROMPT)]

    @sdk.tool  # type: ignore[untyped-decorator]  # it is chosen at run time
    async def echo(self, params: Text) -> sdk.ToolOutput:
        """Give the text back."""
        return sdk.ToolOutput(blocks=[sdk.TextBlock(text=params.text)], reward=0.0)


if __name__ == "__main__":
    sdk.Server([Noop]).run(host="127.0.0.1", port=0)
