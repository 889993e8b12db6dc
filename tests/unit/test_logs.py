"""The formats of the log: fields of events, JSON lines, and the output for a person on a terminal."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from gateway import logs


def record(form: str, *values: object, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("gateway.test", level, __file__, 1, form, values, None)


@pytest.mark.parametrize(
    ("form", "values", "found"),
    [
        pytest.param(
            "opened session=%s took_s=%.3f", ("a", 0.25), {"session": "a", "took_s": 0.25}, id="values with their types"
        ),
        pytest.param("closed task=%r", ("train/0 x",), {"task": "train/0 x"}, id="a text with a space"),
        pytest.param(
            "changed digest=%s→%s to=%s", ("a", "b", "c"), {"digest": "a→b", "to": "c"}, id="two values in one field"
        ),
        pytest.param("said %s status=%d", ("no", 3), {"status": 3}, id="a value without a name"),
        pytest.param("grew by=%g%% at=%s", (5.0, "x"), {"by": "5%", "at": "x"}, id="a percent sign"),
        pytest.param("plain", (), {}, id="no fields"),
        pytest.param("fixed during=start", (), {"during": "start"}, id="a field of the format itself"),
    ],
)
def test_an_events_fields_have_their_names_and_values(
    form: str, values: tuple[object, ...], found: dict[str, object]
) -> None:
    assert logs.fields_of(record(form, *values)) == found


ODD = "red\x1b[31m\r\nERROR faked\x00\x85\u2028\ud800 é"
PLAIN = r"red\x1b[31m\r\nERROR faked\x00\x85\u2028\ud800 é"


def test_a_line_holds_any_text() -> None:
    line = logs.LineFormatter("%(message)s").format(record("failed error=%s", ODD))

    assert line == f"failed error={PLAIN}"


def test_a_person_gets_no_control_characters() -> None:
    out, shown = io.StringIO(), record("failed error=%s traceback=%r", ODD, f"File 1\n{ODD}", level=logging.ERROR)

    logs.PersonHandler(Console(file=out, width=200, highlight=False)).handle(shown)

    assert "\x1b[31m" not in out.getvalue()
    assert PLAIN in out.getvalue()
    assert "\nFile 1\n" in out.getvalue()


@pytest.mark.parametrize("formatter", [logs.LineFormatter(logs.FORMAT), logs.JsonFormatter()])
def test_a_record_of_a_long_text_is_short(formatter: logging.Formatter) -> None:
    line = formatter.format(record("failed error=%s", "x" * 10_000_000))

    assert len(line) < 3 * logs.MOST_CHARS
    assert "characters" in line


def test_json_is_one_object_with_the_events_fields() -> None:
    row = json.loads(logs.JsonFormatter().format(record("session_closed reward=%s name=%r", None, "a\nb")))

    assert row.pop("time").endswith("+00:00")
    assert row == {
        "level": "info",
        "logger": "gateway.test",
        "event": "session_closed",
        "reward": None,
        "name": "a\nb",
        "message": "session_closed reward=None name='a\\nb'",
    }


def test_json_has_the_traceback_of_an_exception() -> None:
    failed = record("broken path=%s", "/x", level=logging.ERROR)
    try:
        raise ValueError("no")
    except ValueError:
        failed.exc_info = sys.exc_info()

    assert json.loads(logs.JsonFormatter().format(failed))["traceback"].endswith("ValueError: no\n")


CLOSED = "session_closed session=%s environment=%s task=%r reason=%s outcome=%s reward=%s steps=%s"


@pytest.mark.parametrize(
    ("shown", "lines"),
    [
        pytest.param(
            record("gateway_ready url=%s replica=%s environments=%s", "http://h:1", "r", "math,os"),
            [
                "The gateway is at http://h:1. Stop it with Ctrl-C.",
                "Environments: math, os.",
                "Dashboard: http://h:1/dashboard.",
                "Try: curl http://h:1/math/splits",
            ],
            id="the address of the gateway",
        ),
        pytest.param(
            record(CLOSED, "s", "math", "train/0", "deleted", "finished", 1.0, 2),
            ["math  train/0  reward 1.0  2 steps  finished"],
            id="an episode",
        ),
        pytest.param(
            record(CLOSED, "s", "os", "train/1", "worker_lost", "infrastructure", None, None),
            ["os  train/1  reward -  0 steps  infrastructure (worker_lost)"],
            id="a lost episode",
        ),
        pytest.param(
            record("worker_suspect worker=%s", "w", level=logging.WARNING), ["worker_suspect worker=w"], id="a warning"
        ),
        pytest.param(
            record(
                "author_fault task=%r error=%r traceback=%r",
                "train/0",
                "KeyError: 'zebra'",
                "Traceback (most recent call last):\n  File \"server.py\", line 3, in say\nKeyError: 'zebra'\n",
                level=logging.ERROR,
            ),
            [
                "author_fault task='train/0' error=\"KeyError: 'zebra'\"",
                "Traceback (most recent call last):",
                '  File "server.py", line 3, in say',
                "KeyError: 'zebra'",
            ],
            id="a fault of an author's code with its traceback",
        ),
        pytest.param(
            record(CLOSED, "s", "math", "train/0", "deleted", "finished", 1.0, 1),
            ["math  train/0  reward 1.0  1 step  finished"],
            id="an episode of one step",
        ),
        pytest.param(record("gateway_stopped replica=%s", "r"), ["The gateway has stopped."], id="the end"),
        pytest.param(record("session_opened session=%s", "s"), [], id="an event that only operators need"),
    ],
)
def test_the_output_for_a_person_shows_only_important_events(shown: logging.LogRecord, lines: list[str]) -> None:
    out = io.StringIO()

    logs.PersonHandler(Console(file=out, width=200, highlight=False)).handle(shown)

    assert [
        line.removeprefix(line[:9]) if line[:2].isdigit() else line for line in out.getvalue().splitlines()
    ] == lines


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """Yield the root logger, and restore its handlers and level afterwards."""
    logger = logging.getLogger()
    handlers, level = logger.handlers[:], logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("style", "stream", "kind"),
    [
        ("", Terminal(), logs.PersonHandler),
        ("", io.StringIO(), logging.StreamHandler),
        ("text", Terminal(), logging.StreamHandler),
    ],
)
def test_the_output_for_a_person_is_used_only_on_a_terminal(
    style: str, stream: io.StringIO, kind: type[logging.Handler], root: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stream)

    logs.configure("info", style)  # type: ignore[arg-type]  # settings allow this value

    assert type(root.handlers[0]) is kind


def test_json_is_written_if_the_settings_request_it(root: logging.Logger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", stream := io.StringIO())

    logs.configure("info", "json")
    logging.getLogger("gateway.test").info("started port=%d", 80)

    assert json.loads(stream.getvalue())["port"] == 80
