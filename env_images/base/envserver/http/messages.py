"""Requests, parsed from a client's bytes within limits, and responses.

httptools refuses invalid HTTP, including a body with two different lengths. The receiver adds the missing limits.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import httptools
from envserver.errors import Refused
from envserver.http.json_text import encode

_REASONS: Mapping[int, bytes] = {
    200: b"OK",
    307: b"Temporary Redirect",
    400: b"Bad Request",
    401: b"Unauthorized",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    410: b"Gone",
    413: b"Content Too Large",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    503: b"Service Unavailable",
}
JSON = b"Content-Type: application/json\r\n"
_OK = b"HTTP/1.1 200 OK\r\n"
HEADERS_MAX_BYTES = 128 * 1024
"""Maximum bytes of the request line and headers. X-Secrets alone may take 64 KiB."""
_CODING = b"transfer-encoding"
_TOO_LARGE = (413, "Request body too large")
_HEADERS_TOO_LARGE = (431, "Request header fields too large")


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A complete request. Header names are in lower case. Of a repeated header the last value is kept."""

    method: bytes
    path: bytes
    query: bytes
    headers: dict[bytes, bytes]
    ambiguous: Collection[bytes]
    """Names of headers that were repeated with different values."""
    body: bytes
    keep_alive: bool
    is_http_11: bool

    def text(self, name: bytes) -> str | None:
        """Return a header's value without surrounding white space, or None.

        Raises:
            Refused: 400: The header has different values, and another reader could choose the other value.
        """
        if name in self.ambiguous:
            raise Refused(400, f"{name.decode('latin-1')} was sent with different values")
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1").strip()


class Receiver:
    """Parses the bytes of one connection.

    Args:
        on_received: Called with each complete request, and at most once with a refusal. Later bytes are dropped.
        on_expect: Called if a client waits for permission to send its body.
    """

    def __init__(
        self,
        *,
        body_max_bytes: int,
        on_received: Callable[[Request | Refused], None],
        on_expect: Callable[[], None],
    ) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body_max_bytes = body_max_bytes
        self._on_received = on_received
        self._on_expect = on_expect
        self.total_bytes = 0
        """Number of all received bytes."""
        self.is_receiving = False
        """Whether a request has started and is incomplete."""
        self.is_deaf = False
        """Whether received bytes are dropped, after a refusal."""
        self.on_message_begin()
        self.is_receiving = False

    def feed(self, data: bytes) -> None:
        """Parse *data* and call the callbacks."""
        self.total_bytes += len(data)
        if self.is_deaf:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "Upgrade is not supported")
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request")
        # An endless header never reaches its callback, so the raw bytes are counted too.
        if self.is_receiving and not self._has_headers:
            self._head_bytes += len(data)
            if self._head_bytes > HEADERS_MAX_BYTES:
                self._refuse(*_HEADERS_TOO_LARGE)

    def close(self) -> None:
        """Release the parser. Their reference cycle would otherwise wait for the garbage collector."""
        self.is_deaf = True
        del self._parser

    @property
    def in_body(self) -> bool:
        """Whether a request's headers are complete and its body is not."""
        return self.is_receiving and self._has_headers

    # -- callbacks of the parser

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
            is_second_coding = key == _CODING and key in self._headers
            if self._headers.setdefault(key, value) != value or is_second_coding:
                self._ambiguous = {*self._ambiguous, key}
                self._headers[key] = value

    def on_headers_complete(self) -> None:
        self._has_headers = True
        size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers.items())
        is_http_1 = self._parser.get_http_version() in ("1.0", "1.1")  # the parser also reads 0.9 and 2.0
        if not is_http_1 or self._headers.get(_CODING, b"chunked").lower() != b"chunked" or _CODING in self._ambiguous:
            self._refuse(400, "Invalid HTTP request")
        elif size > HEADERS_MAX_BYTES:
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
            # Keep-alive is possible in HTTP/1.0, but does not justify a second way of framing.
            keep_alive=is_http_11 and self._parser.should_keep_alive(),
            is_http_11=is_http_11,
        )
        self._body = []
        self._on_received(request)

    def _refuse(self, status: int, detail: str) -> None:
        if not self.is_deaf:
            self.is_deaf = True
            self.is_receiving = False
            self._body = []
            self._on_received(Refused(status, detail))


@dataclass(slots=True, eq=False)
class Response:
    """A complete response."""

    body: bytes
    status: int = 200
    headers: bytes = JSON
    """Complete header lines including the content type, each with its line end."""
    is_stream: bool = False
    """Whether the body is a complete event stream. It is sent as one chunk to clients that support chunks."""
    on_sent: Callable[[bool], None] | None = None
    """Called once: with True when the last byte has left this process, or with False if it never will."""

    def wire(self, *, has_body: bool, keep_alive: bool, is_http_11: bool) -> bytes:
        """Return the response's bytes. Without *has_body* (HEAD), return only the headers."""
        head = head_of(self.status) + self.headers
        if not keep_alive:
            head += b"Connection: close\r\n"
        elif self.is_stream:
            head += b"Connection: keep-alive\r\n"
        if not self.is_stream:
            head += b"Content-Length: %d\r\n\r\n" % len(self.body)
            return head + self.body if has_body else head
        if not is_http_11:
            return b"%b\r\n%b" % (head, self.body)
        return b"%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(self.body), self.body)


def head_of(status: int) -> bytes:
    """Return the status line."""
    return _OK if status == 200 else b"HTTP/1.1 %d %b\r\n" % (status, _REASONS[status])


def json_response(value: object) -> Response:
    return Response(encode(value))


def refused(refusal: Refused) -> Response:
    """Return a refusal as a response in the protocol's form."""
    headers = JSON + lines(refusal.headers)
    return Response(encode({"detail": refusal.detail}), status=refusal.status, headers=headers)


def lines(headers: Mapping[str, str]) -> bytes:
    """Return the header lines, each with its line end."""
    return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode("latin-1")) for name, value in headers.items())
