"""The relay from gateways to the sockets of workers: real TLS on loopback, real Unix sockets, both event loops."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.core.addresses import NODE_LEAVES
from gateway.node import tunnel as relays
from gateway.node.tls import client_context, server_context
from gateway.node.tunnel import Tunnel
from gateway.node.worker_sockets import UnderWay
from gateway.server import listen
from tests.deadlines import HANG_S
from tests.fakes.certificates import Files, cluster
from tests.fakes.eventually import until

LINE = b"EG1 w1/worker.sock\n"
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
Run = Callable[[Coroutine[Any, Any, Any]], Any]
Talk = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    return cluster(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield the parent of the workers' folders; its path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        (Path(name) / "w1").mkdir()
        yield Path(name)


@dataclass
class Worker:
    """A worker that queues its connections for the test."""

    path: Path
    talks: asyncio.Queue[Talk] = field(default_factory=asyncio.Queue)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Worker]:
        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self.talks.put((reader, writer))

        server = await asyncio.start_unix_server(keep, str(self.path))
        try:
            yield self
        finally:
            server.close()
            while not self.talks.empty():
                self.talks.get_nowait()[1].close()


@dataclass
class World:
    relay: Tunnel
    address: tuple[str, int]
    tls: ssl.SSLContext
    worker: Worker
    opened: list[asyncio.StreamWriter] = field(default_factory=list)

    async def dial(self) -> Talk:
        """Open a gateway's connection without sending anything."""
        talk = await asyncio.open_connection(*self.address, ssl=self.tls, server_hostname="node.env-gateway")
        self.opened.append(talk[1])
        return talk

    async def joined(self) -> tuple[Talk, Talk]:
        """Return the gateway's and the worker's end of a relayed connection."""
        near = await self.dial()
        near[1].write(LINE)
        assert await near[0].readexactly(2) == b"+\n"
        far = await self.worker.talks.get()
        self.opened.append(far[1])
        return near, far

    async def rested(self) -> tuple[Talk, Talk]:
        """Return both ends of a relayed connection after an answered request."""
        near, far = await self.joined()
        near[1].write(b"ask")
        assert await far[0].readexactly(3) == b"ask"
        far[1].write(EMPTY)
        assert await near[0].readexactly(len(EMPTY)) == EMPTY
        return near, far

    async def refusal(self, line: bytes) -> bytes:
        """Return the answer to a first *line*, after which the connection is closed."""
        reader, writer = await self.dial()
        writer.write(line)
        return await reader.read()

    async def nothing_left(self) -> None:
        await until(lambda: self.relay.connections == 0)


def play(
    run: Run,
    folder: Path,
    files: tuple[Files, Files],
    scene: Callable[[World], Coroutine[Any, Any, None]],
    *,
    max_connections: int = 100,
) -> None:
    """Run *scene* with a relay and a worker, and check that no connection is left at the end."""

    async def played() -> None:
        gateway, node = files
        tls = server_context(node.ca, node.cert, node.key)
        made = Tunnel(sockets=folder, tls=tls, max_connections=max_connections)
        listener = listen("127.0.0.1", 0)
        await made.start(listener)
        async with asyncio.timeout(HANG_S), Worker(folder / "w1" / "worker.sock").serving() as worker:
            client = client_context(gateway.ca, gateway.cert, gateway.key)
            world = World(made, listener.getsockname(), client, worker)
            try:
                await scene(world)
            finally:
                for writer in world.opened:
                    writer.close()
                await made.drain(HANG_S / 2)
            assert made.connections == 0

    run(played())


# -- bytes both ways


