"""Serves a gateway until SIGTERM, and ends running requests in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from typing import Annotated

import typer
import uvloop

from gateway import logs
from gateway.adapters import hold_containers
from gateway.app import Gateway
from gateway.catalog.doctor import examine, failures
from gateway.content import load_content
from gateway.server import HttpServer, configured, listen
from gateway.settings import Settings, load, service_links

logger = logging.getLogger(__name__)

GC_THRESHOLD = 20_000
"""New container objects minus freed ones between two collections of the youngest generation. Python's default is 700,
about ten calls. With 100,000 a call costs a fourteenth less at a thousand callers, but an idle episode takes 9 KiB
instead of 3."""
LEAVE_S = 1.0
"""Seconds before the cancellation of running calls at which the gateway answers them."""


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Serve a public address without keys.")] = False,
    static: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="A running server outside the gateway; may be repeated."),
    ] = None,
    step_s: Annotated[
        float | None, typer.Option(min=0, help="Seconds that a reset or a step of a --static server may take.")
    ] = None,
    log_as_json: Annotated[bool, typer.Option("--json", help="Write the log as JSON.")] = False,
) -> None:
    """Serve trainers until SIGTERM. GATEWAY_ variables configure everything else.

    \b
    Examples:
      gateway serve
      gateway serve --static counter=http://127.0.0.1:8000
    """
    settings = load(
        host=host,
        port=port,
        insecure=insecure or None,
        static=tuple(static) if static else None,
        static_step_s=step_s,
        log_format="json" if log_as_json else None,
    )
    logs.configure(settings.log_level, settings.log_format)
    if links := service_links():
        logger.info("service_links_ignored variables=%s", ",".join(links))
    uvloop.run(serve_until_ended(settings))


async def serve_until_ended(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; a second signal also ends running calls.

    Raises:
        ConfigError, StoreUnavailable, BackendError: The start failed.
    """
    content = await load_content(settings.checked())
    held = hold_containers(settings)
    listener = listen(settings.host, settings.port)
    gateway = Gateway(settings, content, port=listener.getsockname()[1])
    server = HttpServer(configured(gateway.app, end_s=settings.drain_s), max_connections=settings.max_connections)
    loop = asyncio.get_running_loop()

    def end() -> None:
        if gateway.lifecycle.is_draining:  # a second signal
            server.force_exit = True
            gateway.leave()
            close()
            return
        gateway.lifecycle.is_draining = True  # first readiness fails, then the listener closes, then calls end
        logger.info("gateway_draining replica=%s notice_s=%g", gateway.replica, settings.drain_notice_s)
        server.leave()
        loop.call_later(settings.drain_notice_s, close)

    def close() -> None:
        server.should_exit = True
        # Before uvicorn cancels calls itself: it answers 500, which SDKs repeat, and a step would run twice.
        loop.call_later(max(settings.drain_s / 2, settings.drain_s - LEAVE_S), gateway.leave)

    try:
        async with gateway.running():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, end)
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            _tame_the_collector()
            names = ",".join(environment.name for environment in gateway.catalog)
            logger.info(
                "gateway_ready url=http://%s:%s replica=%s environments=%s", shown, port, gateway.replica, names
            )
            examining = asyncio.create_task(_tell_failures(settings, gateway))
            try:
                await server.serve(sockets=[listener])
            finally:
                examining.cancel()
    finally:
        listener.close()
        held.close()
    logger.info("gateway_stopped replica=%s", gateway.replica)


async def _tell_failures(settings: Settings, gateway: Gateway) -> None:
    """Log what keeps an environment from running, with the command that mends it."""
    for finding in failures(await examine(settings, gateway.catalog)):
        told = (finding.check, ",".join(finding.environments), finding.detail, finding.fix)
        logger.error("doctor check=%s environments=%s detail=%r fix=%r", *told)


def _tame_the_collector() -> None:
    """Exclude permanent objects from garbage collection, and run it less often than every few calls.

    A full collection scans every remembered session; reference counting frees nearly all objects of calls.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
