"""The benchmark of proxies: the figures of its rounds, the search for peers and their setup, and one short run."""

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gateway.app
from bench.load import wrk
from bench.load.closed_loop import Round
from bench.load.episodes import TOKEN_LENGTH, Episode, WrongAnswer
from bench.load.http1 import Address
from bench.measures import proxies
from bench.references.httpx_gateway import LIMITS, HttpxTransport
from bench.reporting import plots, results
from bench.reporting.grid import Cell, Grid
from bench.reporting.report import Goal, Report
from bench.subjects.peers import (
    ALL,
    BARE,
    CHP,
    DIRECTLY,
    FORWARDER,
    GATEWAY,
    GATEWAY_OPEN,
    HTTPX_GATEWAY,
    HTTPX_GATEWAY_LIMITS,
    NGINX,
    NGINX_TCP,
    Cpus,
    Found,
    choose,
    find,
    free_port,
    nginx_configuration,
    pin,
    shared_out,
)
from bench.subjects.targets import servers
from gateway.core.errors import UpstreamGone, UpstreamTimeout
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Request, Transport
from gateway.upstreams.transport import HttpTransport
from tests.fakes.raw_http import Connection, RawServer

# -- figures of the rounds ----------------------------------------------------------------------------------------


def cell(rate: int, *, p50_ms: float = 1.0, errors: int = 0) -> Cell:
    """Return one round of one second with a number of equally long steps."""
    made = Cell(rounds=[Round(1.0, [p50_ms / 1e3] * rate, Counter({"wrong": errors} if errors else {}))])
    made.cpu_s.update({"proxy": 0.5, "worker": 0.25, "generator": 0.1})
    return made


def grid() -> Grid:
    return {
        DIRECTLY: {1: cell(100, p50_ms=0.1), 64: cell(300), 256: cell(300), 1024: cell(300)},
        NGINX: {1: cell(90, p50_ms=0.15), 64: cell(200), 1024: cell(190)},
        CHP: {1: cell(20, p50_ms=0.5), 64: cell(50), 1024: cell(40, errors=3)},
        HTTPX_GATEWAY: {1: cell(10, p50_ms=1.0), 64: cell(10), 256: cell(2)},
        GATEWAY_OPEN: {1: cell(60, p50_ms=0.25), 64: cell(110), 1024: cell(100)},
        GATEWAY: {1: cell(50, p50_ms=0.3), 64: cell(100), 1024: cell(75, errors=2)},
    }


def reached(goals: list[Goal]) -> dict[str, tuple[float, bool]]:
    """Return the value of each goal, and whether it is a goal."""
    return {f"{goal.id} {goal.what}": (round(goal.value, 6), goal.is_goal) for goal in goals}


def test_only_the_gateway_with_keys_has_goals_and_other_proxies_are_reported_for_comparison() -> None:
    found = reached(list(proxies.goals(grid())))

    expected = {
        "S1 p50 of a call that a proxy adds, c=1: gateway": (0.2, True),
        "S1 p50 of a call that a proxy adds, c=1: nginx": (0.05, False),
        "S1 p50 of a call through the proxy ÷ directly, c=1: gateway": (3.0, True),
        "S1 p50 of a call through the proxy ÷ directly, c=1: gateway (no keys)": (2.5, False),
        "S2 steps/s through one gateway, c=64": (100, True),
        "S2 errors of these steps, c=64": (0, True),
        "S2 steps/s, gateway ÷ nginx, c=64": (0.5, False),
        "S2 CPU time of a step, nginx ÷ gateway, c=64": (0.5, False),
        "S2 steps/s, gateway ÷ configurable-http-proxy, c=64": (2.0, True),
        "S2 steps/s, gateway ÷ httpx gateway, c=64": (10.0, True),
        "S2 steps/s, gateway ÷ gateway (no keys), c=64": (round(100 / 110, 6), False),
        "S3 steps/s at c=1,024 ÷ at the best number of callers: gateway": (0.75, True),
        "S3 steps/s at c=256 ÷ at the best number of callers: httpx gateway": (0.2, False),
        "S3 time-outs and other errors at c=1,024: gateway": (2, True),
    }
    assert {what: found[what] for what in expected} == expected


