"""The form of calls in the log: requests and replies as the gateway saw them, as msgpack.

Bytes of a worker's protocol stay bytes, because parsing them would cost a call more than storing them. A reader parses
them. Long base64 texts, such as images, are stored once by their digest, and a reference stands for them. ORS' event
streams cut a result into pieces, so the thread first brings the pieces together.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, NamedTuple

import msgpack

from gateway.core import sse
from gateway.core.episode import Action, ImageBlock, StepResult, TextBlock
from gateway.core.errors import GatewayError
from gateway.core.ports.step_log import CONTENT_BYTES, REFERENCE, Content, LoggedCall
from gateway.core.session import SECRET_MARK
from gateway.stores.step_log.masking import masked

EMBEDDED_CHARS: Final = 4096
"""Length of base64 text from which it is stored by its digest."""
_EMBEDDED: Final = re.compile(rb'[A-Za-z0-9+/]{%d,}+={0,2}+(?=\\*")' % EMBEDDED_CHARS)
"""Base64 at the end of a JSON string, also after ``data:image/png;base64,`` and in JSON within a JSON string."""
ENCODED_CALLS: Final = 128
"""Number of calls that the event loop encodes together. It takes about 60 microseconds."""
SPARE_BYTES: Final = 16 * 2**20
"""Size up to which the memory of a packer is used again."""
COUNTED_DEPTH: Final = 8
"""Depth to which the contents of a value count for its size."""
BIG_INTEGER: Final = 1
"""Type of a msgpack extension: an integer of more than 64 bits, in decimal digits."""
INTEGER_DIGITS: Final = 4300
"""Maximum digits of an integer that Python parses."""
_ABSENT: Final = StepResult()
_RESULT: Final = tuple(each.name for each in fields(StepResult) if each.name not in ("blocks", "faults"))
_ACTION: Final = tuple(each.name for each in fields(Action))

Put = Callable[[str, bytes], str]
"""Stores data once for the episode with this lease, and returns its SHA-256 in hexadecimal digits."""


class CallBuffer:
    """Collects calls, and encodes a hundred at a time.

    Those with long contents, with a failure, or of sessions with secrets are left to the thread.

    Encoded one by one, a call costs the gateway 2.8 microseconds, and 1.7 so (`bench.run --only step_log`), because
    the encoder leaves the processor's cache between two calls of agents. Left to the thread, a call's objects would
    leave the cache before they are freed. Two packers take turns, so that the event loop copies nothing: one collects,
    and the thread writes the other.
    """

    def __init__(self) -> None:
        self._spare: list[msgpack.Packer] = []
        self._begin()

    def _begin(self) -> None:
        """Start to collect into an empty packer."""
        self._packer = self._spare.pop() if self._spare else _packer()
        self._leases: list[str] = []
        self._others: list[LoggedCall] = []
        self._newest: list[LoggedCall] = []
        """Calls that are not encoded yet."""
        self.add = _adder(self._newest, self._encode)
        """Adds a call. `take` replaces this function."""

    def __len__(self) -> int:
        return len(self._leases) + len(self._others) + len(self._newest)

    def size(self) -> int:
        """Return about the number of bytes that the calls take."""
        kept = (*self._others, *self._newest)
        return int(self._packer.getbuffer().nbytes) + sum(map(size_of, kept))

    def _encode(self) -> None:
        """Encode the newest calls, or keep them for the thread."""
        pack, note, keep = self._packer.pack, self._leases.append, self._others.append
        for call in self._newest:
            lease, _, _, _, _, request, reply, error, faults, _ = call
            if (
                type(request) is bytes is type(reply)
                and len(request) < EMBEDDED_CHARS > len(reply)
                and error is None
                and not faults
                and lease[0] != SECRET_MARK
            ):
                pack(call)
                note(lease)
            else:
                keep(call)
        self._newest.clear()

    def take(self) -> CallBatch:
        """Empty the buffer, and return what was in it."""
        self._encode()
        taken = CallBatch(self._leases, self._others, self._packer, self._spare)
        self._begin()
        return taken


def _packer() -> msgpack.Packer:
    """Return a packer for plain values only: with support for others, it takes a third more time for each call."""
    return msgpack.Packer(autoreset=False)


def _adder(newest: list[LoggedCall], encode: Callable[[], None]) -> Callable[[LoggedCall], None]:
    """Return a function that adds a call to a buffer. It is a closure, because each call of an agent pays for it."""
    append = newest.append

    def add(call: LoggedCall) -> None:
        append(call)
        if len(newest) >= ENCODED_CALLS:
            encode()

    return add


class CallBatch(NamedTuple):
    """Calls to be written."""

    leases: list[str]
    """The lease of each encoded call."""
    others: list[LoggedCall]
    """Further calls, which are not encoded yet."""
    packer: msgpack.Packer
    spare: list[msgpack.Packer]

    def body(self) -> bytes:
        """Return the encoded calls as one msgpack list, and give the packer back. May be called once."""
        body: bytes = _list_head(len(self.leases)) + self.packer.getbuffer()
        self.packer.reset()
        if len(body) <= SPARE_BYTES:
            self.spare.append(self.packer)
        return body


class CallEncoder:
    """Encodes calls one by one; not for several threads."""

    def __init__(self, put: Put) -> None:
        self._put = put
        self._lease = ""
        self._forms: Sequence[bytes] = ()
        """The lease of the call that is encoded, and its secrets."""
        self._pack: Callable[[object], bytes] = msgpack.Packer(default=self._plain, unicode_errors="surrogatepass").pack

    def encode(self, call: LoggedCall, forms: Sequence[bytes]) -> bytes:
        """Return *call* as msgpack, without the secrets that have these *forms*.

        Contents that msgpack cannot encode, because they are nested too deeply, are left out.
        """
        self._lease, self._forms = call[0], forms
        reply: Any = call[6]
        try:
            packed = self._packed((*call[:5], self._short(call[5]), self._short(reply, is_reply=True), *call[7:]))
        except (ValueError, TypeError, OverflowError) as failure:
            packed = self._packed((*call[:5], None, None, f"not logged: {failure}", (), call[9]))
        return masked(packed, forms)

    def _packed(self, call: object) -> bytes:
        # At its deepest, msgpack writes a nesting that it cannot read. Two more lists, a byte each, lower the limit;
        # the third one stands for the list of calls.
        return self._pack([[[call]]])[3:]

    def _short(self, content: Any, *, is_reply: bool = False) -> Any:
        """Return *content* without long base64 texts, and without what exceeds the limit."""
        if isinstance(content, list | tuple) and content and isinstance(content[0], bytes):
            content = b"".join(content)
        if isinstance(content, bytes):
            if is_reply and content.lstrip().startswith(_STREAM):
                content = joined(content)
            if len(content) >= EMBEDDED_CHARS:
                content = self._embedded(content)[:CONTENT_BYTES]
        return content

    def _plain(self, value: object) -> Any:
        """Return a value of the gateway's model as plain values, for msgpack."""
        if isinstance(value, Action):
            return {name: given for name in _ACTION if (given := getattr(value, name))}
        if isinstance(value, StepResult):
            given = {name: getattr(value, name) for name in _RESULT if getattr(value, name) != getattr(_ABSENT, name)}
            return {**given, "blocks": value.blocks}
        if isinstance(value, TextBlock):
            return {"text": value.text, **({} if value.detail is None else {"detail": value.detail})}
        if isinstance(value, ImageBlock):
            plain = {"image": self._image(value.data), "mime_type": value.mime_type}
            return plain if value.detail is None else {**plain, "detail": value.detail}
        if isinstance(value, int):  # of more than 64 bits
            return msgpack.ExtType(BIG_INTEGER, str(value).encode())
        return _told(value)

    def _embedded(self, content: bytes) -> bytes:
        """Return *content* with references to its long base64 texts, which are stored."""
        content = masked(content, self._forms)  # a secret may be long base64 itself
        parts: list[bytes] = []
        at = 0
        for begin, end in base64_in(content):
            parts += (content[at:begin], self._stored(content[begin:end]))
            at = end
        return b"".join((*parts, content[at:])) if parts else content

    def _stored(self, text: bytes) -> bytes:
        data = base64.b64decode(text)
        if base64.b64encode(data) != text:  # a reader could not restore it
            return text
        return REFERENCE.encode() + self._put(self._lease, masked(data, self._forms)).encode()

    def _image(self, encoded: str) -> str:
        return self._embedded(f'"{encoded}"'.encode(errors="replace"))[1:-1].decode()


