"""Helpers of the operators' routes: validated queries and bodies, JSON responses, and errors as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from gateway.core.errors import GatewayError, InvalidRequest, TaskInvalid, UnknownTask
from gateway.core.json_text import dump
from gateway.core.ports.tasks import BundleRefused
from gateway.core.task_name import TaskName
from gateway.core.validation import reason_of
from gateway.frontends.asgi import HungUp, read_body
from gateway.frontends.errors import headers_of, status_of
from gateway.tasks.signing import BadSignature, NotSigned

BUNDLE_CODES: Mapping[type[GatewayError], str] = {
    NotSigned: "not_signed",
    BadSignature: "bad_signature",
    BundleRefused: "bundle_refused",
}
"""Codes of refused bundles. Only these routes have them."""


def named(key: str) -> dict[str, str | None]:
    """Return the name of the task with this record key, as operators see it."""
    name = TaskName.of(key)
    return {"task": name.label, "task_digest": name.digest or None}


class Body(BaseModel):
    """Base model of request bodies. It refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


B = TypeVar("B", bound=Body)


async def body_of(request: Request, limit_bytes: int, *more_types: str) -> tuple[bytes, str]:
    """Read the body and return it with its content type, which is JSON or one of *more_types*.

    Browsers send bodies of other types across sites without the server's consent.

    Raises:
        InvalidRequest: A body has another content type, or none. Otherwise raises like `read_body`.
    """
    body = await read_body(request.scope, request.receive, limit_bytes)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if body and not _is_json(kind) and kind not in more_types:
        known = ", ".join(("application/json", *sorted(more_types)))
        raise InvalidRequest(f"Content-Type {kind[:100]!r}: a body must have one of {known}")
    return body, kind


def _is_json(kind: str) -> bool:
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def object_of(request: Request, limit_bytes: int) -> dict[str, Any]:
    """Read the body as a JSON object. An empty body is ``{}``. Raises ``InvalidRequest``, or like `body_of`."""
    body, _ = await body_of(request, limit_bytes)
    try:
        value = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


async def validated(request: Request, model: type[B], limit_bytes: int) -> B:
    """Read the request's body as a *model*. Raises like `object_of`."""
    try:
        return model.model_validate(await object_of(request, limit_bytes))
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'body'}: {reason_of(one, model)}" for one in error.errors()[:10]
        )
        raise InvalidRequest(told) from None


def queried(request: Request, *known: str) -> dict[str, str]:
    """Return the query's parameters. Raises ``InvalidRequest`` for a parameter not in *known*."""
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: no such parameter; there are {', '.join(known)}")
    return dict(request.query_params)


def numbered(query: Mapping[str, str], name: str, usual: int, *, least: int = 0, most: int) -> int:
    """Return a parameter from *least* to *most*, or *usual* if it is missing. Raises ``InvalidRequest``."""
    text = query.get(name)
    if text is None:
        return usual
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and least <= int(text) <= most):
        raise InvalidRequest(f"{name}: must be a number from {least} to {most}")
    return int(text)


def flagged(query: Mapping[str, str], name: str) -> bool:
    """Return a boolean parameter, or False if it is missing. Raises ``InvalidRequest``."""
    value = query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false")
    return value in ("true", "1")


def operator_of(request: Request) -> str:
    """Return the name of the operator's key. Empty: the gateway has no keys."""
    return str(request.scope.get("gateway.owner", ""))


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response with *value* as JSON."""
    return Response(dump(value), status, headers, media_type="application/json")


async def _refused(_: Request, error: Exception) -> Response:
    """Return the response to an error. For an invalid task it lists all problems with their paths."""
    match error:
        case TaskInvalid():
            problems = [{"path": path, "message": message} for path, message in error.problems]
            return as_json({"detail": error.detail, "code": error.code, "problems": problems}, status_of(error))
        case NotSigned() | BadSignature() | BundleRefused():
            return as_json({"detail": error.detail, "code": BUNDLE_CODES[type(error)]}, 403)
        case GatewayError():
            status = 404 if isinstance(error, UnknownTask) else status_of(error)
            headers = {name.decode(): value.decode() for name, value in headers_of(error)}
            return as_json({"detail": error.detail, "code": error.code}, status, headers)
    return Response(status_code=400)  # the operator disconnected and does not read it


ERRORS: Mapping[Any, ExceptionHandler] = dict.fromkeys((GatewayError, HungUp), _refused)
"""Exception handlers of the application that serves the operators' routes."""