def test_each_bound_is_the_projects_goal() -> None:
    bounds = {(goal.id, goal.bound, goal.at_least) for goal in proxies.goals(grid()) if goal.is_goal}

    assert bounds == {
        *(("S1", 0.25, False), ("S1", 8.0, False)),
        *(("S2", 8000.0, True), ("S2", 0, False), ("S2", 8.0, True), ("S2", 1.3, True)),
        *(("S3", 0.8, True), ("S3", 0, False)),
    }


def test_proxies_on_httpx_are_measured_with_fewer_callers_but_at_least_one_number() -> None:
    plan = proxies.Plan(callers=(1, 64, 256, 1024))

    assert proxies.callers_of(GATEWAY, plan) == (1, 64, 256, 1024)
    assert proxies.callers_of(HTTPX_GATEWAY, plan) == (1, 64, 256)
    assert proxies.callers_of(HTTPX_GATEWAY_LIMITS, plan) == (1, 64)
    assert proxies.callers_of(HTTPX_GATEWAY, proxies.Plan(callers=(512, 1024))) == (512,)


def test_a_run_without_peers_or_many_callers_reports_the_remaining_goals() -> None:
    short = {name: {1: row[1]} for name, row in grid().items() if name in (DIRECTLY, GATEWAY)}

    assert {goal.id for goal in proxies.goals(short)} == {"S1"}
    assert {goal.id for goal in proxies.goals({GATEWAY: grid()[GATEWAY]})} == {"S2", "S3"}


def test_a_proxy_whose_calls_all_failed_is_infinitely_slower_and_adds_no_time() -> None:
    rounds = grid()
    rounds[CHP] = {callers: cell(0, errors=5) for callers in rounds[CHP]}

    found = reached(list(proxies.goals(rounds)))

    assert found["S2 steps/s, gateway ÷ configurable-http-proxy, c=64"] == (float("inf"), True)
    assert "S1 p50 of a call that a proxy adds, c=1: configurable-http-proxy" not in found


def report(
    *, cpus: Cpus | None, missing: tuple[str, ...] = (), wrk_rates: Mapping[str, Sequence[float]] = MappingProxyType({})
) -> Report:
    return proxies.make_report(
        grid(),
        wrk_rates,
        plan={},
        cpus=cpus,
        versions={"nginx": "1.2.3", CHP: None},
        missing=missing,
        rss_bytes={
            DIRECTLY: {"worker_idle": 1, "worker_loaded": 2},
            NGINX: {"proxy_idle": 2**20, "proxy_loaded": 3 * 2**20},
        },
    )


def test_errors_of_other_proxies_are_in_the_table_but_not_in_the_reports_errors() -> None:
    made = report(cpus=None)

    assert made.errors == 2
    assert ["configurable-http-proxy", "20.0", "50.0", "-", "40.0", "3"] in [list(row) for row in made.tables[0].rows]


def test_the_tables_separate_a_proxys_cpu_time_and_memory_from_its_workers() -> None:
    *_, cpu, memory = report(cpus=None).tables

    assert ["nginx", "5.56", "2.50", "-", "2.63"] in [list(row) for row in cpu.rows]
    assert ["nginx: its worker", "2.78", "1.25", "-", "1.32"] in [list(row) for row in cpu.rows]
    assert [list(row) for row in memory.rows] == [["nginx", "1.00", "3.00"]]


@pytest.mark.parametrize(
    ("cpus", "sentence"), [(Cpus(2, 5), "the proxy has CPU 2 alone"), (None, "no process is pinned")]
)
def test_a_report_states_the_cpus_of_the_processes(cpus: Cpus | None, sentence: str) -> None:
    assert sentence in " ".join(report(cpus=cpus).not_comparable)


