"""Serves a gateway until SIGTERM, and ends what is under way in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal

from gateway.adapters import hold_containers
from gateway.app import Gateway
from gateway.content import load_content
from gateway.server import HttpServer, configured, listen
from gateway.settings import Settings

logger = logging.getLogger(__name__)

GC_THRESHOLD = 20_000
"""Containers that came and did not go yet, between two collections of the youngest; Python's own is 700, some ten
calls. With 100,000 a call costs a fourteenth less at a thousand callers, and an idle episode 9 KiB instead of 3."""
LEAVE_S = 1.0
"""By so much earlier than calls under way are broken off they are answered."""


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; a second one ends calls under way too.

    Raises:
        ConfigError, StoreUnavailable, BackendError: at start.
    """
    content = await load_content(settings.checked())
    held = hold_containers(settings)
    listener = listen(settings.host, settings.port)
    gateway = Gateway(settings, content, port=listener.getsockname()[1])
    server = HttpServer(configured(gateway.app, end_s=settings.drain_s))
    loop = asyncio.get_running_loop()

    def end() -> None:
        if gateway.lifecycle.is_draining:  # told twice
            server.force_exit = True
            gateway.leave()
            close()
            return
        gateway.lifecycle.is_draining = True  # readiness turns first; then no new connection, then the calls end
        logger.info("gateway_draining replica=%s notice_s=%g", gateway.replica, settings.drain_notice_s)
        server.leave()
        loop.call_later(settings.drain_notice_s, close)

    def close() -> None:
        server.should_exit = True
        # In time: what uvicorn breaks off itself is a 500, which SDKs repeat, and a step would run twice.
        loop.call_later(max(settings.drain_s / 2, settings.drain_s - LEAVE_S), gateway.leave)

    try:
        async with gateway.running():
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, end)
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            _tame_the_collector()
            logger.info("gateway_ready url=http://%s:%s replica=%s", shown, port, gateway.replica)
            await server.serve(sockets=[listener])
    finally:
        listener.close()
        held.close()
    logger.info("gateway_stopped replica=%s", gateway.replica)


def _tame_the_collector() -> None:
    """Keep the garbage collector from walking what lives as long as the process, and from running every few calls.

    A full collection walks every session that is remembered; reference counting frees nearly all of what calls make.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, 20, 50)
