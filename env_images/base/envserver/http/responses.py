"""Delivery of a call's outcome to its client, as an event stream or as one JSON object.

Differences from the reference servers: if a call waits for its session's setup, its stream opens after two seconds. In
the reference the client gets no header, gives up and retries. No data line of a stream starts with white space. ORS
clients strip all of it instead of the single space that the format allows.
"""

import math
import os
import re
import time
from collections.abc import Callable

from envserver.http.bodies import CallBody
from envserver.http.connection import Answer, Connection, Pending
from envserver.http.json_text import encode
from envserver.http.messages import JSON, Request, Response, json_response, lines
from envserver.sessions.calls import Calls
from envserver.sessions.session import SETUP_WAIT_S, Call, Session, starting

HOLD_S = 2.0
"""Seconds before a stream opens during a setup. Earlier failures keep their HTTP status."""
GRACE_S = 0.05
"""Seconds before a stream opens in a ready session. Most tools are faster, and then one write sends everything."""
EVENT_STREAM = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
PING = b": ping\r\n\r\n"
PING_S = 10.0
"""Seconds between pings. The clients give up after 30 s without a byte."""
SLICE_CHARS = 4096
"""Size of a slice, as in the reference servers. A result up to this size is a single ``end``."""
LONGEST_CHARS = 16_384
"""Longest line in characters. A line stays within 64 KiB, because white space takes at most 3 bytes a character and
only a run of it gets this long."""
_LINE_ENDS = re.compile("\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")
"""What clients may take for the end of a line: the format has the first three, ``str.splitlines`` has them all."""
_RAW_LINE_ENDS = re.compile(b"\xc2\x85|\xe2\x80[\xa8\xa9]")
"""Those that JSON may contain unescaped, in UTF-8."""


