"""Words for errors of validation in configuration files, settings, bundles and requests of operators.

pydantic's own words are for programmers. The protocols' frontends keep them, because the reference servers send them.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Final

NO_SUCH_KEY: Final = "there is no such key"
_KINDS: Final = {
    "int": "an integer",
    "float": "a number",
    "string": "a text",
    "bool": "true or false",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "dict": "a table (an object)",
    "model": "a table (an object)",
    "dataclass": "a table (an object)",
}
_BOUNDS: Final = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'slots'?)`` with the name in *known* that resembles *given*, or an empty text."""
    close = difflib.get_close_matches(given, [*known], n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def reason_of(entry: Mapping[str, Any], model: Any = None) -> str:
    """Return why a value is wrong, with the value and the closest valid one.

    Args:
        entry: An entry of pydantic's ``ValidationError.errors()``. Without ``input``, the value is not repeated.
        model: The validated class, whose keys are suggested for an unknown key.
    """
    kind, limits = str(entry["type"]), entry.get("ctx", {})
    given = f", not {entry['input']!r:.60}" if "input" in entry else ""
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        *table, key = entry["loc"]
        return NO_SUCH_KEY + did_you_mean(str(key), _keys_of(model, table))
    if kind in ("missing", "missing_argument"):
        return "it is required"
    if kind in ("literal_error", "enum"):
        words = str(limits["expected"])
        return f"it must be {words}{given}{did_you_mean(str(entry.get('input')), words.split(chr(39))[1::2])}"
    if kind == "finite_number":
        return f"it must be a finite number{given}"
    if kind == "value_error":
        return str(limits["error"]) if "error" in limits else str(entry["msg"]).removeprefix("Value error, ")
    for bound, words in _BOUNDS.items():
        if bound in limits:
            return f"it must be {words} {limits[bound]:g}{given}"
    if kind.endswith(("too_short", "too_long")):
        words, count = ("least", limits["min_length"]) if kind.endswith("short") else ("most", limits["max_length"])
        unit = "character" if kind.startswith("string") else "item"
        return f"it must have at {words} {count} {unit}{'s' * (count != 1)}"
    if kind == "string_pattern_mismatch":
        return f"it must match {limits['pattern']}{given}"
    known = _KINDS.get(kind.partition("_")[0])
    return str(entry["msg"]) if known is None else f"it must be {known}{given}"


def _keys_of(model: Any, path: Iterable[Any]) -> list[str]:
    """Return the keys of the table at *path* in *model*, a pydantic model or a dataclass."""
    for step in path:
        # Another step is the place in a list of such tables, or the name of a table among several.
        if isinstance(model, type) and step in (hints := typing.get_type_hints(model)):
            model = _part(hints[step])
    fields = getattr(model, "model_fields", None)
    if fields is not None:
        return list(fields)
    return [one.name for one in dataclasses.fields(model)] if dataclasses.is_dataclass(model) else []


def _part(hint: Any) -> Any:
    """Return the first class with keys in a type hint such as ``tuple[Stage, ...]`` or ``Mapping[str, Split]``."""
    if hasattr(hint, "model_fields") or dataclasses.is_dataclass(hint):
        return hint
    return next((found for one in typing.get_args(hint) if (found := _part(one)) is not None), None)
