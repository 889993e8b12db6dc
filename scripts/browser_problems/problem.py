"""A problem: its pages, its instruction, how it is judged, a right solution and a wrong one.

Solutions name elements as the agent sees them: ``click({button 'Save'})`` is the click on the first element whose line
in the accessibility tree goes on so; ``{link 'Open'#2}`` is the second. They go into no task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem; its task's id is ``custom/<slug>``."""

    slug: str
    level: int
    """1 (easy) to 3 (hard)."""
    tags: Sequence[str]
    text: str
    config: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    solution: Sequence[str]
    """Actions, one step each; the last one has the reward 1."""
    wrong: Sequence[str] = ("send_msg_to_user('It is done.')",)
    """Actions that end the episode with 0."""


@dataclass(frozen=True, kw_only=True)
class MiniwobProblem:
    """One official MiniWoB task; pages, goal and judge are its own."""

    name: str
    level: int
    tags: Sequence[str] = field(default=())


def page(title: str, body: str, script: str = "") -> str:
    """Write a page."""
    code = f"<script>{script}</script>" if script else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px sans-serif;margin:20px}td,th{padding:3px 10px;text-align:left}"
        "input,select,textarea,button{font:inherit;margin:2px}"
        ".card{border:1px solid #888;padding:6px;margin:4px}</style>"
        f"</head><body>{body}{code}</body></html>"
    )


BY_ID = "const by = id => document.getElementById(id);"
"""What most scripts begin with."""
