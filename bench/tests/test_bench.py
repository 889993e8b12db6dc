"""Arithmetic, readers and the load generator; and short runs of the measurements with single servers.

Each server starts once for all tests of the benchmarks. `SharedServers` passes it from one measurement to the next.
"""

import asyncio
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.load.closed_loop import ERRORS_MAX, Round, at_once, connections, load
from bench.load.episodes import TOKEN_LENGTH, Episode, WrongAnswer, check_result
from bench.load.http1 import (
    Address,
    Event,
    ProtocolError,
    Response,
    ResponseReader,
    StreamError,
    connect,
    events,
    request_bytes,
    result_of,
)
from bench.measures import calls, cold, footprint, openenv_tasks, opens, tenants
from bench.reporting import results
from bench.reporting.grid import Cell
from bench.reporting.report import Goal, Report, Table, number
from bench.reporting.stats import Latencies, latencies, median_latencies, percentile
from bench.subjects.processes import ServerProcess, Usage, children, usage
from bench.subjects.targets import Servers, servers
from tests.deadlines import HANG_S

TOKEN = "0" * TOKEN_LENGTH


# -- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "share", "expected"),
    [
        pytest.param([7], 0.99, 7, id="a single sample is every percentile"),
        pytest.param([4, 1, 3, 2], 0.5, 2, id="the median of an even number is the lower one, not a mean"),
        pytest.param([5, 1, 3, 2, 4], 0.5, 3, id="the median of an odd number is the middle one"),
        pytest.param(list(range(1, 101)), 0.99, 99, id="the p99 of a hundred samples is the last but one"),
        pytest.param(list(range(1, 1001)), 0.99, 990, id="the p99 of a thousand samples has ten above it"),
        pytest.param([1, 2, 3], 0.0, 1, id="the share 0 is the least sample"),
        pytest.param([1, 2, 3], 1.0, 3, id="the share 1 is the greatest sample"),
    ],
)
def test_a_percentile_is_the_nearest_rank(samples: list[float], share: float, expected: float) -> None:
    assert percentile(samples, share) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_the_least_sample_that_covers_its_share(samples: list[float], share: float) -> None:
    found = percentile(samples, share)

    covered = sum(sample <= found for sample in samples)
    below = sum(sample < found for sample in samples)
    assert found in samples
    assert covered >= share * len(samples)
    assert below < share * len(samples) or found == min(samples)


@pytest.mark.parametrize(("samples", "share"), [([], 0.5), ([1.0], 1.1), ([1.0], -0.1), ([1.0], math.nan)])
def test_empty_samples_and_invalid_shares_are_refused(samples: list[float], share: float) -> None:
    with pytest.raises(ValueError, match=r"no samples|not from 0 to 1"):
        percentile(samples, share)


def test_rounds_are_summarized_by_their_medians_and_the_worst_maximum() -> None:
    rounds = [Latencies(10, 1.0, 5.0, 6.0), Latencies(20, 2.0, 9.0, 90.0), Latencies(30, 9.0, 7.0, 8.0)]

    assert median_latencies(rounds) == Latencies(60, 2.0, 7.0, 90.0)


def test_latencies_are_reported_in_milliseconds() -> None:
    assert latencies([0.001, 0.002, 0.003]) == Latencies(3, 2.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (12345, "12,345"),
        (0.0, "0.000"),
        (0.0471, "0.047"),
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (123.45, "123"),
        (1234.5, "1,230"),
        (12345.0, "12,300"),
        (-1.5, "-1.50"),
        (math.inf, "-"),
        (math.nan, "-"),
    ],
)
def test_a_figure_has_three_significant_digits_and_a_count_has_all_digits(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "at_least", "expected"),
    [
        pytest.param(2.9, True, False, id="below a lower bound"),
        pytest.param(3.0, True, True, id="on a lower bound"),
        pytest.param(3.0, False, True, id="on an upper bound"),
        pytest.param(3.1, False, False, id="above an upper bound"),
        pytest.param(math.nan, False, False, id="NaN meets no bound"),
    ],
)
def test_a_goal_is_met_on_the_right_side_of_its_bound(value: float, at_least: bool, expected: bool) -> None:
    assert Goal(id="S4", what="x", value=value, bound=3.0, at_least=at_least).is_met is expected


