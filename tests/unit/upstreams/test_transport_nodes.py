"""Requests and OpenEnv sockets to workers on other machines through their node, with real TLS on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import websockets

from gateway.backends.swarm.dialing import NodeDialer
from gateway.backends.swarm.nodes import Nodes, NodeState
from gateway.backends.swarm.reports import Endpoint
from gateway.core.addresses import NODE_LEAVES, Address, Kind, node_address, parse_address
from gateway.core.errors import UpstreamGone
from gateway.core.ids import WorkerId
from gateway.core.placement import NodeId
from gateway.core.ports.transport import Request
from gateway.node.tls import NODE_NAME, client_context, server_context
from gateway.node.tunnel import Tunnel
from gateway.upstreams.http1 import Http1Connection as WorkerConnection
from gateway.upstreams.openenv.websocket import NotListening, WebSocketPool
from gateway.upstreams.transport import HttpTransport
from tests.deadlines import HANG_S
from tests.fakes.certificates import Files, cluster
from tests.fakes.eventually import until
from tests.fakes.nodes import HOST, FakeNode, knowing
from tests.fakes.raw_http import Connection, RawServer

ONE = WorkerId("w1")
GET = Request(b"GET", b"/health")
OWN = node_address("n1", "w1", "worker.sock")
FOREIGN = node_address("n1", "w1", "server.sock")


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[Files, Files]]:
    with tempfile.TemporaryDirectory() as name:
        yield cluster(Path(name) / "tls")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rn-") as name:
        (Path(name) / "w1").mkdir()
        yield Path(name)


@pytest.fixture
async def node(files: tuple[Files, Files], folder: Path) -> AsyncIterator[FakeNode]:
    async with FakeNode(files[1], workers_dir=folder) as made:
        yield made


SOON_LOST = pytest.mark.parametrize("nodes", [1.0], indirect=True, ids=["soon lost"])


@pytest.fixture
async def nodes(request: pytest.FixtureRequest, files: tuple[Files, Files], node: FakeNode) -> AsyncIterator[Nodes]:
    """Yield a directory of one node, which is lost after the parameter in seconds."""
    async with knowing(files[0], node, lost_s=getattr(request, "param", HANG_S)) as made:
        yield made


@pytest.fixture
async def relay(nodes: Nodes) -> AsyncIterator[HttpTransport]:
    made = HttpTransport(dial=NodeDialer(nodes, connect_s=HANG_S).dial)  # forty handshakes on a busy machine
    yield made
    await made.aclose()


async def answers(connection: Connection) -> None:
    while True:
        await connection.request()
        await connection.answer(b"ok")


async def ask(relay: HttpTransport, address: str = OWN, request: Request = GET) -> bytes:
    exchange = await relay.send(ONE, address, request, silence_s=10.0)
    try:
        return await exchange.read(2**24)
    finally:
        await exchange.aclose()


@pytest.mark.parametrize(
    ("text", "address", "authority", "is_own"),
    [
        (OWN, Address(kind=Kind.NODE, node="n1", path="w1/worker.sock"), "worker", True),
        (FOREIGN, Address(kind=Kind.NODE, node="n1", path="w1/server.sock"), "localhost", False),
    ],
)
def test_an_address_on_a_node_names_node_worker_and_socket(
    text: str, address: Address, authority: str, is_own: bool
) -> None:
    parsed = parse_address(text)

    assert parsed == address
    assert (parsed.authority, parsed.is_own, parsed.is_unix, parsed.is_on_node) == (authority, is_own, False, True)


@pytest.mark.parametrize(
    "text",
    [
        "node:",
        "node:n1",
        "node:n1/w1",
        "node:n1/w1/",
        "node:n1//worker.sock",
        "node:n1/../worker.sock",
        "node:n1/w1/worker.sock/more",
        "node:n1/w1/worker.sock\n",
        "node:n1/w1/wörker.sock",
        "node:n 1/w1/worker.sock",
    ],
)
def test_an_invalid_address_on_a_node_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        parse_address(text)


async def test_a_worker_on_a_node_is_reached_and_its_connection_is_kept(
    relay: HttpTransport, node: FakeNode, folder: Path
) -> None:
    async with RawServer(answers, path=folder / "w1" / "worker.sock") as worker:
        assert [await ask(relay) for _ in range(3)] == [b"ok"] * 3

        assert [request.headers["host"] for request in worker.requests] == ["worker"] * 3
    assert node.lines == [b"EG1 w1/worker.sock\n"]


async def test_after_the_dial_the_connection_uses_its_transport_directly(
    nodes: Nodes, node: FakeNode, folder: Path
) -> None:
    async with RawServer(answers, path=folder / "w1" / "worker.sock"):
        loop = asyncio.get_running_loop()

        transport, made = await NodeDialer(nodes).dial(parse_address(OWN), lambda: WorkerConnection(loop))

        assert transport.get_protocol() is made
        made.abort()


async def test_large_bodies_pass_completely(relay: HttpTransport, folder: Path) -> None:
    async def echo(connection: Connection) -> None:
        request = await connection.request()
        await connection.answer(request.body)

    body = bytes(range(256)) * 2**14  # 4 MiB, more than all buffers on the path can hold
    async with RawServer(echo, path=folder / "w1" / "worker.sock"):
        assert await ask(relay, request=Request(b"POST", b"/call", body=body)) == body


async def test_many_concurrent_calls_each_get_their_own_answer(relay: HttpTransport, folder: Path) -> None:
    async def echo(connection: Connection) -> None:
        while True:
            request = await connection.request()
            await connection.answer(request.body)

    async with RawServer(echo, path=folder / "w1" / "worker.sock"):
        bodies = [str(number).encode() for number in range(40)]

        assert await asyncio.gather(*(ask(relay, request=Request(b"POST", b"/", body=one)) for one in bodies)) == bodies


async def test_a_missing_worker_is_reported_as_gone_and_nothing_was_sent(relay: HttpTransport) -> None:
    with pytest.raises(UpstreamGone, match=r"has no worker\.sock") as caught:
        await ask(relay)

    assert not caught.value.sent


async def test_an_unknown_node_is_reported_as_gone_immediately(relay: HttpTransport) -> None:
    with pytest.raises(UpstreamGone, match="node n9 is not there") as caught:
        await ask(relay, node_address("n9", "w1", "worker.sock"))

    assert not caught.value.sent


@SOON_LOST
async def test_a_call_waits_for_an_expected_node_until_the_node_is_lost(relay: HttpTransport, nodes: Nodes) -> None:
    nodes.expect(NodeId("n9"))
    asked = asyncio.ensure_future(ask(relay, node_address("n9", "w1", "worker.sock")))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not asked.done()

    await until(lambda: not nodes.is_expected(NodeId("n9")))

    with pytest.raises(UpstreamGone, match="node n9 is not there") as caught:
        await asked
    assert not caught.value.sent


async def test_the_error_of_a_gateway_without_nodes_states_that_it_has_no_nodes() -> None:
    relay = HttpTransport()

    with pytest.raises(UpstreamGone, match="has no nodes"):
        await ask(relay)


async def test_a_call_waits_for_a_node_whose_process_is_being_replaced(
    relay: HttpTransport, nodes: Nodes, node: FakeNode, folder: Path
) -> None:
    node.refusal = "this node's process ends"
    async with RawServer(answers, path=folder / "w1" / "worker.sock"):
        asked = asyncio.ensure_future(ask(relay))
        await until(lambda: len(node.lines) > 2)
        assert not asked.done()

        node.refusal = ""

        assert await asked == b"ok"


@SOON_LOST
async def test_a_call_to_a_lost_node_fails_and_was_not_sent(relay: HttpTransport, nodes: Nodes, node: FakeNode) -> None:
    await node.aclose()

    with pytest.raises(UpstreamGone) as caught:
        await ask(relay)

    assert not caught.value.sent
    view = nodes.view(NodeId("n1"))
    assert view is not None
    assert view.state is NodeState.LOST


async def test_a_connection_that_breaks_during_a_call_is_an_error_and_the_call_is_not_retried(
    relay: HttpTransport, node: FakeNode, folder: Path
) -> None:
    reached = asyncio.Event()

    async def hang(connection: Connection) -> None:
        await connection.request()
        reached.set()
        await connection.left()

    async with RawServer(hang, path=folder / "w1" / "worker.sock") as worker:
        asked = asyncio.ensure_future(ask(relay))
        await reached.wait()

        await node.aclose()

        with pytest.raises(UpstreamGone) as caught:
            await asked
        assert caught.value.sent
        assert len(worker.requests) == 1


async def test_a_dial_that_is_cancelled_leaves_no_connection(nodes: Nodes, node: FakeNode, folder: Path) -> None:
    node.hangs = True
    loop = asyncio.get_running_loop()
    dialed = asyncio.ensure_future(NodeDialer(nodes).dial(parse_address(OWN), lambda: WorkerConnection(loop)))
    await until(lambda: node.lines)

    dialed.cancel()

    with pytest.raises(asyncio.CancelledError):
        await dialed
    node.hangs = False
    async with RawServer(answers, path=folder / "w1" / "worker.sock") as worker:
        assert worker.open_connections == 0


# -- a node whose process ends


class Succession:
    """A node whose process is replaced: the tunnel before and the tunnel after."""

    def __init__(self, files: tuple[Files, Files], folder: Path) -> None:
        gateway, node = files
        self.tls = client_context(gateway.ca, gateway.cert, gateway.key)
        self.tls_name = NODE_NAME
        self._server_tls = server_context(node.ca, node.cert, node.key)
        self._folder = folder
        self._port = 0
        self.tunnels: list[Tunnel] = []

    async def follow(self) -> None:
        """Start the next process."""
        listener = socket.create_server((HOST, 0))
        listener.setblocking(False)
        made = Tunnel(sockets=self._folder, tls=self._server_tls)
        await made.start(listener)
        self._port = listener.getsockname()[1]
        self.tunnels.append(made)

    async def aclose(self) -> None:
        await asyncio.gather(*(made.drain(HANG_S) for made in self.tunnels))

    # What the dialer asks the directory of nodes.

    def begin(self) -> None:
        pass

    def endpoint(self, id: NodeId) -> Endpoint:
        return Endpoint(HOST, self._port - 1)

    def is_expected(self, id: NodeId) -> bool:
        return True


@pytest.fixture
async def succession(files: tuple[Files, Files], folder: Path) -> AsyncIterator[Succession]:
    made = Succession(files, folder)
    await made.follow()
    yield made
    await made.aclose()


@pytest.fixture
async def through(succession: Succession) -> AsyncIterator[HttpTransport]:
    made = HttpTransport(dial=NodeDialer(cast(Nodes, succession), connect_s=HANG_S).dial)
    yield made
    await made.aclose()


async def test_requests_that_cross_the_end_of_a_nodes_process_run_once_each(
    succession: Succession, through: HttpTransport, folder: Path
) -> None:
    async def echo(connection: Connection) -> None:
        while True:
            request = await connection.request()
            await connection.answer(request.body)

    bodies = [str(number).encode() for number in range(20)]
    async with RawServer(echo, path=folder / "w1" / "worker.sock") as worker:
        await asyncio.gather(*(ask(through) for _ in bodies))
        ended = succession.tunnels[0]
        await succession.follow()

        # Both run until they wait, before a byte of either arrives: each request is under way when the node gives
        # its connection up.
        answered, _ = await asyncio.gather(
            asyncio.gather(*(ask(through, request=Request(b"POST", b"/", body=body)) for body in bodies)),
            ended.drain(HANG_S),
        )

        assert answered == bodies
        assert sorted(request.body for request in worker.requests if request.method == "POST") == sorted(bodies)
        assert ended.connections == 0


async def test_an_answer_of_a_node_whose_process_ends_arrives_and_its_connection_is_not_used_again(
    succession: Succession, through: HttpTransport, folder: Path
) -> None:
    reached, may_answer = asyncio.Event(), asyncio.Event()

    async def slow(connection: Connection) -> None:
        while True:
            await connection.request()
            reached.set()
            await may_answer.wait()
            await connection.answer(b"ok")

    async with RawServer(slow, path=folder / "w1" / "worker.sock") as worker:
        asked = asyncio.ensure_future(ask(through))
        await reached.wait()
        ended = asyncio.ensure_future(succession.tunnels[0].drain(HANG_S))
        await succession.follow()
        may_answer.set()

        assert await asked == b"ok"
        assert await ask(through) == b"ok"
        await ended
        assert len(worker.requests) == 2


async def test_a_request_is_repeated_once_and_then_reported_as_not_sent(folder: Path) -> None:
    dialed: list[WorkerConnection] = []

    class Ending(asyncio.Transport):
        """A connection that its node gives up as soon as it is used."""

        def __init__(self, protocol: WorkerConnection) -> None:
            super().__init__()
            self.protocol = protocol

        def write(self, data: bytes | bytearray | memoryview) -> None:
            asyncio.get_running_loop().call_soon(self.protocol.data_received, NODE_LEAVES)

        def is_closing(self) -> bool:
            return False

        def abort(self) -> None:
            pass

    async def dial(address: Address, factory: Callable[[], Any]) -> tuple[asyncio.BaseTransport, Any]:
        protocol = factory()
        made = Ending(protocol)
        protocol.connection_made(made)
        dialed.append(protocol)
        return made, protocol

    with pytest.raises(UpstreamGone, match="ended twice before it took the request") as caught:
        await ask(HttpTransport(dial=dial))

    assert not caught.value.sent
    assert len(dialed) == 2


# -- sockets


async def test_an_openenv_socket_opens_on_a_node_and_closes(nodes: Nodes, folder: Path) -> None:
    async def serve(socket: websockets.ServerConnection) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            async for message in socket:
                if json.loads(message) == {"type": "close"}:
                    return
                await socket.send(json.dumps({"heard": json.loads(message)}))

    async with websockets.unix_serve(serve, str(folder / "w1" / "server.sock")) as server:
        line = await WebSocketPool(NodeDialer(nodes).dial_socket).open(FOREIGN, "/ws", answer_s=10.0)
        big = "x" * 500_000

        assert json.loads(await line.ask(json.dumps(big).encode())) == {"heard": big}
        assert await line.close(10.0)
        await until(lambda: not server.connections)


async def test_a_socket_without_a_listener_on_a_node_is_reported_as_not_listening(nodes: Nodes) -> None:
    with pytest.raises(NotListening):
        await WebSocketPool(NodeDialer(nodes).dial_socket).open(FOREIGN, "/ws", answer_s=10.0)


@SOON_LOST
async def test_an_unreachable_node_does_not_mean_that_its_server_is_gone(nodes: Nodes, node: FakeNode) -> None:
    await node.aclose()

    with pytest.raises(UpstreamGone) as caught:
        await WebSocketPool(NodeDialer(nodes).dial_socket).open(FOREIGN, "/ws", answer_s=10.0)

    assert not isinstance(caught.value, NotListening)