def base64_in(content: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of each base64 text of at least `EMBEDDED_CHARS` in JSON.

    Such a text has one of each `EMBEDDED_CHARS` characters, so only these are looked at: a search of all characters of
    20 MB takes half a second, during which no other thread of the gateway runs.
    """
    at, probe = 0, EMBEDDED_CHARS - 1
    while probe < len(content):
        since = max(at, probe - EMBEDDED_CHARS)
        begin = max(content.rfind(b'"', since, probe + 1), content.rfind(b",", since, probe + 1)) + 1
        found = _EMBEDDED.match(content, begin) if begin else None
        if found is not None and (found.end() - begin) % 4 == 0:
            yield begin, found.end()
            at = found.end()
            probe = at
        probe += EMBEDDED_CHARS


def as_list(calls: Sequence[bytes]) -> bytes:
    """Return encoded calls as one msgpack list."""
    return b"".join((_list_head(len(calls)), *calls))


def _list_head(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")  # of a msgpack list of up to 2**32 values


def as_logged(content: Content, digest: Callable[[bytes], str]) -> Any:
    """Return a request or a reply as a reader of the log gets it. *digest* is called with each long base64 text."""
    call: LoggedCall = ("", "call", 0.0, 0.0, "", None, content, None, (), 0)
    return decode(CallEncoder(lambda _, data: digest(data)).encode(call, ()))[6]


_STREAM: Final = (b"event:", b"data:", b":")
"""How an event stream of ORS begins."""


def joined(stream: bytes) -> bytes:
    """Return an event stream that has the result of *stream* in one event. A reader finds the same in both."""
    call_id, kind, text, turn = sse.read_result(stream)
    head = _event("task_id", call_id) if call_id else b""
    return head + (_event(kind, text, turn) if kind else b"") or b":\n"


def _event(name: str, data: str, id: int = 0) -> bytes:
    lines = [f"event: {name}", *([f"id: {id}"] if id else []), *(f"data: {line}" for line in data.split("\n"))]
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


def _told(value: object) -> str:
    if isinstance(value, GatewayError):
        return f"{value.code}: {value.detail}"
    return type(value).__name__ if isinstance(value, BaseException) else repr(value)


def size_of(call: LoggedCall) -> int:
    """Return about the number of bytes that a call takes."""
    return _size(call[5]) + _size(call[6])


def _size(content: object, depth: int = 0) -> int:
    if isinstance(content, bytes | str):
        return len(content)
    if isinstance(content, ImageBlock):
        return len(content.data)
    if isinstance(content, TextBlock):
        return len(content.text)
    if isinstance(content, StepResult):
        content = content.blocks
    parts = content.values() if isinstance(content, Mapping) else content if isinstance(content, list | tuple) else ()
    return 250 + (sum(_size(part, depth + 1) for part in parts) if depth < COUNTED_DEPTH else 0)


def decode(body: bytes) -> Any:
    """Return the list of calls, or the header, that was encoded."""
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=_extension)


def _extension(kind: int, data: bytes) -> Any:
    return int(data) if kind == BIG_INTEGER and len(data) < INTEGER_DIGITS else data
