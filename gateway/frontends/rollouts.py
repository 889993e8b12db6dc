"""Accepts the model's side of episodes as the ``openreward`` client sends it: ``POST /v1/rollouts``.

A trainer that logs its rollouts with ``client.rollout.create(...)`` and ``log(...)`` sends its messages here if
``OPENREWARD_API_URL`` is the gateway's URL. The step log keeps them, and shows them on the timeline of the episode that
they played. The client repeats a request on a status of 500 and above, so an event may come twice.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import InvalidRequest
from gateway.core.ids import Owner
from gateway.core.ports.step_log import MESSAGE, Rollout, StepLog
from gateway.core.validation import reason_of
from gateway.frontends.admin.replies import ERRORS, as_json, object_of
from gateway.frontends.asgi import FrontendParts

EVENTS_MAX: Final = 10_000
NAME_MAX_CHARS: Final = 1024


class _Event(BaseModel):
    """The fields of all kinds of events. Others are kept as they are."""

    model_config = ConfigDict(extra="allow", defer_build=True)

    event_type: str = Field(alias="eventType")
    id: str = Field(alias="eventId", min_length=1, max_length=NAME_MAX_CHARS)
    timestamp: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Unix time in milliseconds."""


class _Started(_Event):
    run: str = Field(default="", alias="runName", max_length=NAME_MAX_CHARS)
    name: str = Field(default="", alias="rolloutName", max_length=NAME_MAX_CHARS)
    environment: str = Field(default="", max_length=NAME_MAX_CHARS)
    split: str = Field(default="", max_length=NAME_MAX_CHARS)
    task_spec: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class _Message(_Event):
    rollout: str = Field(alias="rolloutEventId", min_length=1, max_length=NAME_MAX_CHARS)


class _Updated(_Event):
    """Further facts of a rollout. Its messages show the same, so they are not kept."""


_KINDS: Final[Mapping[str, type[_Event]]] = {"rollout": _Started, "message": _Message, "rollout_update": _Updated}


class RolloutFrontend:
    """The routes of rollouts as an ASGI application."""

    def __init__(self, parts: FrontendParts, *, log: StepLog) -> None:
        self._catalog = parts.catalog
        self._max_body_bytes = parts.max_body_bytes
        self._log = log

    def app(self) -> Starlette:
        """Return the routes as an ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/rollouts", self._rollouts, methods=["POST"]),
                Route("/v1/environments/{owner}/{name}", self._environment),
                Route("/v1/environments/{owner}/{name}/variants", self._variants),
            ],
            exception_handlers=ERRORS,
        )

    async def _rollouts(self, request: Request) -> Response:
        """Queue the events for the step log. Either all events are valid, or none is kept."""
        sent = await object_of(request, self._max_body_bytes)
        owner = Owner(str(request.scope.get("gateway.owner", "")))
        for event in _read(sent):
            self._keep(owner, event)
        return as_json({"status": "ok"})

    def _keep(self, owner: Owner, event: _Event) -> None:
        if isinstance(event, _Started):
            self._log.rollout(
                Rollout(
                    key=key_of(owner, event.id),
                    id=event.id,
                    owner=owner,
                    run=event.run,
                    name=event.name,
                    environment=event.environment.rpartition("/")[2],
                    split=event.split,
                    started_at=event.timestamp / 1e3 or time.time(),
                    info={"task_spec": event.task_spec, "metadata": event.metadata, **(event.model_extra or {})},
                )
            )
        elif isinstance(event, _Message):
            now = time.monotonic()
            content = {"at": event.timestamp / 1e3 or time.time(), "id": event.id, **(event.model_extra or {})}
            self._log.called((key_of(owner, event.rollout), MESSAGE, now, now, "ok", content, None, None, (), 0))

    async def _environment(self, request: Request) -> Response:
        """Return the id of an environment; the client asks for it if the name has an owner, as ``owner/name``."""
        name = request.path_params["name"]
        return as_json({"id": str(self._catalog.wanted(name).name), "name": name})

    async def _variants(self, request: Request) -> Response:
        self._catalog.wanted(request.path_params["name"])
        return as_json([])


def key_of(owner: Owner, id: str) -> str:
    """Return the key of a rollout's messages in the step log. Another key's rollout of the same id has another one."""
    return "r" + hashlib.sha256(f"{owner}\0{id}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _read(sent: Mapping[str, Any]) -> list[_Event]:
    events = sent.get("events")
    if not isinstance(events, list) or len(events) > EVENTS_MAX:
        raise InvalidRequest(f"events: must be a list of at most {EVENTS_MAX} events")
    return [_event(number, event) for number, event in enumerate(events)]


def _event(number: int, event: Any) -> _Event:
    kind = event.get("eventType") if isinstance(event, Mapping) else None
    model = _KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise InvalidRequest(f"events[{number}].eventType: must be one of {', '.join(_KINDS)}, not {str(kind)[:64]!r}")
    try:
        return model.model_validate(event)
    except ValidationError as error:
        one = error.errors()[0]
        place = ".".join(map(str, one["loc"]))
        raise InvalidRequest(f"events[{number}].{place}: {reason_of(one, model)}") from None
