"""Builds the OpenAPI description that ``/openapi.json`` serves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from gateway import __version__
from gateway.core.curriculum import PREFIX
from gateway.core.json_text import dump
from gateway.frontends.openapi.routes import ROUTES, STATUSES, Route
from gateway.frontends.openapi.schemas import JSON, MODELS, SCHEMAS, schema_of


@cache
def openapi_document() -> bytes:
    """Return the description as JSON (OpenAPI 3.1). It is the same for every gateway of this version."""
    schemas = dict(SCHEMAS)
    for name, model in MODELS.items():
        schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[name] = schema
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return dump(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "env-gateway",
                "version": __version__,
                "description": (
                    "A gateway between RL trainers and environments. Every path may also begin with /k/{key}, for "
                    f"clients that cannot send headers. A split {PREFIX}NAME draws tasks from the curriculum NAME."
                ),
            },
            "paths": paths,
            "components": {
                "schemas": schemas,
                "responses": {
                    f"{error}{status}": {"description": text, "content": {JSON: {"schema": schema_of(error)}}}
                    for error in ("Error", "ArealError")
                    for status, text in STATUSES.items()
                },
                "securitySchemes": {
                    "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
                    "bearer": {"type": "http", "scheme": "bearer"},
                },
            },
        }
    )


def _operation(route: Route) -> dict[str, Any]:
    error = "ArealError" if route.tag == "AReaL" else "Error"
    ok: dict[str, Any] = {"description": route.summary}
    if route.answer is not None:
        ok["content"] = {route.kind: {"schema": schema_of(route.answer)}}
        if route.path.endswith(("/call", "/score_group", "/create_session")):
            ok["content"]["text/event-stream"] = {"schema": schema_of("Event")}
        if route.kind == "application/octet-stream":
            ok["content"]["image/*"] = {"schema": {}}
    errors = {*route.errors, *((401, 403, 429) if route.needs_key else ())}
    if route.tag == "AReaL":
        errors -= {429}
    found: dict[str, Any] = {
        "tags": [route.tag],
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}").strip("_"),
        "parameters": list(_parameters(route)),
        "responses": {
            **dict.fromkeys(_successes(route), ok),
            **{str(status): {"$ref": f"#/components/responses/{error}{status}"} for status in sorted(errors)},
        },
        "security": [{"key": []}, {"bearer": []}, {}] if route.needs_key else [],
    }
    if route.body is not None:
        found["requestBody"] = {"required": route.needs_body, "content": {JSON: {"schema": schema_of(route.body)}}}
    return found


def _successes(route: Route) -> tuple[str, ...]:
    if route.answer is None:
        return ("204",)
    return ("200", "201") if route.created else ("200",)


def _parameters(route: Route) -> Iterator[dict[str, Any]]:
    for name in re.findall(r"{(\w+)}", route.path):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    for place, named in (("query", route.query), ("header", route.headers)):
        for name, schema in named.items():
            yield {"name": name, "in": place, "required": name in route.needs, "schema": schema}
