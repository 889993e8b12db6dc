"""Checks the version and framing of requests more strictly than llhttp, and frames responses for HTTP/1.0 clients.

These know no chunks: the end of the connection ends a response of unknown length.
"""

from __future__ import annotations

from collections.abc import Sequence

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def is_served(version: str, headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Return True if the gateway serves a request of this HTTP *version* with these *headers* (names in lower case).

    HTTP/1.1 needs exactly one Host. A body of other codings than chunks could be read differently by a proxy.
    """
    hosts = sum(name == b"host" for name, _ in headers)
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    is_addressed = hosts == 1 if version == "1.1" else version == "1.0" and hosts <= 1  # llhttp reads 0.9 and 2.0 too
    return is_addressed and codings in ([], [b"chunked"])


class Http10Cycle(RequestResponseCycle):
    """One request of an HTTP/1.0 client and its response."""

    async def send(self, message: ASGISendEvent) -> None:
        """Send *message*. A response of unknown length gets no framing; uvicorn would send it in chunks."""
        if message["type"] == "http.response.start":
            message["headers"] = [pair for pair in message.get("headers", []) if pair[0] != b"transfer-encoding"]
            if all(name.lower() != b"content-length" for name, _ in message["headers"]):
                self.chunked_encoding = False
                self.expected_content_length = -1
        elif message["type"] == "http.response.body" and self.expected_content_length < 0:
            self.expected_content_length = len(message.get("body", b""))
            await super().send(message)
            if not self.response_complete:
                self.expected_content_length = -1
            return
        await super().send(message)
