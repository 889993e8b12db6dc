"""Secrets and event streams in the step log: no form of a secret is in any file, and joined streams read the same."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, quote_plus, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import sse
from gateway.core.environment import Environment
from gateway.core.episode import ImageBlock, StepResult, TextBlock
from gateway.core.errors import EnvironmentUnavailable
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.ports.step_log import MESSAGE, Content, EpisodeEnd, EpisodeFilter, Rollout
from gateway.core.session import CloseReason
from gateway.frontends.admin.steps import result_of
from gateway.stores.step_log.encoding import CallBuffer, base64_in, joined
from gateway.stores.step_log.masking import forms_of, masked
from gateway.stores.step_log.reader import StepLogReader
from gateway.stores.step_log.writer import StepLogWriter
from tests.unit.stores.test_step_log import MATH, a_call, request, session

SECRET: Final = 'tok/en+é?"12 3456'
"""A secret that looks different in each encoding."""
LEASE: Final = "s" + "a" * 32


def in_json(text: str, *, ascii: bool = True) -> str:
    return json.dumps(text, ensure_ascii=ascii)[1:-1]


def lower_digits(text: str) -> str:
    return re.sub("%..", lambda found: found[0].lower(), text)


def in_base64(text: str, before: int) -> str:
    return base64.b64encode(b"\xfb" * before + text.encode() + b"\xfb" * (before % 2)).decode()


FORMS: Final[dict[str, Callable[[str], str]]] = {
    "text": str,
    "JSON in ASCII": in_json,
    "JSON": lambda text: in_json(text, ascii=False),
    "JSON in JSON": lambda text: in_json(in_json(text)),
    "JSON in ASCII in JSON": lambda text: in_json(in_json(text), ascii=False),
    "percent": quote,
    "percent of all": lambda text: quote(text, safe=""),
    "percent with plus": quote_plus,
    "percent in lower case": lambda text: lower_digits(quote(text, safe="")),
    "base64": lambda text: in_base64(text, 0),
    "base64, one byte before": lambda text: in_base64(text, 1),
    "base64, two bytes before": lambda text: in_base64(text, 2),
    "base64 without padding": lambda text: in_base64(text, 0).rstrip("="),
    "base64 for URLs": lambda text: in_base64(text, 1).replace("+", "-").replace("/", "_"),
    "base64 of JSON": lambda text: in_base64(f'{{"token":"{in_json(text)}"}}', 0),
}


def found_in(content: bytes, secret: str) -> Iterator[str]:
    """Yield the names of encodings in which *content* has the secret, without the code that is tested."""
    plain = secret.encode()
    for form in (secret, in_json(secret), in_json(in_json(secret)), in_json(in_json(secret, ascii=False))):
        if form.encode() in content:
            yield f"as {form}"
    unquoted = unquote_to_bytes(content)
    if plain in unquoted or plain in unquoted.replace(b"+", b" "):
        yield "percent"
    for run in set(re.findall(rb"[A-Za-z0-9+/_-]{12,}", content)):
        for start in range(4):
            text = run[start:].replace(b"-", b"+").replace(b"_", b"/")
            data = base64.b64decode(text[: len(text) // 4 * 4])
            if plain in data or in_json(secret).encode() in data:
                yield f"base64 {run.decode()}"


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


def ors_stream(text: str) -> Content:
    body = sse.result(json.dumps({"ok": True, "output": {"blocks": [{"text": text}]}}).encode())
    return [body[:5000], body[5000:]]


def ors_json(text: str) -> Content:
    return json.dumps({"ok": True, "output": {"blocks": [{"text": text}]}}, ensure_ascii=False).encode()


def openenv(text: str) -> Content:
    return json.dumps({"type": "observation", "data": {"observation": {"text": text}, "done": False}}).encode()


def areal(text: str) -> Content:
    return StepResult(blocks=(TextBlock(text, {"said": [text]}),))


@pytest.mark.parametrize("carried", [ors_stream, ors_json, openenv, areal], ids=lambda each: each.__name__)
async def test_no_form_of_a_secret_is_stored_wherever_it_stands(
    tmp_path: Path, carried: Callable[[str], Content]
) -> None:
    log, reader = StepLogWriter(tmp_path, "r1", max_bytes=2**30, max_days=14), StepLogReader(tmp_path)
    log.opened(session(LEASE), MATH, request(secrets={"TOKEN": SECRET}, spec={"said": SECRET}), open_s=0.0)
    assert log.keeps(LEASE, MATH)
    count = 0
    for form in (write(SECRET) for write in FORMS.values()):
        longest = 2 * len(in_json(form)) + 60  # its begin moves over the end of the first chunk, and past it
        for offset in (0, *range(sse.SLICE_CHARS - longest, sse.SLICE_CHARS + 3)):
            log.called(a_call(b"{}", carried(f"{'x' * offset} {form} y"), lease=LEASE))
            count += 1
    await log.flush()
    files = contents(tmp_path)
    row = await reader.episode(LEASE)
    assert row is not None
    calls, damaged = await reader.calls(row)
    await log.aclose()

    files += contents(tmp_path)
    assert {form for content in files for form in found_in(content, SECRET)} == set()
    assert (len(calls), damaged) == (count, [])
    assert all("*" * 16 in json.dumps(result_of(call[5])) for call in calls)
    assert row["begin"]["spec"]["said"].strip("*") == ""


async def test_an_operators_secret_is_masked_by_a_replica_that_opened_no_session(tmp_path: Path) -> None:
    lease, with_secret = LEASE[1:], replace(MATH, secrets={"TOKEN": "env:TOKEN"})
    log = StepLogWriter(tmp_path, "r1", max_bytes=2**30, max_days=14, of_sessions=lambda _: {"TOKEN": SECRET})
    assert log.keeps(lease, with_secret)
    for write in FORMS.values():
        log.called(a_call(b"{}", ors_json(write(SECRET)), lease=lease))
        log.called(a_call(b"{}", ors_stream(f"{write(SECRET)} {'x' * 9000}"), lease=lease))
    await log.flush()
    await log.aclose()

    assert {form for content in contents(tmp_path) for form in found_in(content, SECRET)} == set()


def test_no_call_is_recorded_while_the_operators_secret_cannot_be_read(tmp_path: Path) -> None:
    def unreadable(environment: Environment) -> Mapping[str, str]:
        raise EnvironmentUnavailable("no such file")

    log = StepLogWriter(tmp_path, "r1", max_bytes=2**30, max_days=14, of_sessions=unreadable)

    assert log.keeps(LEASE[1:], MATH)
    assert not log.keeps(LEASE[1:], replace(MATH, secrets={"TOKEN": "env:TOKEN"}))


async def test_short_chunks_and_images_and_rollouts_hide_no_secret(tmp_path: Path) -> None:
    log, reader = StepLogWriter(tmp_path, "r1", max_bytes=2**30, max_days=14), StepLogReader(tmp_path)
    log.opened(session(LEASE), MATH, request(secrets={"TOKEN": SECRET}), open_s=0.0)
    halves = SECRET[:8], SECRET[8:]
    body = b"".join(
        sse.event(name, json.dumps(part)[1:-1]) for name, part in zip(("chunk", "end"), halves, strict=True)
    )
    image = b"\x89PNG" + bytes(range(256)) * 20 + in_json(in_json(SECRET)).encode() + bytes(300)
    shown = base64.b64encode(image).decode()
    log.called(a_call(b"{}", body, lease=LEASE))
    log.called(a_call(b"{}", StepResult(blocks=(ImageBlock(shown, "image/png"),)), lease=LEASE))
    log.rollout(
        Rollout(
            key="k",
            id="r",
            owner=session().owner,
            run=SECRET,
            name="n",
            environment="math",
            split="",
            started_at=0,
            info={},
        )
    )
    log.called(("k", MESSAGE, 0.0, 0.0, "ok", {"id": "m", "content": SECRET}, None, None, (), 0))
    await log.flush()
    assert {form for content in contents(tmp_path) for form in found_in(content, SECRET)} == set()
    assert len(await reader.episodes(EpisodeFilter(), limit=9)) == 1
    await log.aclose()


async def test_a_call_that_ends_after_its_session_is_lost_because_its_secrets_are_forgotten(tmp_path: Path) -> None:
    log = StepLogWriter(tmp_path, "r1", max_bytes=2**30, max_days=14)
    log.opened(session(LEASE), MATH, request(secrets={"TOKEN": SECRET}), open_s=0.0)
    log.closed(session(LEASE), MATH, EpisodeEnd(reason=CloseReason.DELETED, outcome=EpisodeOutcome.STOPPED))
    await log.flush()
    log.called(a_call(b"{}", SECRET.encode(), lease=LEASE))
    await log.aclose()

    assert log.lost == 1
    assert b"tok/en" not in b"".join(contents(tmp_path))


def test_calls_of_sessions_with_secrets_are_left_to_the_thread() -> None:
    buffer = CallBuffer()
    for lease in ("a" * 32, LEASE):
        buffer.add(a_call(b"{}", b"{}", lease=lease))

    taken = buffer.take()
    assert (taken.leases, [call[0] for call in taken.others]) == (["a" * 32], [LEASE])


@given(st.text(min_size=8, max_size=40), st.binary(max_size=5), st.binary(max_size=5))
def test_a_secret_of_any_text_is_found(secret: str, before: bytes, after: bytes) -> None:
    forms = forms_of([secret])
    plain = secret.encode(errors="surrogatepass")
    for written in (
        plain,
        json.dumps(secret).encode(),
        json.dumps(json.dumps(secret)).encode(),
        quote(plain, safe="").encode(),
    ):
        shown = masked(b"<" + written + b">", forms)
        assert len(shown) == len(written) + 2
        assert plain == b"*" * len(plain) or plain not in shown
    core = masked(base64.b64encode(before + plain + after), forms)
    assert core.count(b"*") >= len(plain)


names = st.sampled_from(["chunk", "chunk", "end", "task_id", "error", "other", ""])
lines = st.one_of(
    st.builds(lambda name: f"event: {name}".encode(), names),
    st.builds(
        lambda text, space: f"data:{space}{text}".encode(), st.text(max_size=6), st.sampled_from(["", " ", "  "])
    ),
    st.sampled_from([b"", b"", b"", b": ping", b'data: {"ok":true}', b"data: \xff", b"event: \xff", b"id: 1", b"data"]),
)


@given(st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r\n"])), max_size=14), st.booleans())
def test_a_joined_stream_reads_the_same(parts: list[tuple[bytes, bytes]], is_whole: bool) -> None:
    stream = b"event: task_id\r\ndata: 7\r\n\r\n" + b"".join(line + end for line, end in parts)
    stream = stream if is_whole else stream[:-1]

    assert result_of(joined(stream)) == result_of(stream)
    assert joined(joined(stream)) == joined(stream)


@pytest.mark.parametrize("text", ["x" * 9000, "\n" * 9000, "é\u2028 \x85" * 3000, " " * 40_000])
@pytest.mark.parametrize("end", [None, -1, -3, -2000])
def test_a_long_stream_reads_the_same_when_it_is_joined(text: str, end: int | None) -> None:
    result: dict[str, Any] = {"ok": True, "output": {"blocks": [{"text": text}], "reward": 1.0, "finished": True}}
    stream = sse.event("task_id", "t-1") + sse.PING + sse.result(json.dumps(result, ensure_ascii=False).encode())
    stream = stream[:end]

    assert result_of(joined(stream)) == result_of(stream)
    assert joined(stream).count(b"event: ") == 2


async def test_one_picture_over_every_protocol_is_stored_once(tmp_path: Path) -> None:
    picture = b"\x89PNG" + bytes(range(256)) * 200
    said = base64.b64encode(picture).decode()
    ors = json.dumps({"ok": True, "output": {"blocks": [{"type": "image", "data": said, "mimeType": "image/png"}]}})
    frame = json.dumps({"type": "observation", "data": {"observation": {"screen": f"data:image/png;base64,{said}"}}})
    log, reader = StepLogWriter(tmp_path, "r1", max_bytes=2**30, max_days=14), StepLogReader(tmp_path)
    log.opened(session(), MATH, request(), open_s=0.0)
    for _ in range(14):
        for reply in (
            [sse.event("task_id", "t"), sse.result(ors.encode())],
            ors.encode(),
            frame.encode(),
            StepResult(blocks=(ImageBlock(said, "image/png"),)),
        ):
            log.called(a_call(b"{}", reply))
    await log.aclose()
    row = await reader.episode("a" * 32)
    assert row is not None
    shown = [result_of(call[5]) for call in (await reader.calls(row)).calls]

    digests = re.findall(r"blob:sha256:([0-9a-f]{64})", json.dumps(shown))
    assert len(digests) == 4 * 14
    assert await reader.blob(digests[0]) == picture
    assert len(set(digests)) == 1
    assert sum(map(len, contents(tmp_path))) < 6 * len(picture)


BASE64: Final = re.compile(rb'(?<=[",])(?:[A-Za-z0-9+/]{4}){1024,}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?(?=\\*")')
"""What is long base64, as a search of every character."""
PIECES: Final = st.one_of(
    st.sampled_from([b'"', b",", b'\\"', b" ", b"=", b'{"a":"', b"data:image/png;base64,"]),
    st.builds(lambda count: b"aB9+" * count, st.sampled_from([1, 3, 1000, 1023, 1024, 3000])),
    st.builds(lambda size: base64.b64encode(bytes(size)), st.sampled_from([3070, 3071, 3072, 3073, 4000, 9001])),
)


@given(pieces=st.lists(PIECES, max_size=9))
def test_long_base64_is_found_wherever_it_stands(pieces: list[bytes]) -> None:
    content = b"".join(pieces)

    assert list(base64_in(content)) == [found.span() for found in BASE64.finditer(content)]
