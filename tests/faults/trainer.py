"""A trainer that tests suspend or kill: it opens sessions, does one thing, reports it, and stays.

    trainer.py URL KEY ENVIRONMENT idle|reads-nothing|socket|waits NUMBER

It uses plain sockets, so that unread data stay unread.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import sys
import uuid
from urllib.parse import urlsplit

BIG = 8 * 2**20
"""Number of characters above the buffers of a connection."""


def main() -> None:
    url, key, environment, does, number = sys.argv[1:]
    held = [_act(url, key, environment, does) for _ in range(int(number))]
    print("done", flush=True)
    signal.pause()
    del held


def _act(url: str, key: str, environment: str, does: str) -> socket.socket:
    """Open one session and do with it what *does* names. Return its connection."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the kernel then buffers little unread data
    connection.connect((urlsplit(url).hostname, urlsplit(url).port))
    if does == "socket":
        _websocket(connection, f"/k/{key}/openenv/{environment}/ws")
        return connection
    sid = str(uuid.uuid4())
    _post(connection, "/create", key, sid, {"env_name": environment, "task_spec": {}})
    if does == "waits":
        return connection
    _answer(connection)
    if does == "reads-nothing":
        _post(connection, f"/{environment}/call", key, sid, {"name": "big", "input": {"n": BIG}})
    return connection


def _post(connection: socket.socket, path: str, key: str, sid: str, body: object) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nX-API-Key: {key}\r\nX-Session-ID: {sid}\r\n"
    head += f"Accept: text/event-stream\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)


def _answer(connection: socket.socket) -> None:
    """Read one short answer."""
    got = b""
    while b"sid" not in got:
        piece = connection.recv(65_536)
        assert piece, got
        assert b" 200 " in (got + piece).split(b"\r\n", 1)[0], got + piece
        got += piece


def _websocket(connection: socket.socket, path: str) -> None:
    """Open an OpenEnv socket and begin an episode on it."""
    token = base64.b64encode(os.urandom(16)).decode()
    head = f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    connection.sendall(f"{head}Sec-WebSocket-Key: {token}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
    got = b""
    while b"\r\n\r\n" not in got:
        got += connection.recv(65_536)
    assert b" 101 " in got, got
    data = json.dumps({"type": "reset", "data": {"task": {"id": "custom/any", "instruction": "count"}}}).encode()
    mask = os.urandom(4)
    head_bytes = bytes([0x81, 0x80 | len(data)])
    connection.sendall(head_bytes + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(data)))
    got = b""
    while b"observation" not in got:
        piece = connection.recv(65_536)
        assert piece, got
        got += piece


if __name__ == "__main__":
    main()
