"""Renders the dashboard's pages from templates. Values are escaped, and no page has a script or a style of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import TYPE_CHECKING, Any, Final

from gateway.core.ports.step_log import REFERENCE

if TYPE_CHECKING:
    from jinja2 import Environment

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
    """Return text as it is, and any other value as indented JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=2)


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
    made.globals.update(image_source=image_source, zip=zip)
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