@LOOPS
def test_bytes_pass_unchanged_in_both_directions(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        (reader, writer), (far_reader, far_writer) = await world.joined()
        sent = os.urandom(3_000_000)

        async def there() -> None:
            writer.write(sent)
            await writer.drain()

        async def back() -> None:
            far_writer.write(sent[::-1])
            await far_writer.drain()

        async with asyncio.TaskGroup() as group:
            group.create_task(there())
            group.create_task(back())
            arrived = group.create_task(far_reader.readexactly(len(sent)))
            came_back = group.create_task(reader.readexactly(len(sent)))
        assert arrived.result() == sent
        assert came_back.result() == sent[::-1]

    play(run, folder, files, scene)


@LOOPS
def test_bytes_after_the_first_line_reach_the_worker(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        reader, writer = await world.dial()
        early = os.urandom(600_000)
        writer.write(LINE + early)
        assert await reader.readexactly(2) == b"+\n"
        far_reader, far_writer = await world.worker.talks.get()
        world.opened.append(far_writer)

        assert await far_reader.readexactly(len(early)) == early

    play(run, folder, files, scene)


@LOOPS
def test_a_first_line_may_arrive_in_pieces(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        reader, writer = await world.dial()
        for piece in (LINE[:3], LINE[3:9], LINE[9:]):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        assert await reader.readexactly(2) == b"+\n"

    play(run, folder, files, scene)


@LOOPS
def test_the_other_socket_of_a_worker_is_reached_by_its_name(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        async with Worker(folder / "w1" / "server.sock").serving() as other:
            reader, writer = await world.dial()
            writer.write(b"EG1 w1/server.sock\n")
            assert await reader.readexactly(2) == b"+\n"
            _, far_writer = await other.talks.get()
            far_writer.write(b"the other")
            assert await reader.readexactly(9) == b"the other"
            far_writer.close()

    play(run, folder, files, scene)


@LOOPS
@pytest.mark.parametrize("slow", ["worker", "gateway"])
def test_a_side_that_does_not_read_blocks_the_other_side(folder: Path, files: Any, run: Run, slow: str) -> None:
    async def scene(world: World) -> None:
        near, far = await world.joined()
        reader, writer = (far[0], near[1]) if slow == "worker" else (near[0], far[1])
        sent = 0
        piece = bytes(2**20)
        while sent < 200 * len(piece):  # far more than all buffers on the path can hold
            writer.write(piece)
            sent += len(piece)
            draining = asyncio.ensure_future(writer.drain())
            await asyncio.wait({draining}, timeout=0.3)
            if not draining.done():
                break
        assert sent < 200 * len(piece)

        arrived = len(await reader.readexactly(sent))
        await draining
        assert arrived == sent

    play(run, folder, files, scene)


@LOOPS
def test_an_idle_connection_stays_open(folder: Path, files: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relays, "LINE_S", 0.05)

    async def scene(world: World) -> None:
        (reader, writer), (far_reader, far_writer) = await world.joined()
        await asyncio.sleep(0.2)  # longer than a first line may take
        writer.write(b"ask")
        assert await far_reader.readexactly(3) == b"ask"
        far_writer.write(b"tell")
        assert await reader.readexactly(4) == b"tell"

    play(run, folder, files, scene)


# -- ends of connections


@LOOPS
def test_bytes_that_a_worker_sent_before_it_closed_arrive(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        (reader, _), (_, far_writer) = await world.joined()
        far_writer.write(bytes(2_000_000))
        far_writer.close()

        assert len(await reader.read(-1)) == 2_000_000
        await world.nothing_left()

    play(run, folder, files, scene)


@LOOPS
def test_bytes_that_a_gateway_sent_before_it_closed_arrive(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        (_, writer), (far_reader, _) = await world.joined()
        writer.write(bytes(2_000_000))
        await writer.drain()
        writer.close()

        assert len(await far_reader.read(-1)) == 2_000_000
        await world.nothing_left()

    play(run, folder, files, scene)


@LOOPS
def test_a_half_close_of_a_worker_closes_both_sides_after_its_last_bytes(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        (reader, writer), (far_reader, far_writer) = await world.joined()
        writer.write(b"ask")
        assert await far_reader.readexactly(3) == b"ask"
        far_writer.write(b"last words")
        far_writer.write_eof()

        assert await reader.read(-1) == b"last words"
        assert await far_reader.read(-1) == b""
        await world.nothing_left()

    play(run, folder, files, scene)


@LOOPS
@pytest.mark.parametrize("side", ["gateway", "worker"])
def test_an_abort_of_either_side_ends_the_other(folder: Path, files: Any, run: Run, side: str) -> None:
    async def scene(world: World) -> None:
        near, far = await world.joined()
        gone, other = (near, far) if side == "gateway" else (far, near)
        gone[1].transport.abort()

        assert await other[0].read(-1) == b""
        await world.nothing_left()

    play(run, folder, files, scene)


@LOOPS
@pytest.mark.parametrize("said", [b"", LINE[:7], LINE, LINE + b"GET / HTTP/1.1\r\n\r\n"])
def test_a_gateway_that_aborts_at_any_moment_leaves_no_connection(
    folder: Path, files: Any, run: Run, said: bytes
) -> None:
    async def scene(world: World) -> None:
        for turns in range(12):
            _, writer = await world.dial()
            writer.write(said)
            for _ in range(turns):
                await asyncio.sleep(0)
            writer.transport.abort()
        await world.nothing_left()
        while not world.worker.talks.empty():
            reader, writer = world.worker.talks.get_nowait()
            await reader.read(-1)
            writer.close()

    play(run, folder, files, scene)


@LOOPS
def test_a_side_that_does_not_read_the_last_bytes_is_cut_off(
    folder: Path, files: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LINGER_S", 0.1)

    async def scene(world: World) -> None:
        (_, near_writer), (_, far_writer) = await world.joined()
        near_writer.transport.pause_reading()  # type: ignore[attr-defined]  # a stream's transport can read
        far_writer.write(bytes(20 * 2**20))
        draining = asyncio.ensure_future(far_writer.drain())
        await asyncio.wait({draining}, timeout=0.3)
        assert not draining.done()

        await world.relay.drain(HANG_S / 2)  # there was no request, so the connection counts as idle

        assert world.relay.connections == 0
        await asyncio.wait({draining})
        assert isinstance(draining.exception(), OSError)

    play(run, folder, files, scene)


# -- refusals --------


@LOOPS
@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(b"EG1 w2/worker.sock\n", b"No such file", id="unknown worker"),
        pytest.param(b"EG1 w1/server.sock\n", b"No such file", id="no such socket"),
        pytest.param(b"EG1 w1/other.sock\n", b"not EG1", id="another socket"),
        pytest.param(b"EG1 ../w1/worker.sock\n", b"not EG1", id="a path upwards"),
        pytest.param(b"EG1 ./worker.sock\n", b"not EG1", id="the folder of all workers"),
        pytest.param(b"EG1 w1/../w1/worker.sock\n", b"not EG1", id="a detour"),
        pytest.param(b"EG1 w1\0/worker.sock\n", b"not EG1", id="a NUL byte"),
        pytest.param("EG1 w\u00e4/worker.sock\n".encode(), b"not EG1", id="not ASCII"),
        pytest.param(b"EG2 w1/worker.sock\n", b"not EG1", id="another greeting"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", b"not EG1", id="HTTP"),
        pytest.param(b"\n", b"not EG1", id="nothing"),
        pytest.param(b"EG1 " + b"w" * 300 + b"\n", b"more than 200 bytes", id="too long"),
        pytest.param(b"E" * 5000, b"more than 200 bytes", id="no end of line"),
    ],
)
def test_an_invalid_first_line_is_answered_with_the_reason(
    folder: Path, files: Any, run: Run, line: bytes, said: bytes
) -> None:
    async def scene(world: World) -> None:
        answer = await world.refusal(line)

        assert answer.startswith(b"-")
        assert answer.endswith(b"\n")
        assert said in answer
        assert world.worker.talks.empty()
        await world.nothing_left()

    play(run, folder, files, scene)


@LOOPS
def test_a_first_line_that_takes_too_long_is_refused(
    folder: Path, files: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LINE_S", 0.05)

    async def scene(world: World) -> None:
        assert await world.refusal(LINE[:-1]) == b"-the first line took too long\n"

    play(run, folder, files, scene)


@LOOPS
def test_only_real_sockets_in_real_folders_of_workers_are_reached(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        outside = folder / "outside.sock"
        async with Worker(outside).serving() as machines:
            for name in ("linked", "plain", "piped", "foldered", "dead"):
                (folder / name).mkdir()
            (folder / "linked" / "worker.sock").symlink_to(outside)
            (folder / "plain" / "worker.sock").write_text("")
            os.mkfifo(folder / "piped" / "worker.sock")
            (folder / "foldered" / "worker.sock").mkdir()
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(folder / "dead" / "worker.sock"))
            (folder / "elsewhere").symlink_to(folder / "w1")

            answers = {
                name: await world.refusal(f"EG1 {name}/worker.sock\n".encode())
                for name in ("linked", "plain", "piped", "foldered", "dead", "elsewhere", "outside.sock")
            }

            assert all(answer.startswith(b"-") for answer in answers.values()), answers
            assert b"not a socket" in answers["linked"]
            assert b"not a socket" in answers["plain"]
            assert b"does not listen" in answers["dead"]
            assert machines.talks.empty()
            assert world.worker.talks.empty()

    play(run, folder, files, scene)


@LOOPS
def test_the_refusal_names_a_worker_whose_queue_of_connections_stays_full(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        (folder / "deaf").mkdir()
        path = str(folder / "deaf" / "worker.sock")
        with socket.socket(socket.AF_UNIX) as deaf, socket.socket(socket.AF_UNIX) as first:
            deaf.bind(path)
            deaf.listen(0)
            first.connect(path)

            answer = await world.refusal(b"EG1 deaf/worker.sock\n")

            assert answer == b"-worker deaf takes no connections at worker.sock\n"

    play(run, folder, files, scene)


@LOOPS
def test_connections_above_the_limit_are_refused_and_existing_connections_continue(
    folder: Path, files: Any, run: Run
) -> None:
    async def scene(world: World) -> None:
        talks = [await world.joined() for _ in range(2)]

        assert b"2 connections" in await world.refusal(b"")
        for (reader, _), (_, far_writer) in talks:
            far_writer.write(b"still here")
            assert await reader.readexactly(10) == b"still here"
        talks[0][0][1].close()
        await until(lambda: world.relay.connections == 1)
        await world.joined()

    play(run, folder, files, scene, max_connections=2)


@LOOPS
def test_a_client_without_a_gateways_certificate_reaches_no_worker(folder: Path, files: Any, run: Run) -> None:
    gateway, node = files

    async def scene(world: World) -> None:
        stranger = ssl.create_default_context(cafile=gateway.ca)
        stranger.check_hostname = False
        stranger.load_cert_chain(node.cert, node.key)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await as_stranger(world, stranger)
        assert world.worker.talks.empty()
        assert world.relay.connections == 0

    async def as_stranger(world: World, stranger: ssl.SSLContext) -> None:
        reader, writer = await asyncio.open_connection(*world.address, ssl=stranger)
        try:
            writer.write(LINE)
            assert await reader.read(2) == b""
            raise ConnectionResetError("hung up")
        finally:
            writer.close()

    play(run, folder, files, scene)


# -- draining


@LOOPS
def test_during_the_drain_idle_connections_are_closed_and_a_running_request_is_answered(
    folder: Path, files: Any, run: Run
) -> None:
    async def scene(world: World) -> None:
        resting, resting_far = await world.rested()
        (reader, writer), (far_reader, far_writer) = await world.joined()
        writer.write(b"ask")
        await far_reader.readexactly(3)
        far_writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\n: ping\r\n")
        await reader.readuntil(b": ping\r\n")

        leaving = asyncio.ensure_future(world.relay.drain(HANG_S))
        assert await resting[0].readline() == NODE_LEAVES
        resting[1].write(b"too late")
        assert await resting_far[0].read(-1) == b""
        resting[1].close()
        with pytest.raises(OSError, match=r"(?i)connect|refused"):
            await world.dial()
        await until(lambda: world.relay.connections == 1)
        far_writer.write(b"4\r\ndone\r\n0\r\n\r\n")

        assert await reader.readuntil(NODE_LEAVES) == b"4\r\ndone\r\n0\r\n\r\n" + NODE_LEAVES
        writer.close()
        await leaving

    play(run, folder, files, scene)


@LOOPS
def test_the_first_request_of_a_connection_is_answered_although_the_drain_has_begun(
    folder: Path, files: Any, run: Run
) -> None:
    async def scene(world: World) -> None:
        (reader, writer), (far_reader, far_writer) = await world.joined()
        leaving = asyncio.ensure_future(world.relay.drain(HANG_S))
        await asyncio.sleep(0)
        assert world.relay.is_leaving
        writer.write(b"ask")
        assert await far_reader.readexactly(3) == b"ask"
        far_writer.write(EMPTY)

        assert await reader.readuntil(NODE_LEAVES) == EMPTY + NODE_LEAVES
        writer.close()
        await leaving

    play(run, folder, files, scene)


@LOOPS
def test_a_gateway_that_does_not_close_is_cut_off(
    folder: Path, files: Any, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "LINGER_S", 0.1)

    async def scene(world: World) -> None:
        (reader, _), _ = await world.rested()

        await world.relay.drain(HANG_S)

        assert await reader.readline() == NODE_LEAVES
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)

    play(run, folder, files, scene)


@LOOPS
def test_a_request_that_is_not_answered_within_the_drain_time_is_cut_off(folder: Path, files: Any, run: Run) -> None:
    async def scene(world: World) -> None:
        (reader, writer), (far_reader, _) = await world.joined()
        writer.write(b"ask")
        await far_reader.readexactly(3)

        await world.relay.drain(0.05)

        assert world.relay.connections == 0
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        assert await far_reader.read(-1) == b""

    play(run, folder, files, scene)


# -- detection of running requests

HEAD = b"HTTP/1.1 200 OK\r\nServer: x\r\n"
ENDED = [
    pytest.param([HEAD + b"Content-Length: 4\r\n\r\nbody"], id="a content length"),
    pytest.param([HEAD + b"content-length:4\r\n\r\n", b"bo", b"dy"], id="a content length, in pieces"),
    pytest.param([HEAD[:20], HEAD[20:] + b"content-length: 0\r", b"\n\r\n"], id="a head in pieces"),
    pytest.param([HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"], id="chunks"),
    pytest.param([HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"], id="no chunk"),
    pytest.param([HEAD + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n", b"0\r", b"\n\r\n"], id="cut chunks"),
    pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"content-length: 1\r\n\r\nx"], id="an interim answer"),
    pytest.param(
        [b"HTTP/1.1 100 Continue\r\n\r\n", HEAD + b"content-length: 1\r\n\r\nx"],
        id="an interim answer in a piece of its own",
    ),
    pytest.param([b"HTTP/1.1 204 No Content\r\n\r\n"], id="no body"),
]
GOING_ON = [
    pytest.param([], id="no answer"),
    pytest.param([HEAD], id="half a head"),
    pytest.param([b"HTTP/1.1 100 Continue\r\n\r\n"], id="an interim answer alone"),
    pytest.param([HEAD + b"content-length: 4\r\n\r\nbod"], id="half a body"),
    pytest.param([HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n"], id="a chunk"),
    pytest.param([HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\n0\r\n\r\n\r\n"], id="data that looks like an end"),
    pytest.param([HEAD + b"\r\nbody"], id="a body until the connection closes"),
    pytest.param([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n", b"\x81\x00"], id="a WebSocket"),
    pytest.param([b"x" * 300_000, b"\r\n\r\n"], id="not HTTP"),
]


def seen(pieces: list[bytes]) -> UnderWay:
    looked = UnderWay()
    looked.asked()
    for piece in pieces:
        looked.answered(piece)
    return looked


@pytest.mark.parametrize("pieces", ENDED)
def test_a_request_ends_with_the_end_of_its_answer(pieces: list[bytes]) -> None:
    assert not seen(pieces).is_under_way


@pytest.mark.parametrize("pieces", ENDED)
def test_the_next_request_on_a_connection_is_tracked_separately(pieces: list[bytes]) -> None:
    looked = seen(pieces)

    states = []
    for step in (looked.asked, lambda: looked.answered(HEAD), lambda: looked.answered(b"content-length: 0\r\n\r\n")):
        step()
        states.append(looked.is_under_way)

    assert states == [True, True, False]


@pytest.mark.parametrize("pieces", GOING_ON)
def test_a_request_is_running_until_its_answer_ends(pieces: list[bytes]) -> None:
    assert seen(pieces).is_under_way


@pytest.mark.parametrize("pieces", ENDED[:6])
def test_an_answer_may_arrive_in_any_pieces(pieces: Any) -> None:
    whole = b"".join(pieces)
    for cut in range(1, len(whole)):
        assert seen([whole[:cut]]).is_under_way
        assert not seen([whole[:cut], whole[cut:]]).is_under_way


def test_a_connection_without_a_request_is_idle() -> None:
    assert not UnderWay().is_under_way
