"""Formats log records: one event name, then key=value, without secrets and bodies.

Three formats. ``text`` is one line a record. ``json`` is one JSON object a line. On a terminal, a person who runs the
gateway sees less: how to reach it, one line per episode, and all warnings and errors.

The authenticator removes keys from paths (``/k/{key}/…``) before any other code sees them, and the server's access log
is off. So no key reaches a log.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Final, Literal

from rich.console import Console
from rich.text import Text

FORMAT: Final = "%(asctime)s %(levelname)s %(name)s %(message)s"
MOST_CHARS: Final = 16_384
"""Maximum length of a record's message and of each value. Texts of authors, servers and agents may have any length."""
_ODD: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that would end a line, control a terminal, or have no encoding."""
_CONVERSION: Final = re.compile(r"%[^%a-zA-Z]*[a-zA-Z]")
_OUTCOMES: Final = {"finished": "green", "stopped": "green", "unplayed": "yellow"}
"""Colors of an episode's line by its outcome; all other outcomes are failures and red."""


def configure(level: str, style: Literal["", "text", "json"] = "") -> None:
    """Log to standard error.

    Args:
        level: The least severe level: ``debug`` … ``error``.
        style: ``text`` or ``json``; empty: for a person on a terminal, and ``text`` elsewhere.
    """
    handler: logging.Handler
    if not style and sys.stderr.isatty():
        handler = PersonHandler(Console(stderr=True, highlight=False))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JsonFormatter() if style == "json" else LineFormatter(FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # At info level these report the gateway's own requests to engines and their own start, which help no operator.
    for name in ("httpx", "httpcore", "docker", "urllib3", "uvicorn"):
        logging.getLogger(name).setLevel(logging.WARNING)


def plain(text: str) -> str:
    """Return *text* as one line of at most about `MOST_CHARS` characters, which is safe on any terminal."""
    return _ODD.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), shortened(text))


def shortened(text: str) -> str:
    """Return *text* without its middle if it is longer than `MOST_CHARS`."""
    if len(text) <= MOST_CHARS:
        return text
    half = MOST_CHARS // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the values of an event by their names in its format string (``"opened session=%s took_s=%.3f"``)."""
    values = list(record.args) if isinstance(record.args, tuple) else []
    found: dict[str, Any] = {}
    for word in str(record.msg).split(" "):
        used = [values.pop(0) for _ in _CONVERSION.findall(word) if values]
        key, is_field, form = word.partition("=")
        if is_field and key.isidentifier():
            found[key] = used[0] if _CONVERSION.fullmatch(form) and used else form % tuple(used)
    return found


class LineFormatter(logging.Formatter):
    """Writes a record as one line of text. Only a fault of the gateway itself has further lines, with its traceback."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter.formatMessage``."""
        return plain(super().formatMessage(record))


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: time (UTC), level, logger, event, the event's fields, message."""

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter.format``."""
        row = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": str(record.msg).partition(" ")[0],
            **{key: shortened(value) if isinstance(value, str) else value for key, value in fields_of(record).items()},
            "message": shortened(record.getMessage()),
        }
        if record.exc_info and record.exc_info[0] is not None:
            row["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(row, default=str)


class PersonHandler(logging.Handler):
    """Shows a person what is worth a line: the gateway's address, each episode, warnings and errors."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler.emit``."""
        event = str(record.msg).partition(" ")[0]
        if record.levelno >= logging.WARNING:
            said, _, lines = record.getMessage().partition(" traceback=")
            self._console.print(_line(record, said, "red" if record.levelno >= logging.ERROR else "yellow"))
            if lines:  # of an author's code, as one value
                shown = str(fields_of(record).get("traceback", lines)).rstrip().split("\n")
                self._console.print(Text("\n".join(map(plain, shown)), style="dim"))
            if record.exc_info and record.exc_info[0] is not None:
                self._console.print(Text("".join(traceback.format_exception(*record.exc_info)), style="dim"))
        elif event == "gateway_ready":
            self._ready(**fields_of(record))
        elif event == "session_closed":
            self._console.print(_episode(record, **fields_of(record)))
        elif event == "gateway_stopped":
            self._console.print(_line(record, "The gateway has stopped.", "dim"))
        elif record.levelno < logging.INFO or event == "gateway_draining":
            self._console.print(_line(record, record.getMessage(), "dim"))

    def _ready(self, *, url: str, environments: str, **_: object) -> None:
        first = environments.partition(",")[0]
        self._console.print(Text.assemble("The gateway is at ", (url, "bold green"), ". Stop it with Ctrl-C."))
        self._console.print(Text.assemble("Environments: ", (environments.replace(",", ", "), "bold"), "."))
        self._console.print(Text.assemble("Dashboard: ", (f"{url}/dashboard", "cyan"), "."))
        self._console.print(Text.assemble("Try: ", (f"curl {url}/{first}/splits", "cyan")))


def _episode(
    record: logging.LogRecord,
    *,
    environment: str,
    task: str,
    outcome: str,
    reason: str,
    reward: object,
    steps: object,
    **_: object,
) -> Text:
    counted = f"{steps or 0} step{'' if steps == 1 else 's'}"
    said = f"{environment}  {task}  reward {'-' if reward is None else reward}  {counted}  {outcome}"
    color = _OUTCOMES.get(outcome, "red")
    return _line(record, said if outcome in _OUTCOMES else f"{said} ({reason})", color)


def _line(record: logging.LogRecord, said: str, style: str) -> Text:
    time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
    return Text.assemble((f"{time} ", "dim"), (plain(said), style))