# -- responses ----------------------------------------------------------------------------------------------------

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n0\r\n\r\n\r\n6;x=1\r\nworlds\r\n0\r\n\r\n"
SIZED = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\ncontent-type: text/plain\r\n\r\nhello"
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("wire", "expected"),
    [
        pytest.param(CHUNKED, Response(200, b"0\r\n\r\nworlds"), id="a chunk that looks like the last chunk"),
        pytest.param(SIZED, Response(404, b"hello"), id="a body with a content length"),
        pytest.param(EMPTY, Response(200, b""), id="no body"),
    ],
)
def test_a_response_is_complete_only_with_its_last_byte(wire: bytes, expected: Response) -> None:
    for cut in range(len(wire)):
        reader = ResponseReader()

        assert reader.feed(wire[:cut]) is None
        assert reader.feed(wire[cut:]) == expected


def test_a_reader_reads_consecutive_responses_byte_by_byte() -> None:
    reader = ResponseReader()

    found = [reader.feed(bytes([byte])) for byte in CHUNKED + SIZED + CHUNKED]

    chunked, sized = Response(200, b"0\r\n\r\nworlds"), Response(404, b"hello")
    assert [each for each in found if each] == [chunked, sized, chunked]


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.data())
def test_chunks_are_joined_however_they_arrive(chunks: list[bytes], data: st.DataObject) -> None:
    frames = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    wire = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + frames + b"0\r\n\r\n"
    cuts = sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=6)))
    reader = ResponseReader()

    found = [reader.feed(wire[start:end]) for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]

    assert found[:-1] == [None] * len(cuts)
    assert found[-1] == Response(200, b"".join(chunks))


