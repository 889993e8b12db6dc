"""docs/reference.md names everything that an operator may meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.core.errors import GatewayError
from gateway.environment_files import OPERATIONS, RESERVED, ROOT_ROUTES
from gateway.observe.metrics import Metrics
from gateway.settings import PREFIX, Settings

PROJECT = Path(__file__).resolve().parents[2]
REFERENCE = (PROJECT / "docs" / "reference.md").read_text()
ENVIRONMENTS = (PROJECT / "docs" / "environments.md").read_text()
LEVELS = {"debug", "info", "warning", "error", "exception"}


def descendants(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from descendants(child)


def log_events() -> set[str]:
    """First words of all log lines of the package."""
    found = set()
    for path in (PROJECT / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                    args=[ast.Constant(value=str(text)), *_],
                ) if level in LEVELS:
                    found.add(text.split()[0])
    return found


@pytest.mark.parametrize("name", sorted(Settings.model_fields))
def test_a_setting_is_in_the_reference(name: str) -> None:
    assert f"`{PREFIX}{name.upper()}`" in REFERENCE


@pytest.mark.parametrize("code", sorted({kind.code for kind in descendants(GatewayError)}))
def test_an_error_code_is_in_the_reference(code: str) -> None:
    assert f"`{code}`" in REFERENCE


def test_every_metric_is_in_the_reference() -> None:
    names = set(re.findall(r"^# TYPE (\S+)", Metrics().exposition().decode(), re.M))
    names = {name for name in names if not name.endswith("_created")}

    assert names
    assert {name for name in names if f"`{name}`" not in REFERENCE} == set()


def test_every_log_event_is_in_the_reference() -> None:
    events = log_events()

    assert len(events) > 20
    assert {event for event in events if f"`{event}`" not in REFERENCE} == set()


def test_every_reserved_name_is_in_the_docs() -> None:
    words = set(re.findall(r"[a-z_.]+", ENVIRONMENTS))

    assert words >= RESERVED


@pytest.mark.parametrize("route", sorted(ROOT_ROUTES - {"docs", "redoc", "openapi.json"} | OPERATIONS))
def test_an_ors_route_is_in_the_reference(route: str) -> None:
    assert f"/{route}`" in REFERENCE
