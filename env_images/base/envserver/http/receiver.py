"""From a client's bytes to requests, within limits.

httptools refuses what is not HTTP, also a body whose length is told twice; what it does not bound is bounded here.
"""

from collections.abc import Callable, Collection

import httptools
from envserver.errors import Refused
from envserver.http.messages import Request

HEADERS_MAX_BYTES = 128 * 1024
"""Request line and headers; X-Secrets alone may take 64 KiB."""

_TOO_LARGE = (413, "Request body too large")
_HEADERS_TOO_LARGE = (431, "Request header fields too large")


class Receiver:
    """Parses one connection's bytes.

    Args:
        on_request: called with each complete request.
        on_refusal: called once at most; what comes after it is dropped.
        on_expect: called where a client waits for leave to send its body.
    """

    __slots__ = (
        "_ambiguous",
        "_body",
        "_body_bytes",
        "_body_max_bytes",
        "_has_headers",
        "_head_bytes",
        "_headers",
        "_on_expect",
        "_on_refusal",
        "_on_request",
        "_parser",
        "_url",
        "is_deaf",
        "is_receiving",
        "total_bytes",
    )

    def __init__(
        self,
        *,
        body_max_bytes: int,
        on_request: Callable[[Request], None],
        on_refusal: Callable[[Refused], None],
        on_expect: Callable[[], None],
    ) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body_max_bytes = body_max_bytes
        self._on_request = on_request
        self._on_refusal = on_refusal
        self._on_expect = on_expect
        self.total_bytes = 0
        """All bytes that ever came."""
        self.is_receiving = False
        """Whether a request has begun and is not complete."""
        self.is_deaf = False
        """Whether what comes is dropped, after a refusal."""
        self.on_message_begin()
        self.is_receiving = False

    def feed(self, data: bytes) -> None:
        """Parse *data*; the callbacks are called from here."""
        self.total_bytes += len(data)
        if self.is_deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "Upgrade is not supported")
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request")
        # A header that goes on and on never reaches its callback, so the raw bytes are counted too.
        if self.is_receiving and not self._has_headers:
            self._head_bytes += len(data)
            if self._head_bytes > HEADERS_MAX_BYTES:
                self._refuse(*_HEADERS_TOO_LARGE)

    def close(self) -> None:
        """Let go of the parser: the two hold each other, and would wait for the garbage collector."""
        self.is_deaf = True
        del self._parser

    @property
    def in_body(self) -> bool:
        """Whether a request's headers are complete and its body is not."""
        return self.is_receiving and self._has_headers

    # -- the parser's calls

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._ambiguous: Collection[bytes] = ()
        self._head_bytes = 0
        self._has_headers = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self.is_receiving = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_headers:  # else a trailer, which could pose as a header
            key = name.lower()
            if self._headers.setdefault(key, value) != value:
                self._ambiguous = {*self._ambiguous, key}
                self._headers[key] = value

    def on_headers_complete(self) -> None:
        self._has_headers = True
        size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers.items())
        if size > HEADERS_MAX_BYTES:
            self._refuse(*_HEADERS_TOO_LARGE)
        elif int(self._headers.get(b"content-length") or 0) > self._body_max_bytes:
            self._refuse(*_TOO_LARGE)
        elif b"expect" in self._headers and self._headers[b"expect"].lower() == b"100-continue":
            self._on_expect()

    def on_body(self, body: bytes) -> None:
        if self.is_deaf:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._body_max_bytes:
            self._refuse(*_TOO_LARGE)
        else:
            self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_receiving = False
        if self.is_deaf:
            return
        path, _, query = self._url.partition(b"?")
        is_http_11 = self._parser.get_http_version() == "1.1"
        request = Request(
            method=self._parser.get_method(),
            path=path,
            query=query,
            headers=self._headers,
            ambiguous=self._ambiguous,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
            # 1.0 with keep-alive is possible, and not worth a second way of framing.
            keep_alive=is_http_11 and self._parser.should_keep_alive(),
            is_http_11=is_http_11,
        )
        self._body = []
        self._on_request(request)

    def _refuse(self, status: int, detail: str) -> None:
        if not self.is_deaf:
            self.is_deaf = True
            self.is_receiving = False
            self._body = []
            self._on_refusal(Refused(status, detail))
