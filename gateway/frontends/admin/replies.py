"""What operators' routes share: queries that are checked, JSON, and errors as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response

from gateway.core.errors import GatewayError, InvalidRequest, TaskInvalid, UnknownTask
from gateway.core.json_text import dump
from gateway.frontends.asgi import BodyTooLarge, HungUp
from gateway.frontends.errors import retry_after, status_of
from gateway.tasks.signing import BadSignature, NotSigned

Endpoint = Callable[[Request], Awaitable[Response]]


def answering(endpoint: Endpoint) -> Endpoint:
    """What a route answers, its errors included: all problems of a task, each with its path."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except TaskInvalid as error:
            problems = [{"path": path, "message": message} for path, message in error.problems]
            return as_json({"detail": error.detail, "code": error.code, "problems": problems}, status_of(error))
        except (NotSigned, BadSignature) as error:
            code = "not_signed" if isinstance(error, NotSigned) else "bad_signature"
            return as_json({"detail": error.detail, "code": code}, 403)
        except BodyTooLarge:
            return as_json({"detail": "the upload, or one of its tasks, is too large", "code": "too_large"}, 413)
        except HungUp:
            return Response(status_code=400)  # nobody reads it
        except GatewayError as error:
            status = 404 if isinstance(error, UnknownTask) else status_of(error)
            headers = {name.decode(): value.decode() for name, value in retry_after(error)}
            return as_json({"detail": error.detail, "code": error.code}, status, headers)

    return answer


def queried(request: Request, *known: str) -> dict[str, str]:
    """The query's parameters; one that is not *known* is refused."""
    unknown = sorted(set(request.query_params) - set(known))
    if unknown:
        raise InvalidRequest(f"{unknown[0]}: no such parameter; there are {', '.join(known)}")
    return dict(request.query_params)


def operator_of(request: Request) -> str:
    """The name of the operator's key; empty where there are no keys."""
    return str(request.scope.get("gateway.owner", ""))


def flagged(query: Mapping[str, str], name: str) -> bool:
    """A parameter that is true or false; false where it is missing."""
    value = query.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: true or false is wanted")
    return value in ("true", "1")


def as_json(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer *value* as JSON."""
    return Response(dump(value), status, headers, media_type="application/json")
