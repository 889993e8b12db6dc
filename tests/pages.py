"""The fenced blocks of the user documentation, and how the tests treat each block.

A comment right above a fence in the page selects the treatment:

* no comment: a block in ``sh`` or ``python`` is run as it is printed (`tests/wire/test_readme.py`);
* ``<!-- file: NAME -->``: the block is the content of the file NAME when the page's next blocks run;
* ``<!-- run by tests/… -->``, or another text that names a test file: these tests run the block;
* ``<!-- not run: REASON -->``; for all following blocks of the page: ``<!-- none of these is run: REASON -->``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[1]
PAGES = tuple(
    str(path.relative_to(PROJECT))
    for path in (
        PROJECT / "README.md",
        *sorted((PROJECT / "docs").glob("*.md")),
        PROJECT / "clients" / "python" / "README.md",
        PROJECT / "env_images" / "base" / "README.md",
        PROJECT / "deploy" / "README.md",
        PROJECT / "examples" / "README.md",
    )
)
RUN = frozenset(("sh", "python"))
"""Languages whose blocks are run unless a comment says otherwise."""
_FENCE = re.compile(
    r"(?:^<!-- (?P<note>(?:(?!-->).)*?) -->\n+)?^```(?P<language>\S*)[^\n]*\n(?P<text>.*?)^```$", re.M | re.S
)
_WIDE = re.compile(r"^<!-- none of these is run: (?P<reason>.+?) -->$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    text: str
    note: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """Name of the file whose content the block is. Empty if there is none."""
        return self.note.removeprefix("file: ") if self.note.startswith("file: ") else ""

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.note


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of *page*, a path relative to the project's root."""
    text = (PROJECT / page).read_text("utf-8")
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start("language")) + 1
        wide = _WIDE.search(text, 0, match.start())
        note = match["note"] or (f"not run: {wide['reason']}" if wide else "")
        found.append(Block(page, line, match["language"], match["text"], note))
    return found
