"""Renders the dashboard's pages from templates, and the texts that commands show of an episode too.

Values are escaped, and no page has a script or a style of its own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from gateway.core.outcomes import EpisodeOutcome
from gateway.core.ports.step_log import REFERENCE, UNRECORDED
from gateway.core.session import CloseReason

if TYPE_CHECKING:
    from jinja2 import Environment

OUTCOMES: Final[Mapping[str, str]] = {
    EpisodeOutcome.FINISHED: "finished",
    EpisodeOutcome.STOPPED: "stopped",
    EpisodeOutcome.UNPLAYED: "not played",
    EpisodeOutcome.AUTHOR_FAULT: "author's fault",
    EpisodeOutcome.INFRASTRUCTURE: "infrastructure",
}
REASONS: Final[Mapping[str, str]] = {
    CloseReason.DELETED: "closed by the trainer",
    CloseReason.CANCELLED: "cancelled by the trainer",
    CloseReason.EXPIRED: "without a call for too long",
    CloseReason.WORKER_LOST: "its worker died",
    CloseReason.OUT_OF_MEMORY: "its worker ran out of memory",
    CloseReason.TIMEOUT: "a call took too long",
    CloseReason.AUTHOR_FAULT: "the environment's code failed",
    CloseReason.SESSION_FAILED: "its sandbox or browser broke",
    CloseReason.OPEN_FAILED: "it could not be opened",
    CloseReason.SHUTDOWN: "the gateway stopped",
    CloseReason.OPERATOR: "ended by an operator",
    UNRECORDED: "its replica was killed",
}
PROTOCOLS: Final[Mapping[str, str]] = {"ors": "ORS", "areal": "AReaL", "openenv": "OpenEnv", "nemo": "NeMo Gym"}
SHORT_CHARS: Final = 200
"""Maximum length of JSON that stands in one line."""
LINE_CHARS: Final = 100
"""Maximum length of an action or a result in the overview of an episode."""
_SECONDS: Final = ((60.0, 1.0, "s"), (3600.0, 60.0, "min"), (86_400.0, 3600.0, "h"), (math.inf, 86_400.0, "d"))


def when(at: float | None) -> str:
    """Return a Unix time as text in UTC."""
    return "" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S")


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with at most *digits* significant digits after the point; empty for None."""
    if value is None:
        return ""
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def seconds(value: float | None) -> str:
    """Return a duration as text."""
    if value is None:
        return ""
    if value < 1:
        return f"{value * 1000:.3g} ms"
    for limit, unit, name in _SECONDS:
        if value < limit:
            return f"{value / unit:.3g} {name}"
    return ""


def pretty(value: Any) -> str:
    """Return text as it is, and any other value as JSON: indented, unless it is short."""
    short = inline(value)
    if isinstance(value, str) or len(short) <= SHORT_CHARS:
        return short
    return json.dumps(value, ensure_ascii=False, indent=2)


def inline(value: Any) -> str:
    """Return text as it is, and any other value as JSON in one line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def task_parts(spec: Any) -> list[tuple[str, Any]]:
    """Return a task in parts: instruction and evaluation first, because they explain a reward, then other fields."""
    if not isinstance(spec, Mapping):
        return [("task", spec)] if spec else []
    first = [(name, spec[name]) for name in ("instruction", "evaluation") if spec.get(name)]
    others = {name: value for name, value in spec.items() if name not in dict(first)}
    return [*first, ("other fields" if first else "task", others)] if others else first


def action_text(action: Any) -> str:
    """Return an action as text: a tool's name and a line for each argument, or JSON; empty for None.

    Texts of several lines, such as programs, begin on a line of their own.
    """
    if not (isinstance(action, Mapping) and "tool" in action and isinstance(action["input"], Mapping)):
        return "" if action is None else pretty(action)
    lines = [action["tool"]]
    for name, value in action["input"].items():
        text = inline(value)
        lines += [f"{name}:", text] if "\n" in text else [f"{name}: {text}"]
    return "\n".join(lines)


def _action(action: Any) -> str:
    """Return an action in one line."""
    if isinstance(action, Mapping) and "tool" in action:
        return f"{action['tool']} {inline(action['input'])}"
    return "" if action is None else inline(action)


def end_text(reason: str | None, outcome: str | None) -> str:
    """Return how an episode ended, in addition to its *outcome*; empty if the trainer closed it when it was over."""
    is_usual = outcome == EpisodeOutcome.FINISHED and reason == CloseReason.DELETED
    return "" if is_usual or reason is None else REASONS.get(reason, reason)


def beside_blocks(step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the other observations of a step, without what its blocks already say."""
    said = [block.get("text") for block in step.get("blocks", ()) if isinstance(block, Mapping)]
    found = {}
    for name in ("observation", "data", "text"):
        value = step.get(name)
        if isinstance(value, Mapping):
            value = {key: one for key, one in value.items() if one not in said}
        if value not in (None, "", {}) and value not in said:
            found[name] = value
    return found