@pytest.mark.parametrize(
    "wire",
    [
        pytest.param(b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", id="another HTTP version"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", id="neither length nor chunks"),
        pytest.param(SIZED + b"x", id="more than one response"),
        pytest.param(CHUNKED + b"x", id="more than the last chunk"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", id="an invalid chunk size"),
        pytest.param(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", id="a chunk too long"),
    ],
)
def test_an_invalid_response_is_refused(wire: bytes) -> None:
    with pytest.raises(ProtocolError):
        ResponseReader().feed(wire)


def test_a_post_without_a_body_has_a_content_length() -> None:
    assert request_bytes("POST", "/delete", {"X-Session-ID": "s"}) == (
        b"POST /delete HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Session-ID: s\r\nContent-Length: 0\r\n\r\n"
    )


# -- streams ------------------------------------------------------------------------------------------------------


def result_json(text: str = TOKEN, **more: object) -> str:
    output = {"blocks": [{"text": text, "detail": None, "type": "text"}], "metadata": None} | {
        "reward": 0.0,
        "finished": False,
    }
    return json.dumps({"ok": True, "output": output | more})


def stream(*pairs: tuple[str, str]) -> bytes:
    return b"".join(f"event: {name}\r\ndata: {data}\r\n\r\n".encode() for name, data in pairs)


def test_a_result_is_joined_from_its_chunks_and_its_end_event() -> None:
    body = b": ping\r\n\r\n" + stream(("task_id", "t"), ("chunk", '{"a": "x'), ("chunk", "  y"), ("end", '  "}'))

    assert result_of(body) == {"a": "x  y  "}


def test_only_the_one_space_that_the_format_allows_is_removed() -> None:
    assert list(events(b"event:end\ndata:   x \n\n")) == [Event("end", "  x ")]


def test_the_lines_of_an_error_are_kept_apart() -> None:
    assert list(events(b"event: error\ndata: one\ndata: two\n\n")) == [Event("error", "one\ntwo")]


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(stream(("task_id", "t")), id="no end"),
        pytest.param(stream(("task_id", "t"), ("chunk", "{}")), id="chunks without an end"),
        pytest.param(stream(("task_id", "t"), ("error", "boom")), id="an error"),
        pytest.param(stream(("end", '{"ok":')), id="an end that completes no JSON"),
        pytest.param(b'event: end\r\ndata: {"ok":true}\r\n', id="cut within the end event"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_a_stream_without_a_result_is_an_error(body: bytes) -> None:
    with pytest.raises(StreamError):
        result_of(body)


def test_the_right_result_passes() -> None:
    check_result(stream(("task_id", "t"), ("end", result_json())), TOKEN)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(stream(("end", result_json("1" * TOKEN_LENGTH))), id="another call's text"),
        pytest.param(stream(("end", result_json(reward=None))), id="no reward"),
        pytest.param(stream(("end", result_json(finished=True))), id="finished"),
        pytest.param(stream(("end", '{"ok": false, "error": "no"}')), id="refused"),
        pytest.param(stream(("error", "boom")), id="failed"),
    ],
)
def test_a_wrong_result_does_not_pass(body: bytes) -> None:
    with pytest.raises(WrongAnswer):
        check_result(body, TOKEN)


# -- load, on a small server --------------------------------------------------------------------------------------

Handler = Callable[[bytes, asyncio.StreamWriter], None]
"""Answers one whole request."""


@asynccontextmanager
async def server(answer: Handler) -> AsyncIterator[Address]:
    """Run an HTTP server with the features that the load generator's requests need."""

    serving: set[asyncio.Task[None] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                answer(head + await reader.readexactly(length), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listener:
        yield Address(port=listener.sockets[0].getsockname()[1])
    if serving:
        await asyncio.wait([task for task in serving if task], timeout=HANG_S)


def respond(writer: asyncio.StreamWriter, body: bytes, status: int = 200) -> None:
    writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body))


def echo(request: bytes, writer: asyncio.StreamWriter) -> None:
    """Return the text of a call, like the noop environment."""
    text = json.loads(request.partition(b"\r\n\r\n")[2])["input"]["text"]
    respond(writer, stream(("task_id", "t"), ("end", result_json(text))))


async def test_each_caller_calls_again_after_an_answer() -> None:
    async with server(echo) as address, connections(address, 3) as opened:
        episodes = [open_episode(connection) for connection in opened]

        became = await load([episode.call for episode in episodes], duration_s=0.2)

    assert not became.errors
    assert became.latencies.count == len(became.samples_s) >= 3
    assert became.rate == len(became.samples_s) / became.duration_s


async def test_each_caller_calls_once_in_a_round_of_zero_seconds() -> None:
    async with server(echo) as address, connections(address, 3) as opened:
        became = await load([open_episode(connection).call for connection in opened], duration_s=0.0)

    assert len(became.samples_s) == 3


async def test_wrong_answers_are_counted_as_errors_and_not_as_calls() -> None:
    async with server(lambda _, writer: respond(writer, b"no", 500)) as address, connections(address, 1) as opened:
        became = await load([open_episode(opened[0]).call], duration_s=60)  # The round ends after too many errors.

    assert became.samples_s == []
    assert list(became.errors) == ["WrongAnswer: status 500: b'no'"]
    with pytest.raises(WrongAnswer, match="status 500"):
        became.raise_errors()


async def test_a_caller_whose_connection_is_lost_ends() -> None:
    async with server(lambda _, writer: writer.close()) as address, connections(address, 1) as opened:
        became = await load([open_episode(opened[0]).call], duration_s=60)

    assert became.samples_s == []
    assert became.errors.total() == ERRORS_MAX


async def test_at_once_runs_each_step_once() -> None:
    ran = []

    async def step(number: int) -> None:
        ran.append(number)
        if number == 1:
            raise WrongAnswer("one")

    became = await at_once([step] * 4, within_s=10)

    assert sorted(ran) == [0, 1, 2, 3]
    assert len(became.samples_s) == 3
    assert became.errors == {"WrongAnswer: one": 1}


async def test_a_request_on_a_lost_connection_fails_at_once() -> None:
    async with server(lambda _, writer: writer.close()) as address:
        connection = await connect(address)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await connection.request(request_bytes("GET", "/health", {}))


def open_episode(connection: object) -> Episode:
    """Return a session that its server does not know."""
    episode = Episode(connection)  # type: ignore[arg-type]  # its type is `object` here
    episode.use("sid")
    return episode


# -- processes ----------------------------------------------------------------------------------------------------


def test_the_usage_of_a_process_is_read_from_proc() -> None:
    before = usage(os.getpid())
    spent = os.times()
    while os.times().user - spent.user < 0.05:  # At least two ticks of the kernel's clock.
        sum(range(10_000))

    after = usage(os.getpid())

    assert after.cpu_s > before.cpu_s
    assert after.rss_bytes > 2**20


async def test_the_children_of_a_process_are_found() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    try:
        assert child.pid in list(children(os.getpid()))
    finally:
        await child.communicate(b"\n")

    assert child.pid not in list(children(os.getpid()))


def test_a_cell_reports_cpu_time_for_each_thousand_correct_calls() -> None:
    cell = Cell()
    for _ in range(2):
        became = Round(1.0, samples_s=[0.1] * 250, generator_cpu_s=0.05)
        cell.add(became, {"server": Usage(1.0, 1)}, {"server": Usage(1.5, 1)})

    assert cell.cpu_s_per_1000("server") == pytest.approx(2.0)
    assert cell.cpu_s_per_1000("generator") == pytest.approx(0.2)
    assert cell.rate == 250


# -- results ------------------------------------------------------------------------------------------------------


def report(name: str = "some") -> Report:
    return Report(
        name=name,
        figures={"rate": 3.0, "times": math.inf},
        goals=[
            Goal(id="S4", what="calls", value=3.5, bound=3.0, at_least=True, unit="x"),
            Goal(id="S6", what="p50", value=4.0, bound=3.0, unit="ms"),
            Goal(id="S4", what="beside", value=1.0, bound=3.0, unit="ms", is_goal=False),
        ],
        tables=[Table("Calls", ["server", "1/s"], [["a", "1"], ["b", "2"]])],
        errors=2,
        not_comparable=["Not this with that."],
    )


def facts() -> dict[str, Any]:
    return {
        "taken_at": "2030-01-31T00:00:00+00:00",
        "size": "quick",
        "seconds": 61.0,
        "machine": {
            "cpus": 2,
            "cpu": "some CPU",
            "memory": "1 kB",
            "kernel": "6.1",
            "python": "3.11",
            "load_average": [0.1, 0.2, 0.3],
        },
        "load_average": [0.1, 0.2, 0.3],
        "load_average_after": [1.1, 0.2, 0.3],
        "versions": {"ors-sdk": "0.1.0", "openreward": "0.1.167", "uvicorn": "0.54.0", "uvloop": "0.23.0"},
        "source": {"commit": "0123456789abcdef", "has_changes": True},
    }


def test_the_results_begin_with_the_goals() -> None:
    found = results.results([report()], facts())

    assert next(iter(found)) == "goals"
    assert [goal["is_met"] for goal in found["goals"]] == [True, False, True]


def test_parts_that_were_not_run_keep_their_results() -> None:
    old = results.results([report("one"), report("two")], facts())
    again = results.results([replace(report("one"), errors=7)], facts() | {"taken_at": "2030-02-01", "size": "full"})

    found = results.merged(old, again, order=("two", "one"))

    assert [goal["part"] for goal in found["goals"]] == ["two"] * 3 + ["one"] * 3
    assert found["errors"] == {"two": 2, "one": 7}
    assert [(run["parts"], run["size"]) for run in found["runs"]] == [(["two"], "quick"), (["one"], "full")]
    assert "`two`: 2030-01-31" in results.markdown(found)
    assert "`one`: 2030-02-01, full run" in results.markdown(found)


def test_results_of_two_machines_are_not_merged() -> None:
    old = results.results([report("one")], facts())
    machine = {**facts()["machine"], "cpus": 64}

    with pytest.raises(ValueError, match="another machine"):
        results.merged(old, results.results([report("two")], facts() | {"machine": machine}), order=("one", "two"))


def test_results_are_the_same_after_a_write_and_a_read(tmp_path: Path) -> None:
    path = tmp_path / "there" / "latest.json"

    results.write(results.results([report()], facts()), path)

    found = results.read(path)
    assert found["figures"]["some"] == {"rate": 3.0, "times": None}
    assert results.markdown(found) == results.markdown(results.results([report()], facts()))


def test_the_markdown_holds_each_table() -> None:
    text = results.markdown(results.results([report()], facts()))

    assert "| S4 | calls | 3.50 x | ≥ 3 x | yes |" in text
    assert "| S6 | p50 | 4.00 ms | ≤ 3 ms | no |" in text
    assert "| S4 | beside | 1.00 ms | - | - |" in text
    assert "**Calls**\n\n| server | 1/s |\n| --- | --: |\n| a | 1 |\n| b | 2 |" in text
    assert "* Failed or wrongly answered requests: {'some': 2}.\n* Not this with that." in text
    assert "0123456789ab, with uncommitted changes" in text


def test_the_results_replace_the_text_between_the_marks() -> None:
    text = f"before\n{results.BEGIN}\nold\n{results.END}\nafter"

    once = results.between_marks(text, "new")

    assert once == f"before\n{results.BEGIN}\n\nnew\n\n{results.END}\nafter"
    assert results.between_marks(once, "new") == once


@pytest.mark.parametrize(
    "text", ["", results.BEGIN, f"{results.END}{results.BEGIN}", f"{results.BEGIN * 2}{results.END}"]
)
def test_a_readme_without_exactly_one_pair_of_marks_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="once each"):
        results.between_marks(text, "new")


