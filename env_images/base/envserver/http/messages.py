"""A request as it came and a response as it goes."""

from collections.abc import Callable, Collection, Mapping

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


class Request:
    """A complete request. Header names are lower case; of a header that came twice the last value is kept."""

    __slots__ = ("ambiguous", "body", "headers", "is_http_11", "keep_alive", "method", "path", "query")

    def __init__(
        self,
        *,
        method: bytes,
        path: bytes,
        query: bytes,
        headers: dict[bytes, bytes],
        ambiguous: Collection[bytes],
        body: bytes,
        keep_alive: bool,
        is_http_11: bool,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.ambiguous = ambiguous
        """Names of headers that came with different values."""
        self.body = body
        self.keep_alive = keep_alive
        self.is_http_11 = is_http_11

    def text(self, name: bytes) -> str | None:
        """Give a header's value without the white space round it, or None.

        Raises:
            Refused: 400, the header came with different values: whatever were chosen, somebody could mean the other.
        """
        if name in self.ambiguous:
            raise Refused(400, f"{name.decode('latin-1')} was sent with different values")
        value = self.headers.get(name)
        return None if value is None else value.decode("latin-1").strip()


class Response:
    """A whole response.

    Args:
        headers: ready header lines, each with its line end, the content type among them.
        is_stream: the body is a complete event stream, sent as one chunk where the client knows chunks.
        on_sent: called once: with True when the last byte has left this process, with False when it never will.
    """

    __slots__ = ("body", "headers", "is_stream", "on_sent", "status")

    def __init__(
        self,
        body: bytes,
        *,
        status: int = 200,
        headers: bytes = JSON,
        is_stream: bool = False,
        on_sent: Callable[[bool], None] | None = None,
    ) -> None:
        self.body = body
        self.status = status
        self.headers = headers
        self.is_stream = is_stream
        self.on_sent = on_sent

    def wire(self, *, has_body: bool, keep_alive: bool, is_http_11: bool) -> bytes:
        """Write the response; without *has_body* (HEAD) only its headers."""
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
    """Write the status line."""
    return _OK if status == 200 else b"HTTP/1.1 %d %b\r\n" % (status, _REASONS[status])


def json_response(value: object) -> Response:
    return Response(encode(value))


def refused(refusal: Refused) -> Response:
    """Write a refusal in the protocol's form."""
    headers = JSON + lines(refusal.headers)
    return Response(encode({"detail": refusal.detail}), status=refusal.status, headers=headers)


def lines(headers: Mapping[str, str]) -> bytes:
    """Write headers, each with its line end."""
    return b"".join(b"%b: %b\r\n" % (name.encode(), value.encode("latin-1")) for name, value in headers.items())
