"""A model's texts and a shell's observations: the Think/Act form, and the display of outputs.

This module runs no program. A text without a usable action is not an error of the request: it gets a reminder and costs
a turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

SPECIAL_TOKENS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")
"""Tokens that tokenizers leave at the end of a decoded turn."""

LONGEST_OBSERVATION_CHARS = 800
"""AgentBench's limit in characters, not counting the line in front of the output."""
KEPT_OBSERVATION_CHARS = 780
CUT = "\n[truncated because the output is too long]"

EMPTY = "The output of the OS is empty."
REMINDER = (
    "Error: no action was found in your text, so nothing was done. Write one line that starts with `Think:`, then one "
    "action: `Act: bash` followed by a block that opens with ```bash and closes with ```, or `Act: answer(...)` on one "
    "line, or `Act: finish`."
)

_THOUGHT = re.compile(r"Think:\s*(.+)")
_ACT = re.compile(r"Act:\s*(.+)")
_CSI = r"\x1b\[[0-?]*[ -/]*[@-~]"
# OSC, DCS and the like, to their terminator or to the line's end, because binary output has some without a terminator.
_STRING = r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
_SHORT = r"\x1b[ -/]*[0-~]?"
_ESCAPE = re.compile(f"{_CSI}|{_STRING}|{_SHORT}")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Act:
    """One action of a model."""

    kind: Literal["bash", "answer", "finish"]
    content: str
    """The command, the answer, or an empty text for `finish`."""
    thought: str = ""


def parse(text: str) -> Act | None:
    """Read a model's turn; return None if it has no usable action.

    The last valid `Act:` counts, and for `bash` every block of the whole text, joined by an empty line.
    """
    text = without_special_tokens(text).replace("\r\n", "\n")
    thought = "\n".join(_THOUGHT.findall(text))
    for value in reversed(_ACT.findall(text)):
        kind = value.lower()
        if kind.startswith("bash"):
            script = "\n\n".join(blocks(text))
            return Act("bash", script, thought) if script.strip() else None
        if kind.startswith("finish"):
            return Act("finish", "", thought)
        if kind.startswith("answer") and 0 <= (start := value.find("(")) < (end := value.rfind(")")):
            return Act("answer", value[start + 1 : end], thought)
    return None


def blocks(text: str) -> list[str]:
    """Return the contents of all closed ```` ```bash ```` blocks.

    The text is read line by line, because a pattern takes minutes for a text of only opening fences.
    """
    found: list[str] = []
    opened: list[str] | None = None
    for line in text.split("\n"):
        if opened is None:
            opened = [] if line.strip() == "```bash" else None
        elif line.strip() == "```":
            found.append("\n".join(opened))
            opened = None
        else:
            opened.append(line)
    return found


def without_special_tokens(text: str) -> str:
    """Strip white space and special tokens off the end, however many there are."""
    text = text.rstrip()
    while token := next((token for token in SPECIAL_TOKENS if text.endswith(token)), None):
        text = text.removesuffix(token).rstrip()
    return text


def plain(output: bytes) -> str:
    """Return a terminal's output as text: UTF-8 with replacements, LF, no escape sequences, no control characters."""
    text = output.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def observation(output: str, *, notice: str = "", newlines: int = 1) -> str:
    """Return an output for display, cut at `LONGEST_OBSERVATION_CHARS`; the line *notice* follows it and is never cut.

    *newlines* is the number of line ends before the output: 1, or 2 as in AgentBench's own code. The newline at the end
    of nearly every output is omitted.
    """
    output = output.removesuffix("\n")
    if len(output) > LONGEST_OBSERVATION_CHARS:
        output = output[:KEPT_OBSERVATION_CHARS] + CUT
    shown = f"The output of the OS:{newlines * chr(10)}{output}" if output.strip("\n") else EMPTY
    return f"{shown}\n{notice}" if notice else shown
