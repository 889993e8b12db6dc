"""Exports a span of each request with OpenTelemetry.

This needs the extra ``env-gateway[telemetry]`` and the setting ``GATEWAY_OTLP_ENDPOINT``. Without them, the
authenticator passes the trace context of the trainer on to the worker unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway import __version__
from gateway.core.errors import ConfigError
from gateway.core.ports.transport import TRACE
from gateway.frontends.asgi import header

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

EXPORT_S: Final = 5.0
"""Seconds for sending one batch of spans, and for the last batch when the gateway ends."""


class Tracing:
    """ASGI middleware that makes a span of each request: a child of the trainer's span, and the worker's parent.

    It is inside the authenticator, so that no key is in a span.
    """

    def __init__(self, inside: ASGIApp, provider: TracerProvider) -> None:
        """Create the middleware in front of *inside*. *provider* exports the spans."""
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._inside = inside
        self._tracer = provider.get_tracer("env-gateway", __version__)
        self._propagator = TraceContextTextMapPropagator()
        self._server, self._error = SpanKind.SERVER, StatusCode.ERROR

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within its span."""
        if scope["type"] not in ("http", "websocket"):
            await self._inside(scope, receive, send)
            return
        from opentelemetry.trace import set_span_in_context

        method: str = scope.get("method", "WEBSOCKET")
        attributes = {"http.request.method": method, "url.path": scope["path"]}
        if owner := scope.get("gateway.owner"):
            attributes["gateway.key"] = str(owner)
        if session := header(scope, b"x-session-id"):
            attributes["gateway.session"] = session
        given = {name.decode(): value.decode("latin-1") for name, value in TRACE.get()}
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
            await self._inside(scope, receive, noting)
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