def test_rates_by_wrk_are_compared_round_by_round_and_only_nginx_is_a_goal() -> None:
    made = report(cpus=None, wrk_rates={NGINX: [100.0, 400.0, 50.0], CHP: [20.0] * 3, GATEWAY: [60.0, 200.0, 40.0]})

    found = reached(list(made.goals))
    assert found["S2 steps/s by wrk, nothing pinned, gateway ÷ nginx, c=64"] == (0.6, True)
    assert found["S2 steps/s by wrk, nothing pinned, gateway ÷ configurable-http-proxy, c=64"] == (3.0, False)
    (table,) = [table for table in made.tables if "wrk" in table.title]
    assert list(table.rows[0]) == ["nginx", "100", "50.0", "400"]


def test_a_report_names_the_proxies_that_were_left_out() -> None:
    text = " ".join(report(cpus=None, missing=(CHP,)).not_comparable)

    assert "Left out because the program is not installed (scripts/bench-peers --chp): configurable-http-proxy." in text
    assert "Proxies measured: nginx 1.2.3." in text


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=300))
def test_a_distribution_rises_from_its_least_sample_to_its_greatest(samples: list[float]) -> None:
    points = proxies.quantiles(samples)

    shares, values = zip(*points, strict=True)
    assert list(shares) == sorted(shares)
    assert list(values) == sorted(values)
    assert (values[0], values[-1]) == (min(samples) * 1e3, max(samples) * 1e3)


# -- plots --------------------------------------------------------------------------------------------------------


def test_plots_are_made_from_the_results_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    results.write({"figures": {"proxies": report(cpus=None).figures}}, path)
    found = results.read(path)

    assert [plot.name for plot in plots.plots(found)] == ["throughput", "latency-c1", "latency-c64"]
    assert plots.rates(found["figures"]["proxies"])[GATEWAY] == [(1, 50), (64, 100), (1024, 75)]


def test_a_run_without_proxies_has_no_plots() -> None:
    assert plots.plots({"figures": {"calls": {}}}) == []


def test_a_small_plot_keeps_the_whole_tail() -> None:
    points = proxies.quantiles([place / 1e3 for place in range(1, 10_001)])

    shown = plots.thinned(points)

    assert len(shown) < len(points) / 2
    assert [point for point in shown if point[0] >= 0.98] == [point for point in points if point[0] >= 0.98]


def test_pictures_come_before_the_tables() -> None:
    found = results.results([report(cpus=None)], FACTS)

    text = results.markdown(found, [("Calls a second", "plots/throughput.svg")])

    assert text.index("![Calls a second](plots/throughput.svg)") < text.index("**Goals**")
    assert "![" not in results.markdown(found)


FACTS: dict[str, object] = {
    "taken_at": "2030-01-31T00:00:00+00:00",
    "size": "quick",
    "seconds": 61.0,
    "machine": {"cpus": 2, "cpu": "some", "memory": "1 kB", "kernel": "6.1", "python": "3.11", "load_average": [0.1]},
    "load_average": [0.1],
    "load_average_after": [1.1],
    "versions": {"ors-sdk": "0.1.0", "openreward": "0.1.167", "uvicorn": "0.54.0", "uvloop": "0.23.0"},
    "source": {"commit": "0123456789abcdef", "has_changes": False},
}


# -- peers --------------------------------------------------------------------------------------------------------


def program(path: Path, says: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    path.chmod(0o755)


def test_programs_that_were_unpacked_are_found_with_their_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "nginx" / "usr" / "sbin" / "nginx", "nginx version: nginx/1.2.3 (Some)")
    program(tmp_path / "wrk" / "wrk", "wrk 4.1.0")
    program(tmp_path / "bin" / "node", "v20.1.0")
    chp = tmp_path / "chp" / "node_modules" / CHP / "bin" / CHP
    program(chp, "")
    (tmp_path / "chp" / "installed").write_text("5.3.0\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")

    found = find(tmp_path)

    nginx, wrk = tmp_path / "nginx" / "usr" / "sbin" / "nginx", tmp_path / "wrk" / "wrk"
    assert found == Found(nginx, "1.2.3", chp, "5.3.0", "v20.1.0", wrk)
    assert all(found.has(name) for name in ALL)


def test_an_incomplete_installation_is_not_found(tmp_path: Path) -> None:
    program(tmp_path / "chp" / "node_modules" / CHP / "bin" / CHP, "")

    assert find(tmp_path).chp is None


