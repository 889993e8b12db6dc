"""Frames responses for HTTP/1.0 clients, which know no chunks: the end of the connection ends the response."""

from __future__ import annotations

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


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
