"""Passes the W3C trace context of a request on to its worker, and exports a span of each request with OpenTelemetry.

Export needs the extra ``env-gateway[telemetry]`` and the setting ``GATEWAY_OTLP_ENDPOINT``. Without them, the trainer's
trace context reaches the worker unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import __version__
from gateway.core.errors import ConfigError
from gateway.core.ports.transport import TRACE
from gateway.frontends.asgi import header

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

PARENT: Final = b"traceparent"
STATE: Final = b"tracestate"
STATE_MAX_BYTES: Final = 512
"""Longest ``tracestate`` that is passed on. Every participant must keep at least so much, says the standard."""
EXPORT_S: Final = 5.0
"""Seconds for sending one batch of spans, and for the last batch when the gateway ends."""
_PARENT: Final = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")


def trace_of(scope: Scope) -> tuple[tuple[bytes, bytes], ...]:
    """Return a request's headers of the trace context. Empty: it has none, or its ``traceparent`` is not valid."""
    parents, states = [], []
    for name, value in scope["headers"]:
        if name == PARENT:
            parents.append(value)
        elif name == STATE:
            states.append(value)
    if len(parents) != 1 or not _PARENT.fullmatch(parents[0]):
        return ()
    state = b",".join(states)
    if not state or len(state) > STATE_MAX_BYTES:
        return ((PARENT, parents[0]),)
    return ((PARENT, parents[0]), (STATE, state))


class Tracing:
    """ASGI middleware inside the authenticator, so that no key is in a span."""

    def __init__(self, inside: ASGIApp, provider: TracerProvider | None = None) -> None:
        """Create the middleware. *provider* exports spans; None: the trace context is only passed on."""
        self._inside = inside
        self._spans = None if provider is None else Spans(provider)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Set the trace context for the requests to workers, and serve the request."""
        if scope["type"] not in ("http", "websocket"):
            await self._inside(scope, receive, send)
            return
        trace = trace_of(scope)
        if self._spans is not None:
            await self._spans.serve(self._inside, scope, receive, send, trace)
            return
        if trace:
            TRACE.set(trace)
        await self._inside(scope, receive, send)


class Spans:
    """Makes a span of each request: a child of the trainer's span, and the parent of the worker's."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("env-gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR

    async def serve(
        self, inside: ASGIApp, scope: Scope, receive: Receive, send: Send, trace: tuple[tuple[bytes, bytes], ...]
    ) -> None:
        """Serve a request within its span."""
        from opentelemetry.trace import set_span_in_context

        method: str = scope.get("method", "WEBSOCKET")
        attributes = {"http.request.method": method, "url.path": scope["path"]}
        if owner := scope.get("gateway.owner"):
            attributes["gateway.key"] = str(owner)
        if session := header(scope, b"x-session-id"):
            attributes["gateway.session"] = session
        given = {name.decode(): value.decode("latin-1") for name, value in trace}
        parent = self._propagator.extract(given)
        span = self._tracer.start_span(f"{method} {scope['path']}", parent, self._server, attributes)
        passed: dict[str, str] = {}
        self._propagator.inject(passed, set_span_in_context(span))
        TRACE.set(_headers(passed))

        async def noting(message: Message) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    span.set_status(self._error)
            await send(message)

        try:
            await inside(scope, receive, noting)
        except BaseException as error:
            span.record_exception(error)
            span.set_status(self._error)
            raise
        finally:
            span.end()


def _headers(passed: Mapping[str, str]) -> tuple[tuple[bytes, bytes], ...]:
    return tuple((name.encode(), value.encode("latin-1", "replace")) for name, value in passed.items())


def span_exporter(endpoint: str, replica: str) -> TracerProvider:
    """Return what exports spans to *endpoint*, an OpenTelemetry collector, over HTTP. Its `shutdown` ends it.

    Spans wait in a bounded queue, and a thread sends them: a collector that does not answer costs spans, never a step.
    The standard variables apply too, such as ``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS``.

    Raises:
        ConfigError: The packages of OpenTelemetry are not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise ConfigError(
            "GATEWAY_OTLP_ENDPOINT needs the packages of OpenTelemetry: install env-gateway[telemetry]"
        ) from None
    resource = Resource.create({"service.name": "env-gateway", "service.instance.id": replica})
    exporter = OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=EXPORT_S)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=EXPORT_S * 1000))
    return provider
