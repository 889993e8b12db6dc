"""The ``filters`` of list and events, read strictly and written anew with our label in them.

Filters of one key that say several things mean "or" to the engine, but labels mean "and": so adding one narrows.
"""

from __future__ import annotations

from http import HTTPStatus

from gateway.backends.docker.container import LABEL_INSTANCE
from gateway.node.json_body import Malformed, parse
from gateway.node.routes import Refused

_LIST_KEYS = frozenset(["label", "name", "id", "status", "health", "exited"])
"""Not "before", "since", "ancestor", "network" and "volume": they tell about objects of others."""
_EVENT_KEYS = frozenset(["label", "event", "container", "type"])

Filters = dict[str, list[str]]


def own_containers(given: str, instance: str) -> Filters:
    """Narrow the filters *given* (JSON, or empty) to containers of *instance*.

    Raises:
        Refused: they are malformed or of a kind that is not allowed.
    """
    return _with_label(_read(given, _LIST_KEYS), instance)


def own_events(given: str, instance: str) -> Filters:
    """Narrow the filters *given* to events of containers of *instance*: images carry labels too.

    Raises:
        Refused: they are malformed or of a kind that is not allowed.
    """
    filters = _read(given, _EVENT_KEYS)
    if filters.get("type", ["container"]) != ["container"]:
        raise Refused("only events of type container are passed on")
    return _with_label(filters, instance) | {"type": ["container"]}


def _with_label(filters: Filters, instance: str) -> Filters:
    return filters | {"label": [*filters.get("label", []), f"{LABEL_INSTANCE}={instance}"]}


def _read(given: str, allowed: frozenset[str]) -> Filters:
    if not given:
        return {}
    try:
        found = parse(given.encode("utf-8", "surrogatepass"))
    except Malformed as error:
        raise Refused(f"filters: {error}", status=HTTPStatus.BAD_REQUEST) from error
    filters: Filters = {}
    for key, values in found.items():
        # Two spellings: a list, and (older clients) an object whose keys are the values.
        texts = [text for text in values if isinstance(text, str)] if isinstance(values, list | dict) else []
        if key not in allowed or not isinstance(values, list | dict) or len(texts) != len(values):
            raise Refused(f"the filter {key[:64]!r} is not allowed here, or not a list of texts")
        filters[key] = texts
    return filters