class Delivery:
    """Answers ``/call``, ``/score_group`` and ``/create_session``."""

    def __init__(self, *, calls: Calls, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._clock = clock

    def new_session_id(self, request: Request) -> Response:
        """Return a new session id, a random UUID. The server does not store it."""
        digits = os.urandom(16).hex()
        variant = "89ab"[int(digits[16], 16) % 4]
        sid = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
        if _wants_json(request):
            return json_response({"sid": sid})
        return Response(sse_task_id(sid) + sse_event("end", b""), headers=EVENT_STREAM, is_stream=True)

    def answer(self, request: Request, connection: Connection, session: Session, body: CallBody) -> Answer:
        """Admit the call and answer with its outcome.

        Raises:
            Refused: The call was not admitted.
        """
        key, ends_at = request.text(b"idempotency-key"), _end_of_step(request)
        call = self._calls.admit(session, body, key=key, ends_at=ends_at)
        wants_json = _wants_json(request)
        if call is None:
            return _unknown_task(as_json=wants_json)
        listener = _Listener(self._calls, call, clock=self._clock)
        if call.outcome is not None:
            return listener.whole(as_json=wants_json)
        session.requests += 1

        def release() -> None:
            session.requests -= 1
            session.used_at = self._clock()
            listener.leave()

        work = _json(listener) if wants_json else _stream(listener, connection)
        return Pending(work, release)


class _Listener:
    """Counts one request as a listener of a call, until its answer is delivered or given up. It ends exactly once."""

    def __init__(self, calls: Calls, call: Call, *, clock: Callable[[], float]) -> None:
        self.call = call
        self._clock = clock
        self._calls = calls
        self._in_hand = True
        call.listeners += 1

    def whole(self, *, as_json: bool) -> Response:
        """Return the complete answer. From now on the connection reports its delivery."""
        self._in_hand = False
        call = self.call
        if as_json:
            headers = b"%bX-Session-Turn: %d\r\n" % (JSON, call.turn) if call.turn else JSON
            if call.turn and call.session.finished:
                headers += b"X-Session-Rewarded: %d\r\n" % call.session.is_rewarded
            return Response(_object(call), headers=headers + self.reports(), on_sent=self._settle)
        body = sse_task_id(call.task_id) + _frames(call)
        return Response(body, headers=EVENT_STREAM + self.reports(), is_stream=True, on_sent=self._settle)

    def reports(self) -> bytes:
        """Return header lines for the session's creator: unreported faults, and the result of an episode that ended."""
        session = self.call.session
        if not (session.untold or session.finished):
            return b""
        return lines(session.fault_headers() | session.result_headers(self._clock()))

    def leave(self, *, delivered: bool = False) -> None:
        """Stop listening to the call. Does nothing after an earlier `leave` or `whole`."""
        if self._in_hand:
            self._in_hand = False
            self._settle(delivered)

    def _settle(self, delivered: bool) -> None:
        self._calls.detach(self.call, delivered=delivered)


async def _json(listener: _Listener) -> Response:
    """
    Raises:
        Refused: The call never ran, or the session's setup still runs.
    """
    call = listener.call
    session = call.session
    if not session.settled.is_set and not await session.settled.wait(SETUP_WAIT_S):
        raise starting()
    while not await call.ended.wait(PING_S):
        continue  # as long as the client stays connected
    if call.refusal is not None:
        raise call.refusal.again()
    return listener.whole(as_json=True)


async def _stream(listener: _Listener, connection: Connection) -> Response | None:
    """
    Raises:
        Refused: The call never ran, and no header was sent.
    """
    call = listener.call
    session = call.session
    if not session.settled.is_set:
        await session.settled.wait(HOLD_S)
    if session.settled.is_set:
        await call.ended.wait(GRACE_S)
    if call.refusal is not None:
        raise call.refusal.again()
    if call.outcome is not None:
        return listener.whole(as_json=False)
    stream = connection.stream(EVENT_STREAM)
    stream.write(sse_task_id(call.task_id))
    while not await call.ended.wait(PING_S):
        stream.keep_alive(PING)
    listener.leave(delivered=await stream.end(_frames(call), listener.reports()))
    return None


def _frames(call: Call) -> bytes:
    if call.outcome is None:
        assert call.refusal is not None  # a call ends with exactly one of the two
        return sse_error(str(call.refusal.detail))
    ending, payload = call.outcome
    turn = b"id: %d\r\n" % call.turn if call.turn else b""
    if ending == "result":
        return sse_result(payload, turn)
    text = payload.decode()
    return sse_error(text if ending == "tool_failed" else f"{ending}: {text}", turn)


def _object(call: Call) -> bytes:
    assert call.outcome is not None  # the request has waited for it
    ending, payload = call.outcome
    return payload if ending == "result" else encode({"ok": False, "error": payload.decode(), "reason": ending})


def _unknown_task(*, as_json: bool) -> Response:
    text = "unknown task_id"
    if as_json:
        return json_response({"ok": False, "error": text, "reason": "unknown_task_id"})
    return Response(sse_error(text), headers=EVENT_STREAM, is_stream=True)


def _end_of_step(request: Request) -> float:
    """Return the time at which the client stops waiting, by ``time.monotonic``; infinite if the client names none."""
    try:
        within_s = float(request.headers.get(b"x-step-seconds", b"inf"))
    except ValueError:
        return math.inf
    return time.monotonic() + within_s if within_s >= 0 else math.inf


def _wants_json(request: Request) -> bool:
    accept = request.headers.get(b"accept", b"")
    return b"application/json" in accept and b"text/event-stream" not in accept


def sse_event(name: str, data: bytes, field: bytes = b"") -> bytes:
    """Return an event with one data line. *data* contains no line break. *field* is a further line."""
    return b"event: %b\r\n%bdata: %b\r\n\r\n" % (name.encode(), field, data)


def sse_task_id(value: str) -> bytes:
    return sse_event("task_id", value.encode())


def sse_result(payload: bytes, field: bytes = b"") -> bytes:
    """Return compact JSON as ``chunk`` events and one ``end``, with line ends of Unicode as escapes.

    *field* is a further line of the last event.
    """
    if not payload.isascii():
        payload = _RAW_LINE_ENDS.sub(lambda found: b"\\u%04x" % ord(found[0].decode()), payload)
    # The usual case needs no copy to text: JSON starts with a bracket and has no line break outside strings.
    if len(payload) <= SLICE_CHARS:
        return sse_event("end", payload, field)
    slices = safe_slices(payload.decode())
    frames = [sse_event("chunk", part.encode()) for part in slices[:-1]]
    return b"".join((*frames, sse_event("end", slices[-1].encode(), field)))


def sse_error(text: str, field: bytes = b"") -> bytes:
    """Return an ``error`` event with a data line per line of *text*. Lines above 16,384 characters are folded.

    *field* is a further line of the event.
    """
    lines = _LINE_ENDS.split(text)
    folded = [line[i : i + LONGEST_CHARS] for line in lines for i in range(0, len(line) or 1, LONGEST_CHARS)]
    # "replace": an author's text may contain lone surrogates, which UTF-8 cannot carry.
    data = b"".join(b"data: %b\r\n" % line.encode(errors="replace") for line in folded)
    return b"event: error\r\n%b%b\r\n" % (field, data)


def safe_slices(text: str, *, size: int = SLICE_CHARS, longest: int = LONGEST_CHARS) -> list[str]:
    """Cut compact JSON *text* into slices of *size* characters, none of which starts with white space.

    A cut inside white space moves behind it. If the run exceeds *longest* characters, the next slice starts with an
    escape instead. The JSON stays the same, because compact JSON has white space only inside strings.
    """
    slices = []
    position, end = 0, len(text)
    while position < end:
        cut = min(position + size, end)
        while cut < end and cut - position < longest and text[cut].isspace():
            cut += 1
        part = text[position:cut]
        slices.append(f"\\u{ord(part[0]):04x}{part[1:]}" if part[0].isspace() else part)
        position = cut
    return slices
