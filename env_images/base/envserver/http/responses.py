"""How a call's outcome reaches its client: as an event stream, or as one JSON object.

Differences from the reference servers: a call that waits for its session's setup opens its stream after two seconds
instead of keeping the client without a header until it gives up and asks again. No data line of a stream starts with
white space: ORS clients strip all of it instead of the one space that the format allows, and would lose it.
"""

import os
from collections.abc import Callable

from envserver.http.bodies import CallBody
from envserver.http.connection import Answer, Connection, Pending
from envserver.http.json_text import encode
from envserver.http.messages import JSON, Request, Response, json_response, lines
from envserver.sessions.calls import Calls
from envserver.sessions.session import SETUP_WAIT_S, Call, Session, starting

HOLD_S = 2.0
"""A stream opens this late where the setup runs: failures until then keep their status."""
GRACE_S = 0.05
"""A stream opens this late where the session is ready: most tools are faster, and then all goes in one write."""
EVENT_STREAM = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
PING = b": ping\r\n\r\n"
PING_S = 10.0
"""The clients give up after 30 s without a byte."""
SLICE_CHARS = 4096
"""As the reference servers cut; a result up to this size is a single ``end``."""
LONGEST_CHARS = 16_384
"""A line never exceeds 64 KiB: white space takes at most 3 bytes a character, and only a run of it is this long."""


class Delivery:
    """Answers ``/call``, ``/score_group`` and ``/create_session``."""

    def __init__(self, *, calls: Calls, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._clock = clock

    def new_session_id(self, request: Request) -> Response:
        """Offer a session id, a random UUID; nothing is kept of it."""
        digits = os.urandom(16).hex()
        variant = "89ab"[int(digits[16], 16) % 4]
        sid = f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
        if _wants_json(request):
            return json_response({"sid": sid})
        return Response(sse_task_id(sid) + sse_event("end", b""), headers=EVENT_STREAM, is_stream=True)

    def answer(self, request: Request, connection: Connection, session: Session, body: CallBody) -> Answer:
        """Admit the call and answer with its outcome.

        Raises:
            Refused: the call was not admitted.
        """
        call = self._calls.admit(session, body, key=request.text(b"idempotency-key"))
        wants_json = _wants_json(request)
        if call is None:
            return _unknown_task(as_json=wants_json)
        listener = _Listener(self._calls, call, counts=body.action.spelling != "score")
        if wants_json and body.action.spelling != "score":
            call.is_turn = True  # it takes its turn as it ends, whether this client is still there or not
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
    """One request's interest in a call; it ends exactly once."""

    def __init__(self, calls: Calls, call: Call, *, counts: bool) -> None:
        """*counts*: who hears the outcome, as JSON, takes a turn by that; a judgement is none."""
        self.call = call
        self._counts = counts
        self._calls = calls
        self._in_hand = True
        call.listeners += 1

    def whole(self, *, as_json: bool) -> Response:
        """Write the whole answer; from now on the connection tells what became of it."""
        self._in_hand = False
        call = self.call
        if as_json:
            turn = self._calls.turn(call) if self._counts else 0
            headers = b"%bX-Session-Turn: %d\r\n" % (JSON, turn) if turn else JSON
            if turn and call.session.finished:
                headers += b"X-Session-Rewarded: %d\r\n" % call.session.is_rewarded
            return Response(_object(call), headers=headers + _faults(call), on_sent=self._settle)
        body = sse_task_id(call.task_id) + _frames(call)
        return Response(body, headers=EVENT_STREAM + _faults(call), is_stream=True, on_sent=self._settle)

    def leave(self, *, delivered: bool = False) -> None:
        """End the interest, where it has not ended and is not the connection's."""
        if self._in_hand:
            self._in_hand = False
            self._settle(delivered)

    def _settle(self, delivered: bool) -> None:
        self._calls.detach(self.call, delivered=delivered)


async def _json(listener: _Listener) -> Response:
    """
    Raises:
        Refused: the call never ran.
    """
    call = listener.call
    session = call.session
    if not session.settled.is_set and not await session.settled.wait(SETUP_WAIT_S):
        raise starting()
    while not await call.ended.wait(PING_S):
        continue  # as long as the client stays
    if call.refusal is not None:
        raise call.refusal.again()
    return listener.whole(as_json=True)


async def _stream(listener: _Listener, connection: Connection) -> Response | None:
    """
    Raises:
        Refused: the call never ran, and no header was sent.
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
    listener.leave(delivered=await stream.end(_frames(call), _faults(call)))
    return None


def _faults(call: Call) -> bytes:
    """The header that tells what went wrong in the author's code and was not told yet."""
    return lines(call.session.fault_headers()) if call.session.untold else b""


def _frames(call: Call) -> bytes:
    if call.outcome is None:
        assert call.refusal is not None  # a call ends with one of both
        return sse_error(str(call.refusal.detail))
    ending, payload = call.outcome
    if ending == "result":
        return sse_result(payload)
    text = payload.decode()
    return sse_error(f"{ending}: {text}" if ending == "author_fault" else text)


def _object(call: Call) -> bytes:
    assert call.outcome is not None  # asked by whoever waited for it
    ending, payload = call.outcome
    return payload if ending == "result" else encode({"ok": False, "error": payload.decode(), "reason": ending})


def _unknown_task(*, as_json: bool) -> Response:
    text = "unknown task_id"
    if as_json:
        return json_response({"ok": False, "error": text, "reason": "unknown_task_id"})
    return Response(sse_error(text), headers=EVENT_STREAM, is_stream=True)


def _wants_json(request: Request) -> bool:
    accept = request.headers.get(b"accept", b"")
    return b"application/json" in accept and b"text/event-stream" not in accept


def sse_event(name: str, data: bytes) -> bytes:
    """Write an event with one data line; *data* holds no line break."""
    return b"event: %b\r\ndata: %b\r\n\r\n" % (name.encode(), data)


def sse_task_id(value: str) -> bytes:
    return sse_event("task_id", value.encode())


def sse_result(payload: bytes) -> bytes:
    """Write compact JSON as ``chunk`` events and one ``end``."""
    # The usual case without a copy to text: JSON starts with a bracket and has no line break outside of strings.
    if len(payload) <= SLICE_CHARS:
        return b"event: end\r\ndata: %b\r\n\r\n" % payload
    slices = safe_slices(payload.decode())
    frames = [sse_event("chunk", part.encode()) for part in slices[:-1]]
    return b"".join((*frames, sse_event("end", slices[-1].encode())))


def sse_error(text: str) -> bytes:
    """Write an ``error`` event, one data line per line of *text*; longer lines than 16,384 characters are folded."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    folded = [line[i : i + LONGEST_CHARS] for line in lines for i in range(0, len(line) or 1, LONGEST_CHARS)]
    # "replace": an author's text may hold lone surrogates, which UTF-8 cannot carry.
    data = b"".join(b"data: %b\r\n" % line.encode(errors="replace") for line in folded)
    return b"event: error\r\n%b\r\n" % data


def safe_slices(text: str, *, size: int = SLICE_CHARS, longest: int = LONGEST_CHARS) -> list[str]:
    """Cut compact JSON *text* into slices of *size* characters, none of which starts with white space.

    A cut moves behind the white space it would fall on; within a run beyond *longest* characters the slice starts
    with an escape, which is the same JSON because compact JSON has white space only inside strings.
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