def test_the_projects_readme_has_the_marks() -> None:
    assert "new" in results.between_marks(results.README.read_text(), "new")


# -- short runs ---------------------------------------------------------------------------------------------------


class SharedServers(Servers):
    """Starts each server for the first measurement that needs it. Later ones share it until *stack* ends."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        super().__init__(folder)
        self._stack = stack
        self._started: dict[str, ServerProcess] = {}

    @asynccontextmanager
    async def running(self, name: str, variables: Mapping[str, str] | None = None) -> AsyncIterator[ServerProcess]:
        """Yield the shared server *name*. Tests here set no *variables*."""
        assert variables is None
        if name not in self._started:
            self._started[name] = await self._stack.enter_async_context(super().running(name))
        yield self._started[name]


async def test_each_server_is_measured_by_calls_footprint_and_openings() -> None:
    call_plan = calls.Plan(callers=(1, 2), rounds=1, call_round_s=0.0, episode_round_s=0.0, warmup_s=0.0)

    async with servers() as made, AsyncExitStack() as stack:
        shared = SharedServers(made.folder, stack)
        called = await calls.run(shared, call_plan)
        stood = await footprint.run(shared, footprint.Plan(starts=1, idle_sessions=16))
        opened = await opens.run(shared, opens.Plan(opens=5, burst=8, bursts=1, cold_opens=1))

    assert called.errors == 0, called.figures
    assert {goal.id for goal in called.goals} == {"S1", "S4"}
    for grid in ("calls", "episodes"):
        assert all(cell["latency"]["count"] > 0 for row in called.figures[grid].values() for cell in row.values())
    assert {goal.id for goal in stood.goals} == {"S11", "S12"}
    assert set(stood.figures["starts"]) == set(footprint.STARTED)
    assert [each["sessions"] for each in stood.figures["idle_sessions"]] == [16] * (len(footprint.HOLDING) + 1)
    assert opened.errors == 0, opened.figures
    assert set(opened.figures["in_turn"]) == set(opened.figures["bursts"]) == set(opens.OPENED)
    assert opened.figures["in_turn"]["gateway"]["create"]["count"] == 5
    assert len(opened.figures["cold_process_ms"]) == 1


async def test_a_trainer_is_measured_beside_another_one_at_its_limits() -> None:
    limits = tenants.Busy(1), tenants.Busy(2, 100.0)
    async with servers() as made:
        found = await tenants.run(made, tenants.Plan(rounds=1, episodes=3, openers=5, busy=limits))

    assert [goal.is_goal for goal in found.goals] == [False, True] * 6
    assert found.figures["busy_calls"] > 0
    for name, count in (("opens", 3), ("calls", 12), ("calls_in_thread", 12)):
        for busy in ("1 session", "2 sessions and 100 calls/s"):
            assert all(found.figures[name][busy][place]["count"] == count for place in tenants.PLACES)


@pytest.mark.docker
async def test_sessions_of_a_short_run_open_on_an_engine() -> None:
    async with servers(Path("/dev/shm")) as made:
        found = await cold.run(made, cold.Plan(cold=1, warm=3))

    assert {goal.id for goal in found.goals} == {"S6", "S7"}
    assert len(found.figures["cold_gateway_ms"]) == len(found.figures["cold_sdk_ms"]) == 1


@pytest.mark.docker
async def test_custom_tasks_of_a_short_run_are_played_on_an_engine() -> None:
    async with servers(Path("/dev/shm")) as made:
        found = await openenv_tasks.run(made, openenv_tasks.Plan(containers=1, resets_each=2))

    assert found.errors == 0, found.figures
    assert found.figures["resets"]["count"] == 2
    assert len(found.figures["containers_ms"]) == 1
