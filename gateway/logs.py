"""Logs: one event name, then key=value; ids from context; no secrets and no bodies.

Keys in paths (``/k/{key}/…``) never reach a log: the door takes them off before anything else sees the path, and the
server's own access log is off.
"""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def configure(level: str) -> None:
    """Log to standard error from *level* (``debug`` … ``error``) on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At info level these tell of our own requests to engines, and of their own start: nothing that helps an operator.
    for name in ("httpx", "httpcore", "docker", "urllib3", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)
