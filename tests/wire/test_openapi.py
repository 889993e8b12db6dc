"""Schemathesis sends requests of every kind to every route of ``/openapi.json``: no 5xx, nothing undocumented."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.frontends.openapi.routes import ROUTES, Route
from tests.deadlines import HANG_S
from tests.wire.catalog import EMBEDDED, serving
from tests.wire.gateways import OPERATOR_KEY, Gateway

pytestmark = pytest.mark.wire

EXAMPLES = 8
"""Requests of each kind to each route."""
IDS = [f"{route.method} {route.path}" for route in ROUTES]
CASES = [
    pytest.param(route, is_valid, id=f"{route.method} {route.path}, {'valid' if is_valid else 'not valid'}")
    for route in ROUTES
    for is_valid in (True, False)
    if is_valid or route.body is not None or route.query or route.headers
]
LIVE = "live"
"""Session of every second request, so that the routes of sessions do not only answer that there is no session."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(EMBEDDED, "math", "game") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway.url, trust_env=False, timeout=HANG_S) as client:
        yield client


@pytest.fixture(scope="module")
def schema(http: httpx.Client) -> Any:
    """The gateway's own description, as Schemathesis reads it."""
    import schemathesis  # here, because it takes a second of every test process that imports it

    return schemathesis.openapi.from_dict(http.get("/openapi.json").json())


@pytest.fixture
def live(http: httpx.Client) -> None:
    """Open the session `LIVE`, unless it is open."""
    wish = {"env_name": "math", "split": "train", "index": 0}
    answer = http.post("/create", json=wish, headers={"X-Session-ID": LIVE})
    assert answer.status_code in (200, 400), answer.text


@pytest.mark.parametrize(("route", "is_valid"), CASES)
@pytest.mark.usefixtures("live")
def test_no_request_gets_a_5xx_or_an_undocumented_answer(
    gateway: Gateway, schema: Any, route: Route, is_valid: bool
) -> None:
    from schemathesis import GenerationMode, checks
    from schemathesis.specs.openapi import checks as of_schema

    operation = schema[route.path][route.method]
    mode = GenerationMode.POSITIVE if is_valid else GenerationMode.NEGATIVE
    checked = [
        checks.not_a_server_error,
        of_schema.status_code_conformance,
        of_schema.content_type_conformance,
        of_schema.response_schema_conformance,
        of_schema.response_headers_conformance,
    ]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), known=st.booleans())
    def send(case: Any, known: bool) -> None:
        if known and "environment" in case.path_parameters:
            case.path_parameters["environment"] = case.path_parameters["environment_again"] = "math"
        if known and is_valid and "X-Session-ID" in case.headers:
            case.headers["X-Session-ID"] = LIVE
        case.call_and_validate(
            base_url=gateway.url, headers={"X-API-Key": OPERATOR_KEY}, checks=checked, timeout=HANG_S
        )

    send()


def test_the_description_needs_no_key_and_names_every_route_of_the_reference(http: httpx.Client) -> None:
    answer = http.get("/openapi.json")

    assert answer.headers["content-type"] == "application/json"
    described = {f"{method.upper()} {path}" for path, one in answer.json()["paths"].items() for method in one}
    assert described == set(IDS)
    assert len(described) == len(IDS)
    assert json.loads(answer.content)["openapi"] == "3.1.0"


def test_a_key_is_asked_for_where_the_description_says_so(http: httpx.Client) -> None:
    """The gateway has keys for operators only."""
    for route in ROUTES:
        if route.path.startswith("/admin/") or route.path == "/metrics":
            path = route.path.replace("{", "").replace("}", "")
            assert http.request(route.method, path).status_code == 401, route.path