def test_without_programs_only_the_python_peers_remain() -> None:
    assert [name for name in ALL if not Found().has(name)] == [NGINX, NGINX_TCP, CHP]


@pytest.mark.parametrize(
    ("worker", "server"),
    [
        pytest.param(Address(socket="/x/worker"), "server unix:/x/worker;", id="over a Unix socket"),
        pytest.param(Address(port=81), "server 127.0.0.1:81;", id="over TCP"),
    ],
)
def test_nginx_keeps_connections_on_both_sides_and_buffers_nothing(worker: Address, server: str) -> None:
    text = nginx_configuration(Path("/x"), Address(port=80), worker, as_root=False)

    for line in (
        *("worker_processes 1;", server, "keepalive 2048;", "listen 127.0.0.1:80 ", "access_log off;"),
        *("proxy_http_version 1.1;", 'proxy_set_header Connection "";', "proxy_buffering off;"),
    ):
        assert line in text
    assert "user root" not in text
    assert "user root root;" in nginx_configuration(Path("/x"), Address(port=80), worker, as_root=True)


def test_a_free_port_is_a_valid_port_number() -> None:
    assert 0 < free_port() < 65_536


@pytest.mark.parametrize(
    ("usable", "cpus"), [(set(), None), ({3}, None), ({1, 0}, Cpus(0, 1)), ({7, 2, 5}, Cpus(2, 5))]
)
def test_the_proxy_gets_the_first_cpu_and_the_load_the_second(usable: set[int], cpus: Cpus | None) -> None:
    assert choose(usable) == cpus


def test_no_process_is_pinned_if_pinning_is_off() -> None:
    before = os.sched_getaffinity(0)

    with shared_out(wanted=False) as cpus:
        assert cpus is None
        assert os.sched_getaffinity(0) == before


def test_this_process_returns_to_its_cpus_after_a_run() -> None:
    before = os.sched_getaffinity(0)

    with shared_out() as cpus:
        assert os.sched_getaffinity(0) == (before if cpus is None else {cpus.load})

    assert os.sched_getaffinity(0) == before


async def test_a_process_is_pinned_with_all_its_threads() -> None:
    cpu = max(os.sched_getaffinity(0))
    code = "import threading; threading.Thread(target=input).start(); print('there', flush=True)"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()

        pin(process.pid, cpu)

        threads = os.listdir(f"/proc/{process.pid}/task")
        assert len(threads) == 2
        assert [os.sched_getaffinity(int(thread)) for thread in threads] == [{cpu}] * 2
    finally:
        process.kill()
        await process.communicate()


# -- the gateway on httpx -----------------------------------------------------------------------------------------


