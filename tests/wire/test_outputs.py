"""A tool's output arrives unchanged, whatever its length and wherever it is cut."""

import itertools
import sys

import httpx
import pytest

from tests.wire.raw import MAX_LINE_BYTES, episode, parse
from tests.wire.sdks import Client, Sdk, text
from tests.wire.targets import OFFICIAL, ONE_GATEWAY, on, with_clients

pytestmark = pytest.mark.wire

CUT = 4096
"""The position at which the official servers cut, in characters of the JSON text."""
WHITE = "".join(chr(code) for code in range(sys.maxunicode + 1) if chr(code).isspace() and code > 0x20) + " "
SOURCE = "".join(f"class C{n}:\n    def f(self) -> int:\n        return {n}\n\n\n" for n in range(1500))


@with_clients(*OFFICIAL, *ONE_GATEWAY)
@pytest.mark.parametrize("length", [0, 1, CUT - 1, CUT, CUT + 1, 100_000, 1_000_000])
async def test_an_output_of_any_length_arrives_complete(client: Client, sdk: Sdk, length: int) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        output = text(await session.call_tool("big", {"n": length}))

    assert len(output) == length
    assert output == ("0123456789" * (length // 10 + 1))[:length]


@with_clients(*ONE_GATEWAY)
@pytest.mark.parametrize("length", [1, CUT, 20_000])
async def test_all_spaces_of_an_output_arrive(client: Client, sdk: Sdk, length: int) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        assert text(await session.call_tool("spaces", {"n": length})) == " " * length


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029"], ids=ascii)
async def test_a_client_that_reads_lines_gets_a_whole_result(http: httpx.AsyncClient, end: str) -> None:
    said = f"a{end}b" * CUT
    asked = {"name": "echo", "input": {"text": said}}
    async with episode(http) as opened:
        headers = opened.headers | {"Accept": "text/event-stream"}
        async with http.stream("POST", "/probe/call", headers=headers, json=asked) as answer:
            lines = [line async for line in answer.aiter_lines() if line]

    assert [line for line in lines if not line.startswith(("event: ", "id: ", "data: "))] == []
    assert parse("\n".join([*lines, "", ""]).replace("\nevent: ", "\n\nevent: ")).text == said


@with_clients(*ONE_GATEWAY)
async def test_a_program_keeps_its_indentation(client: Client, sdk: Sdk) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        assert text(await session.call_tool("echo", {"text": SOURCE})) == SOURCE


@with_clients(*ONE_GATEWAY)
async def test_white_space_survives_at_every_position_around_a_cut(client: Client, sdk: Sdk) -> None:
    # Each character is tried as the last of a piece and as the first of the next piece, at every position around the
    # cut.
    head = len('{"ok":true,"output":{"blocks":[{"text":"')
    lost = []

    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        for white, place in itertools.product(WHITE, range(CUT - head - 2, CUT - head + 3)):
            said = "x" * place + white + "y" * 50
            if text(await session.call_tool("echo", {"text": said})) != said:
                lost.append((f"U+{ord(white):04X}", place))

    assert lost == []


@with_clients(*ONE_GATEWAY)
async def test_long_runs_of_every_kind_of_white_space_arrive(client: Client, sdk: Sdk) -> None:
    said = (WHITE * 400 + "·") * 3

    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        assert text(await session.call_tool("echo", {"text": said})) == said


@with_clients(*OFFICIAL, *ONE_GATEWAY)
@pytest.mark.parametrize(
    "said",
    [
        pytest.param("🙂é漢" * 5000, id="characters of several bytes at every cut"),
        pytest.param("".join(map(chr, range(32))) + "\x7f\x80\x9f", id="control characters"),
        pytest.param(
            "data: x\n\nevent: end\ndata: {}\n\n: comment\r\n", id="text that looks like the stream's own lines"
        ),
        pytest.param('"\\" \\u0000 \\n </script> &amp; \ufeff\ufffd\uffff', id="escapes"),
    ],
)
async def test_unusual_text_arrives_unchanged(client: Client, sdk: Sdk, said: str) -> None:
    async with client.environment("probe").session(task=sdk.task("probe", {})) as session:
        assert text(await session.call_tool("echo", {"text": said})) == said


@on(*ONE_GATEWAY)
async def test_no_line_is_too_long_or_starts_with_white_space(http: httpx.AsyncClient) -> None:
    said = (WHITE * 3000 + "漢" * 5000) * 2

    async with episode(http) as opened:
        outcome = await opened.call("echo", {"text": said})

    assert outcome.text == said
    assert all(len(f"data: {line}".encode()) <= MAX_LINE_BYTES for line in outcome.lines)
    assert not [line for line in outcome.lines if line[:1].isspace()]


@on(*OFFICIAL, *ONE_GATEWAY)
async def test_a_short_result_is_one_end_event_and_its_form_is_exact(http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        response = await opened.ask("score", {"reward": 1})
        outcome = await opened.call("score", {"reward": 1})

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] in ("no-cache", "no-store")
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert [event.name for event in outcome.events] == ["task_id", "end"]
    assert outcome.events[1].data == (
        '{"ok":true,"output":{"blocks":[{"text":"scored","detail":null,"type":"text"}],'
        '"metadata":null,"reward":1.0,"finished":false}}'
    )
