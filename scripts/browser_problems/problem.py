"""A problem: its pages, its instruction, its evaluation, a right solution and a wrong solution.

Solutions name elements as the agent sees them. ``click({button 'Save'})`` clicks the first element whose line in the
accessibility tree continues with that text; ``{link 'Open'#2}`` is the second. No task contains a solution.
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
    """The level from 1 (easy) to 3 (hard)."""
    tags: Sequence[str]
    text: str
    config: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    solution: Sequence[str]
    """Actions, one step each; the last action has the reward 1."""
    wrong: Sequence[str] = ("send_msg_to_user('It is done.')",)
    """Actions that end the episode with 0."""


@dataclass(frozen=True, kw_only=True)
class MiniwobProblem:
    """One official MiniWoB task, with its own pages, goal and judge."""

    name: str
    level: int
    tags: Sequence[str] = field(default=())


def page(title: str, body: str, script: str = "") -> str:
    """Return a page."""
    code = f"<script>{script}</script>" if script else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:16px sans-serif;margin:20px}td,th{padding:3px 10px;text-align:left}"
        "input,select,textarea,button{font:inherit;margin:2px}"
        ".card{border:1px solid #888;padding:6px;margin:4px}</style>"
        f"</head><body>{body}{code}</body></html>"
    )


BY_ID = "const by = id => document.getElementById(id);"
"""The first line of most scripts."""
