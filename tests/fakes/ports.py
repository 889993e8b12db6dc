"""Loopback ports for servers that need a known port before they listen, or that listen again after a restart.

A port from the kernel may be gone by then: any process may get it meanwhile, also for an outgoing connection. These
ports are below the kernel's ephemeral range, and no two test processes get the same port.
"""

from __future__ import annotations

import contextlib
import random
import socket

HOST = "127.0.0.1"
PORTS = range(20_000, 32_000)


def reserved_port(*, count: int = 1) -> int:
    """Return the first of *count* consecutive free ports. No other test gets them as long as this process runs."""
    while True:
        port = random.choice(PORTS[: len(PORTS) - count])
        with contextlib.ExitStack() as stack:
            try:
                names = [stack.enter_context(_reserve(port + more)) for more in range(count)]
            except OSError:
                continue
            stack.pop_all()
        for name in names:
            name.detach()  # the kernel frees the name when this process ends
        return port


def _reserve(port: int) -> socket.socket:
    """Return the reservation of *port*: an abstract Unix socket with its number.

    Raises:
        OSError: Another test has the port, or a server listens there.
    """
    name = socket.socket(socket.AF_UNIX)
    try:
        name.bind(f"\0env-gateway-tests-port-{port}")
        socket.create_server((HOST, port)).close()
    except OSError:
        name.close()
        raise
    return name