@pytest.fixture
async def transport() -> AsyncIterator[Transport]:
    transport = HttpxTransport(LIMITS["unlimited"])
    yield transport
    await transport.aclose()


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield the path of a socket that is short enough."""
    folder = Path(tempfile.mkdtemp(prefix="px-"))
    yield folder / "worker"
    shutil.rmtree(folder)


WORKER = WorkerId("some")
ASKED = Request(b"POST", b"/noop/call?a=b%20c", [(b"x-session-id", b"s")], b"{}")


async def asked(transport: Transport, address: str, *, silence_s: float = 10.0) -> tuple[int, list[bytes], bytes]:
    """Return the status, the header names and the body of the answer."""
    exchange = await transport.send(WORKER, address, ASKED, silence_s=silence_s)
    try:
        return exchange.status, [name for name, _ in exchange.headers], await exchange.read(2**20)
    finally:
        await exchange.aclose()


@pytest.mark.parametrize("over_unix", [True, False])
async def test_requests_over_httpx_share_a_connection_until_their_worker_is_forgotten(
    transport: Transport, place: Path, over_unix: bool
) -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.answer(b"there", status=418)

    async with RawServer(script, path=place if over_unix else None) as server:
        for _ in range(2):
            assert await asked(transport, server.address) == (418, [b"content-type"], b"there")
        assert len(server.connections) == 1
        transport.forget(WORKER)
        await asked(transport, server.address)

        assert len(server.connections) == 2
        request = server.requests[0]
        assert (request.method, request.target, request.body) == ("POST", "/noop/call?a=b%20c", b"{}")
        assert request.headers["x-session-id"] == "s"


async def test_connection_errors_over_httpx_have_the_gateways_types(transport: Transport, place: Path) -> None:
    async def leaves(connection: Connection) -> None:
        await connection.request()

    async def stays(connection: Connection) -> None:
        await connection.request()
        await connection.left()

    with pytest.raises(UpstreamGone) as unsent:
        await asked(transport, f"unix:{place}")
    async with RawServer(leaves, path=place) as server:
        with pytest.raises(UpstreamGone) as sent:
            await asked(transport, server.address)
    async with RawServer(stays, path=place) as server:
        with pytest.raises(UpstreamTimeout):
            await asked(transport, server.address, silence_s=0.05)

    assert (unsent.value.sent, sent.value.sent) == (False, True)


def test_the_transport_that_the_httpx_gateway_replaces_is_in_gateway_app() -> None:
    assert vars(gateway.app)["HttpTransport"] is HttpTransport


# -- wrk ----------------------------------------------------------------------------------------------------------


WRK_OUTPUT = "  10 requests in 1.00s, 1.00KB read\n{errors}Requests/sec:   9210.33\nTransfer/sec:  3.00MB\n"


def test_the_rate_is_read_from_what_wrk_prints() -> None:
    assert wrk.read_rate(WRK_OUTPUT.format(errors="")) == 9210.33


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (WRK_OUTPUT.format(errors="  Non-2xx or 3xx responses: 3\n"), "wrk reports: Non-2xx or 3xx responses: 3"),
        (
            WRK_OUTPUT.format(errors="  Socket errors: connect 0, read 2, write 0, timeout 0\n"),
            "wrk reports: Socket errors: connect 0, read 2, write 0, timeout 0",
        ),
        ("unable to connect to 127.0.0.1:1\n", "wrk reports no rate: unable to connect to 127.0.0.1:1\n"),
    ],
)
def test_a_round_of_wrk_with_failed_calls_or_without_a_rate_is_an_error(output: str, problem: str) -> None:
    with pytest.raises(WrongAnswer, match=f"^{re.escape(problem)}$"):
        wrk.read_rate(output)


async def test_wrk_sends_the_calls_of_all_sessions(tmp_path: Path) -> None:
    program(tmp_path / "wrk", "Requests/sec: 12.5")
    episodes = [Episode(connection=None) for _ in range(2)]  # type: ignore[arg-type]  # wrk makes its own connections
    for sid, episode in zip(("one", "two"), episodes, strict=True):
        episode.use(sid)

    script = tmp_path / "wrk.lua"
    rate = await wrk.rate(tmp_path / "wrk", Address(port=1), episodes, callers=2, duration_s=1, script=script)

    assert rate == 12.5
    first, second = [line for line in script.read_text().splitlines() if line.startswith('"')]
    assert json.loads(first.rstrip(",")).encode() == episodes[0].call_bytes("0" * TOKEN_LENGTH)
    assert r"\r\nX-Session-ID: two\r\n" in second


# -- a short run --------------------------------------------------------------------------------------------------


async def test_a_short_run_through_the_references_and_the_gateway_has_no_wrong_answer() -> None:
    plan = proxies.Plan(
        names=(DIRECTLY, BARE, FORWARDER, HTTPX_GATEWAY, GATEWAY),
        callers=(1, 2),
        rounds=1,
        round_s=0.0,
        warmup_s=0.0,
        pinned=False,
    )

    async with servers() as made:
        found = await proxies.run(made, plan)

    calls = found.figures["calls"]
    assert list(calls) == [DIRECTLY, BARE, FORWARDER, HTTPX_GATEWAY, GATEWAY]
    assert all(not each["errors"] and each["latency"]["count"] > 0 for row in calls.values() for each in row.values())
    assert set(calls[GATEWAY]["c2"]["cpu_s_per_1000"]) == {"proxy", "worker", "generator"}
    assert set(found.figures["rss_bytes"][DIRECTLY]) == {"worker_idle", "worker_loaded"}