def overview(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one line for each step: its ``number``, ``action``, ``result``, ``reward`` and ``finished``.

    A result is the error or fault of the step, after its outcome, or else the first block that the agent read.
    """
    return [
        {
            "number": step["number"],
            "is_prompt": step["operation"] == "prompt",
            "action": _line(_action(step["action"])),
            "result": _line(_result(step) if step["outcome"] == "ok" else f"{step['outcome']}: {_result(step)}"),
            "failed": step["outcome"] != "ok",
            "reward": step.get("reward"),
            "finished": bool(step.get("finished")),
        }
        for step in steps
    ]


def _result(step: Mapping[str, Any]) -> str:
    if faults := step.get("faults"):
        return f"{faults[-1]['kind']} fault: {faults[-1]['error']}"
    if step.get("error"):
        return inline(step["error"])
    for block in step.get("blocks", ()):
        text = inline((block.get("text") or "[image]") if isinstance(block, Mapping) else block)
        if text.strip():
            return text
    return next(map(inline, beside_blocks(step).values()), "")


def _line(text: str) -> str:
    """Return *text* in one line, with slashes between its lines, and with an ellipsis if it is cut off."""
    whole = " / ".join(" ".join(line.split()) for line in text.splitlines() if line.strip())
    return whole if len(whole) <= LINE_CHARS else f"{whole[:LINE_CHARS].rstrip()} …"


def image_source(block: Mapping[str, Any], folder: str) -> str:
    """Return the URL of an image: in *folder* if its data are stored by their digest, else a data URL."""
    data = str(block.get("image") or "")
    if data.startswith(REFERENCE):
        return f"{folder}{data.removeprefix(REFERENCE)}"
    return f"data:{block.get('mime_type') or 'image/png'};base64,{data}"


def bars(counts: Sequence[int]) -> list[int]:
    """Return the heights of a histogram's bars in percent of the highest; a count above 0 is at least 2."""
    most = max(counts, default=0)
    return [max(2, round(100 * count / most)) if count else 0 for count in counts]


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # most gateways never show a page

    made = Environment(
        loader=PackageLoader("gateway.frontends.dashboard"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters.update(when=when, number=number, seconds=seconds, pretty=pretty, bars=bars)
    made.filters.update(inline=inline, task_parts=task_parts, action_text=action_text, end_text=end_text)
    made.filters.update(beside_blocks=beside_blocks, overview=overview)
    made.globals.update(image_source=image_source, OUTCOMES=OUTCOMES, REASONS=REASONS, PROTOCOLS=PROTOCOLS)
    return made


_templates: Environment | None = None


def render(template: str, **values: Any) -> str:
    """Return the page of *template* with *values*."""
    global _templates
    if _templates is None:
        _templates = _environment()
    return _templates.get_template(template).render(**values)


def static_files() -> Mapping[str, bytes]:
    """Return the content of the static files, by name."""
    folder = resources.files("gateway.frontends.dashboard") / "static"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}
