"""Server-sent events as ORS clients read them.

Differences from the reference servers: no data line starts with white space. Their clients strip all of it instead of
the one space that the format allows, and the result would lose it without a word.
"""

HEADERS = b"Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
PING = b": ping\r\n\r\n"
PING_S = 10.0
"""The clients give up after 30 s without a byte."""
SLICE_CHARS = 4096
"""As the reference servers cut; a result up to this size is a single ``end``."""
LONGEST_CHARS = 16_384
"""A line never exceeds 64 KiB: white space takes at most 3 bytes a character, and only a run of it is this long."""


def event(name: str, data: bytes) -> bytes:
    """Write an event with one data line; *data* holds no line break."""
    return b"event: %b\r\ndata: %b\r\n\r\n" % (name.encode(), data)


def task_id(value: str) -> bytes:
    return event("task_id", value.encode())


def result(payload: bytes) -> bytes:
    """Write compact JSON as ``chunk`` events and one ``end``."""
    # The usual case without a copy to text: JSON starts with a bracket and has no line break outside of strings.
    if len(payload) <= SLICE_CHARS:
        return b"event: end\r\ndata: %b\r\n\r\n" % payload
    slices = safe_slices(payload.decode())
    frames = [event("chunk", part.encode()) for part in slices[:-1]]
    return b"".join((*frames, event("end", slices[-1].encode())))


def error(text: str) -> bytes:
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
