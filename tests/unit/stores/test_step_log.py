"""The files of the step log: what is written is read again, whatever it contains and whatever happened to the disk."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import Environment, StepLogging, StepLogPolicy
from gateway.core.episode import Action, ImageBlock, StepResult, Summary, TextBlock
from gateway.core.errors import StoreUnavailable, UpstreamGone
from gateway.core.faults import Fault, FaultKind
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.ports.step_log import Content, EpisodeEnd, EpisodeFilter, LoggedCall
from gateway.core.session import CloseReason, EpisodeRequest, Group, Session, SessionSetup, SessionState
from gateway.stores.step_log import reader as reading
from gateway.stores.step_log import retention
from gateway.stores.step_log import writer as writing
from gateway.stores.step_log.database import INDEX
from gateway.stores.step_log.encoding import ENCODED_CALLS
from gateway.stores.step_log.reader import StepLogReader
from gateway.stores.step_log.writer import StepLogWriter
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually

END = EpisodeEnd(reason=CloseReason.DELETED, outcome=EpisodeOutcome.STOPPED)
MATH = Environment(name=EnvironmentName("math"), image="one", directory=Path("/"), command=())


def session(lease: str = "a" * 32, name: str = "one") -> Session:
    return Session(
        id=SessionId("1"),
        name=name,
        owner=Owner("alice"),
        environment=MATH.name,
        lease=lease,
        fingerprint="",
        idle_s=300.0,
        worker=WorkerId("w"),
        address="",
        state=SessionState.OPEN,
        task="train/0",
        policy="p1",
    )


def request(*, episode: str = "", **setup: Any) -> EpisodeRequest:
    return EpisodeRequest(
        owner=Owner("alice"),
        name="one",
        episode=episode,
        environment=MATH,
        setup=SessionSetup(**{"spec": {"question": "1+1"}, **setup}),
        fingerprint="",
        protocol="ors",
    )


def a_call(asked: Content, reply: Content, *, lease: str = "a" * 32, error: BaseException | None = None) -> LoggedCall:
    now = time.monotonic()
    return (lease, "call", now - 1.0, now, "ok", asked, reply, error, (), 0)


@pytest.fixture
def log(tmp_path: Path) -> StepLogWriter:
    return StepLogWriter(tmp_path, "r1", max_bytes=2**30, max_days=14)


@pytest.fixture
def reader(tmp_path: Path) -> StepLogReader:
    return StepLogReader(tmp_path)


async def calls_of(reader: StepLogReader, lease: str = "a" * 32) -> list[Any]:
    episode = await reader.episode(lease)
    assert episode is not None
    calls, damaged = await reader.calls(episode)
    assert damaged == []
    return [list(call) for call in calls]


async def whole(reader: StepLogReader, line: dict[str, Any]) -> dict[str, Any]:
    """Return the episode of a line of a list, with its begin and end."""
    episode = await reader.episode(line["lease"])
    assert episode is not None
    assert line.items() <= episode.items()
    return episode


@pytest.mark.parametrize("count", [1, ENCODED_CALLS - 1, ENCODED_CALLS, ENCODED_CALLS + 1, 3 * ENCODED_CALLS])
async def test_calls_are_stored_whatever_their_number(log: StepLogWriter, reader: StepLogReader, count: int) -> None:
    log.opened(session(), MATH, request(), open_s=0.25)
    for number in range(count):
        log.called(a_call(b"%d" % number, None if number % 5 == 3 else b"reply"))
    await log.aclose()

    assert sorted(int(call[4]) for call in await calls_of(reader)) == list(range(count))
    assert log.lost == 0


async def test_an_episode_s_begin_calls_and_end_are_read_again(log: StepLogWriter, reader: StepLogReader) -> None:
    fault = Fault(FaultKind.AUTHOR, "tool:x", "KeyError", "Traceback")
    began = time.time()
    log.opened(session(), MATH, request(seed=7, of_split="train", group=Group("g", 4)), open_s=0.25)
    log.called(a_call(b'{"name":"x"}', b"event: end"))
    log.called(
        (
            "a" * 32,
            "call",
            time.monotonic(),
            time.monotonic(),
            "worker_lost",
            b"{}",
            None,
            UpstreamGone("gone", sent=True),
            (fault,),
            5,
        )
    )
    summary = Summary(reward=float("nan"), finished=True, steps=2, seconds=1.5, faults=(fault,))
    log.closed(
        session(),
        MATH,
        EpisodeEnd(reason=CloseReason.DELETED, outcome=EpisodeOutcome.FINISHED, reward=1.0, summary=summary),
    )
    await log.aclose()

    (line,) = await reader.episodes(EpisodeFilter(owner="alice", group="g", reward_min=0.5), limit=9)
    row = await whole(reader, line)
    first, second = await calls_of(reader)
    assert (row["lease"], row["policy"], row["seed"], row["split"], row["protocol"]) == (
        "a" * 32,
        "p1",
        7,
        "train",
        "ors",
    )
    assert (row["reason"], row["outcome"], row["reward"], row["steps"]) == ("deleted", "finished", 1.0, 2)
    assert began <= row["opened_at"] <= row["closed_at"]
    assert row["begin"]["spec"] == {"question": "1+1"}
    assert row["begin"]["group_size"] == 4
    assert row["end"]["reward"] is None, "NaN is no JSON"
    assert row["end"]["faults"][0]["traceback"] == "Traceback"
    assert first[1] == pytest.approx(1.0)
    assert abs(first[0] + 1.0 - began) < 60
    assert first[2:] == ["call", "ok", b'{"name":"x"}', b"event: end", None, [], 0]
    assert second[3:] == [
        "worker_lost",
        b"{}",
        None,
        "upstream_gone: gone",
        [["author", "tool:x", "KeyError", "Traceback"]],
        5,
    ]
    assert log.lost == 0


@pytest.mark.parametrize(
    ("content", "read"),
    [
        pytest.param([b"chunk ", b"by chunk"], b"chunk by chunk", id="chunks"),
        pytest.param(Action(name="x", arguments={"a": 1}), {"name": "x", "arguments": {"a": 1}}, id="a tool call"),
        pytest.param(
            Action(name="x", arguments={"a": 2**70}), {"name": "x", "arguments": {"a": 2**70}}, id="a big int"
        ),
        pytest.param(Action(text="hi \ud800"), {"text": "hi \ud800"}, id="a text with a lone surrogate"),
        pytest.param(
            StepResult(blocks=(TextBlock("t", {"d": 1}),), reward=0.0, finished=True, turn=3),
            {"blocks": [{"text": "t", "detail": {"d": 1}}], "reward": 0.0, "finished": True, "turn": 3},
            id="a result",
        ),
        pytest.param([ImageBlock("AAAA", "image/png")], [{"image": "AAAA", "mime_type": "image/png"}], id="blocks"),
        pytest.param(b"\xff\x00", b"\xff\x00", id="no text"),
        pytest.param(None, None, id="nothing"),
    ],
)
async def test_contents_of_every_kind_are_read_again(
    log: StepLogWriter, reader: StepLogReader, content: Content, read: Any
) -> None:
    log.opened(session(), MATH, request(), open_s=0.0)
    log.called(a_call(content, content))
    await log.aclose()

    ((*_, asked, reply, _, _, _),) = await calls_of(reader)
    assert asked == reply == read


async def test_a_content_that_cannot_be_written_costs_only_itself(log: StepLogWriter, reader: StepLogReader) -> None:
    log.opened(session(), MATH, request(), open_s=0.0)
    depths = (10, 1000, *range(1010, 1030), 2000)
    for depth in depths:
        deep: Any = []
        for _ in range(depth):
            deep = [deep]
        log.called(a_call(Action(name="x", arguments={"deep": deep}), b"one"))
    log.called(a_call(b"two", b"three"))
    await log.aclose()

    first, *others, last = await calls_of(reader)
    assert first[4]["name"] == "x"
    assert others[-1][4:6] == [None, None]
    assert others[-1][6].startswith("not logged")
    assert last[4:6] == [b"two", b"three"]
    assert len(others) == len(depths) - 1
    assert log.lost == 0


IMAGE = os.urandom(6000)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param('{{"data": "{0}"}}', id="a string"),
        pytest.param('{{"url": "data:image/png;base64,{0}"}}', id="a data URL"),
        pytest.param('{{"json": "{{\\"data\\": \\"{0}\\"}}"}}', id="JSON in a string"),
    ],
)
async def test_an_image_is_stored_once_by_its_digest(log: StepLogWriter, reader: StepLogReader, form: str) -> None:
    log.opened(session(), MATH, request(), open_s=0.0)
    encoded = base64.b64encode(IMAGE).decode()
    body = form.format(encoded).encode()
    log.called(a_call(body, ()))
    log.called(a_call(b"{}", StepResult(blocks=(ImageBlock(encoded, "image/png"),))))
    await log.aclose()

    first, second = await calls_of(reader)
    reference = second[5]["blocks"][0]["image"]
    assert first[4] == form.format(reference).encode()
    assert await reader.blob(reference.removeprefix("blob:sha256:")) == IMAGE


@pytest.mark.parametrize(
    ("secret", "is_recorded"),
    [
        ('with "quotes" and \u00e9', True),
        (base64.b64encode(IMAGE).decode(), True),
        ("lone \ud800 surrogate", True),
        ("short", False),
    ],
    ids=["escaped in JSON", "long base64", "no UTF-8", "too short to mask"],
)
async def test_a_secret_of_any_form_is_not_stored(
    log: StepLogWriter, reader: StepLogReader, tmp_path: Path, secret: str, is_recorded: bool
) -> None:
    one = session("s" + "a" * 32)
    log.opened(one, MATH, request(secrets={"TOKEN": secret}), open_s=0.0)
    shown = json.dumps({"said": secret}).encode()
    if log.keeps(one.lease, MATH):
        log.called(a_call(shown, [shown], lease=one.lease))
        log.called(a_call(Action(text=secret), StepResult(blocks=(TextBlock(secret),)), lease=one.lease))
    await log.aclose()

    stored = b"".join(path.read_bytes() for path in _files(tmp_path))
    assert len(await calls_of(reader, one.lease)) == (2 if is_recorded else 0)
    for form in (secret.encode(errors="surrogatepass"), json.dumps(secret)[1:-1].encode(), IMAGE):
        assert form not in stored


async def test_an_episode_in_a_variant_is_listed_by_its_environment(log: StepLogWriter, reader: StepLogReader) -> None:
    log.opened(session(), replace(MATH, name=EnvironmentName("math.hard"), base=MATH.name), request(), open_s=0.0)
    await log.aclose()

    (line,) = await reader.episodes(EpisodeFilter(environment="math"), limit=9)
    row = await whole(reader, line)
    assert row["begin"]["variant"] == "math.hard"


async def test_a_long_task_is_stored_once(log: StepLogWriter, reader: StepLogReader, tmp_path: Path) -> None:
    for number in range(20):
        lease = f"{number:032x}"
        log.opened(session(lease), MATH, request(spec={"text": "x" * 50_000}), open_s=0.0)
    await log.aclose()

    rows = [await whole(reader, line) for line in await reader.episodes(EpisodeFilter(), limit=99)]
    assert len(rows) == 20
    assert len({row["begin"]["spec"] for row in rows}) == len({row["task_digest"] for row in rows}) == 1
    assert sum(map(os.path.getsize, _files(tmp_path))) < 5 * 50_000


async def test_an_episode_is_found_by_every_name_and_listed_by_task_place_and_gateway(
    tmp_path: Path, reader: StepLogReader
) -> None:
    for number, gateway in enumerate(("g1", "g2", "")):
        log = StepLogWriter(tmp_path, f"r{number}", max_bytes=2**30, max_days=14)
        log.gateway = gateway
        one = replace(session(f"{number:032x}", f"s{number}"), task=f"t{number}")
        log.opened(one, MATH, request(episode="mine", place=f"train/{number % 2}", spec={}), open_s=0.0)
        log.closed(one, MATH, END)
        await log.aclose()

    async def leases(**wanted: Any) -> list[int]:
        return [int(row["lease"], 16) for row in await reader.episodes(EpisodeFilter(**wanted), limit=9)]

    assert await leases() == [2, 1, 0]
    assert await leases(task="t1") == [1]
    assert await leases(task="train/0") == [2, 0]
    assert await leases(gateway="g2") == [2, 1], "an episode of an older version is of no known gateway"
    assert await leases(gateway="g3") == [2]
    found = [await reader.episode(id) for id in ("0" * 32, "s1", "mine")]
    assert [int(row["lease"], 16) for row in found if row is not None] == [0, 1, 2]
    row = found[2]
    assert row is not None
    assert (row["replica"], row["gateway"], row["place"], row["episode"]) == ("r2", None, "train/0", "mine")
    assert await reader.episode("") is None


async def test_episodes_without_an_end_are_found_in_pages(
    log: StepLogWriter, reader: StepLogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PAGE", 3)
    for number in range(8):
        one = session(f"{number:032x}")
        log.opened(one, MATH, request(), open_s=0.0)
        if number == 4:
            log.closed(one, MATH, END)
    await log.aclose()

    found = [each async for each in reader.without_end(time.time() + 1)]
    assert [int(each.lease, 16) for each in found] == [0, 1, 2, 3, 5, 6, 7]
    assert {each.gateway for each in found} == {None}
    assert [each async for each in reader.without_end(found[2].at)] == found[:2]


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def segments(folder: Path) -> list[Path]:
    """Return the segments in *folder*, oldest first."""
    return sorted(folder.glob("*.calls"))


async def test_a_batch_that_a_crash_cut_off_is_ignored(
    log: StepLogWriter, reader: StepLogReader, tmp_path: Path
) -> None:
    log.opened(session(), MATH, request(), open_s=0.0)
    log.called(a_call(b"one", b"two"))
    await log.flush()
    log.called(a_call(b"three", b"four"))
    await log.aclose()
    (segment,) = segments(tmp_path)
    os.truncate(segment, segment.stat().st_size - 3)

    assert [call[4] for call in await calls_of(reader)] == [b"one"]


async def test_a_disk_that_does_not_answer_costs_records_and_no_memory(
    log: StepLogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "QUEUED_MAX", 100)
    monkeypatch.setattr(writing, "PAUSE_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(log, "_write", _waiting(answers, log._write))
    running = asyncio.ensure_future(log.run())
    try:
        log.called(a_call(b"one", b"two"))
        deadline = time.monotonic() + HANG_S
        while log.lost == 0 and time.monotonic() < deadline:
            log.called(a_call(b"x", b"y"))
            await asyncio.sleep(0)
        assert log.lost > 0
        assert len(log._calls) < 100_000
        answers.set()
        await log.flush()
        lost = log.lost
        log.called(a_call(b"three", b"four"))
        await log.flush()
        assert log.lost == lost
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await log.aclose()


async def test_an_episode_says_how_many_of_its_records_are_lost(
    log: StepLogWriter, reader: StepLogReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.opened(session(), MATH, request(), open_s=0.0)
    log.called(a_call(b"one", b"two"))
    await log.flush()
    log._drop(a_call(b"dropped", b""))
    with monkeypatch.context() as broken:
        broken.setattr(log._segments, "append", _failing)
        for _ in range(3):
            log.called(a_call(b"not written", b""))
        await log.flush()
    log.closed(session(), MATH, END)
    monkeypatch.setattr(writing, "EPISODES_MAX", 1)
    log.opened(session("b" * 32), MATH, request(), open_s=0.0)
    monkeypatch.undo()
    log.closed(session("b" * 32), MATH, END)
    log.opened(session("c" * 32), MATH, request(), open_s=0.0)
    await log.aclose()

    lost = {row["lease"][0]: row["lost"] for row in await reader.episodes(EpisodeFilter(), limit=9)}
    assert lost == {"a": 4, "b": 1, "c": None}
    assert log.lost == 5
    assert [call[4] for call in await calls_of(reader)] == [b"one"]


def _failing(*_: object, **__: object) -> None:
    raise OSError("the disk is full")


@pytest.mark.parametrize("what", ["begin", "call", "end"])
async def test_what_comes_after_a_pause_is_written_at_once(
    log: StepLogWriter, reader: StepLogReader, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(writing, "PAUSE_S", HANG_S)
    monkeypatch.setattr(writing, "CLEANED_S", HANG_S)
    if what != "begin":
        log.opened(session(), MATH, request(), open_s=0.0)
        await log.flush()
    running = asyncio.ensure_future(log.run())
    await asyncio.sleep(0)

    async def is_written() -> None:
        assert not log._calls
        assert not log._episodes
        assert not log._is_writing
        row = await reader.episode("a" * 32)
        assert row is not None
        assert what != "end" or row["closed_at"]
        assert what != "call" or len((await reader.calls(row)).calls) == 1

    try:
        match what:
            case "begin":
                log.opened(session(), MATH, request(), open_s=0.0)
            case "call":
                log.called(a_call(b"one", b"two"))
            case _:
                log.closed(session(), MATH, END)
        await eventually(is_written)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await log.aclose()


@pytest.mark.parametrize("damage", ["at once", "while it is open"])
async def test_an_index_that_is_damaged_is_moved_aside_and_the_log_goes_on(
    log: StepLogWriter,
    reader: StepLogReader,
    tmp_path: Path,
    damage: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(retention, "CLEANED_S", 0.0)
    if damage == "while it is open":
        log.opened(session(), MATH, request(), open_s=0.0)
        await log.flush()
    for suffix in ("", "-wal"):
        (tmp_path / f"{INDEX}{suffix}").write_bytes(b"no database" * 1000)
    with pytest.raises(StoreUnavailable, match=f"{INDEX}, cannot be read"):
        await reader.episodes(EpisodeFilter(), limit=9)
    for lease in ("b" * 32, "c" * 32):
        log.opened(session(lease), MATH, request(), open_s=0.0)
        await log.flush()
    found = [row["lease"][0] for row in await reader.episodes(EpisodeFilter(), limit=9)]
    await log.aclose()

    assert "c" in found
    assert len(found) + log.lost <= 2
    assert (tmp_path / f"{INDEX}.damaged").exists()
    assert "step_log_index_damaged" in caplog.text


async def test_an_index_that_an_operator_removed_is_created_again(
    log: StepLogWriter, reader: StepLogReader, tmp_path: Path
) -> None:
    for lease in ("a" * 32, "b" * 32):
        log.opened(session(lease), MATH, request(), open_s=0.0)
        await log.flush()
        assert len(await reader.episodes(EpisodeFilter(), limit=9)) == 1
        for suffix in ("", "-wal", "-shm"):
            (tmp_path / f"{INDEX}{suffix}").unlink()
    await log.aclose()

    assert log.lost == 0


def _waiting(answers: threading.Event, store: Callable[..., None]) -> Callable[..., None]:
    def stored(*arguments: Any) -> None:
        answers.wait(HANG_S)
        store(*arguments)

    return stored


def test_all_replicas_choose_the_same_sample(tmp_path: Path) -> None:
    sampled = replace(MATH, step_log=StepLogPolicy(mode=StepLogging.SAMPLED, share=0.25))
    leases = [os.urandom(16).hex() for _ in range(2000)]
    first, second = (StepLogWriter(tmp_path, name, max_bytes=1, max_days=1) for name in ("r1", "r2"))

    kept = [lease for lease in leases if first.keeps(lease, sampled)]

    assert 350 < len(kept) < 650
    assert kept == [lease for lease in leases if second.keeps(lease, sampled)]
    assert not StepLogWriter(tmp_path, "r3", max_bytes=0, max_days=1).keeps(leases[0], MATH)
