"""The directory of nodes, and the gates of their engines as local sockets, with real TLS on loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.backends.swarm.gate_sockets import GateSockets
from gateway.backends.swarm.nodes import Nodes, NodeState, NodeView
from gateway.backends.swarm.reports import parse_hosts, read_report
from gateway.core.errors import BackendError, ConfigError
from gateway.core.placement import NodeId
from gateway.node.tls import NODE_NAME, client_context, make_certificates
from tests.deadlines import HANG_S
from tests.fakes.certificates import Files, cluster, of
from tests.fakes.eventually import until
from tests.fakes.nodes import EVERY_S, HOST, FakeNode, knowing

N1 = NodeId("n1")


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[Files, Files]]:
    with tempfile.TemporaryDirectory() as name:
        yield cluster(Path(name) / "tls")


@pytest.fixture
async def node(files: tuple[Files, Files]) -> AsyncIterator[FakeNode]:
    async with FakeNode(files[1]) as made:
        yield made


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sn-") as name:
        yield Path(name)


def state(nodes: Nodes, id: NodeId = N1) -> NodeState | None:
    view = nodes.view(id)
    return None if view is None else view.state


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("tasks.node", ("tasks.node", 7443)),
        ("10.0.0.5:9000", ("10.0.0.5", 9000)),
        ("[2001:db8::1]:9000", ("2001:db8::1", 9000)),
        ("[2001:db8::1]", ("2001:db8::1", 7443)),
        ("2001:db8::1", ("2001:db8::1", 7443)),
    ],
)
def test_a_host_is_read_with_or_without_a_port(text: str, read: tuple[str, int]) -> None:
    assert parse_hosts([text]) == [read]


@pytest.mark.parametrize("text", ["", ":7443", "host:", "host:port", "host:0", "host:65535", "[::1]7443", "host:-1"])
def test_an_invalid_host_is_refused_with_the_name_of_the_setting(text: str) -> None:
    with pytest.raises(ConfigError, match="GATEWAY_NODES"):
        parse_hosts([text])


def test_an_empty_list_of_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match="GATEWAY_NODES"):
        parse_hosts([])


REPORT = (
    b'{"id":"%s","name":"a","cpus":%s,"memory_bytes":1,"available_bytes":1,"max_containers":1,"containers":0,"new":1}'
)


def test_an_unknown_field_of_a_later_version_is_ignored() -> None:
    assert read_report(REPORT % (b"a", b"2.5")).cpus == 2.5


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"[]", "object"),
        (b"{", "Invalid JSON"),
        (b'{"id": 1}', "id"),
        (REPORT % (b"a/b", b"1"), "is not an id"),
        (b'{"id": "a", "name": "a", "cpus": "8"}', "cpus"),
        (b'{"id": "a", "name": "a", "cpus": true}', "cpus"),
        (REPORT % (b"a", b"-1"), "cpus"),
        (REPORT % (b"a", b"NaN"), "cpus"),
        (
            b'{"id":"a","name":"a","cpus":1,"memory_bytes":1,"available_bytes":1,"max_containers":1,"containers":0,'
            b'"workers":[]}',
            "workers",
        ),
    ],
)
def test_an_invalid_report_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_report(body)


async def test_the_view_of_a_node_has_its_report(files: tuple[Files, Files], node: FakeNode) -> None:
    node.report["workers"] = {"w1": "math"}
    async with knowing(files[0], node) as nodes:
        (view,) = nodes.views()

        assert (view.id, view.name, view.state) == ("n1", "machine-n1", NodeState.LIVE)
        assert view.report is not None
        assert dict(view.report.workers) == {"w1": "math"}
        assert nodes.endpoint(N1) == (HOST, node.port)


async def test_a_later_report_updates_the_view_of_a_node(files: tuple[Files, Files], node: FakeNode) -> None:
    async with knowing(files[0], node) as nodes:
        node.report["is_draining"] = True

        await until(lambda: nodes.live()[0].is_draining)


async def test_a_node_that_stops_is_silent_and_then_lost(files: tuple[Files, Files], node: FakeNode) -> None:
    heard: list[NodeView] = []
    async with knowing(files[0], node, lost_s=1.0) as nodes:
        nodes.changed(heard.append)
        await node.aclose()

        await until(lambda: state(nodes) is NodeState.SILENT)
        assert nodes.live() == []
        assert nodes.endpoint(N1) is not None
        assert not heard

        await until(lambda: state(nodes) is NodeState.LOST)
        assert nodes.endpoint(N1) is None
        assert [view.state for view in heard] == [NodeState.LOST]


async def test_a_node_that_hangs_is_silent(files: tuple[Files, Files], node: FakeNode) -> None:
    async with knowing(files[0], node) as nodes:
        node.hangs = True

        await until(lambda: state(nodes) is NodeState.SILENT)


async def test_a_node_that_comes_back_at_its_address_is_live_again(files: tuple[Files, Files], node: FakeNode) -> None:
    heard: list[NodeView] = []
    async with knowing(files[0], node, lost_s=1.0) as nodes:
        nodes.changed(heard.append)
        await node.aclose()
        await until(lambda: state(nodes) is NodeState.LOST)

        await node.start()

        await until(lambda: state(nodes) is NodeState.LIVE)
        assert [view.state for view in heard] == [NodeState.LOST, NodeState.LIVE]


async def test_of_two_processes_of_a_node_the_newer_process_is_used(files: tuple[Files, Files]) -> None:
    async with FakeNode(files[1]) as old, FakeNode(files[1]) as new:
        second = new.port
        await new.aclose()
        async with knowing(files[0], old, new) as nodes:
            assert nodes.endpoint(N1) == (HOST, old.port)

            await new.start()

            await until(lambda: nodes.endpoint(N1) == (HOST, second))
            asked = len(old.requests)
            await until(lambda: len(old.requests) > asked + 2)  # the older process still answers, which changes nothing
            assert nodes.endpoint(N1) == (HOST, second)
            assert len(nodes.views()) == 1


async def test_an_expected_node_that_never_reports_is_lost_after_its_time(
    files: tuple[Files, Files], node: FakeNode
) -> None:
    gone = NodeId("gone")
    async with knowing(files[0], node, lost_s=1.0) as nodes:
        nodes.expect(gone)

        assert state(nodes, gone) is NodeState.SILENT
        await until(lambda: state(nodes, gone) is NodeState.LOST)
        assert state(nodes) is NodeState.LIVE


async def test_a_node_that_never_reported_is_awaited_longer(files: tuple[Files, Files], node: FakeNode) -> None:
    coming = NodeId("coming")
    async with knowing(files[0], node, lost_s=1.0, unheard_s=3600.0) as nodes:
        nodes.expect(coming)
        await node.aclose()

        await until(lambda: state(nodes) is NodeState.LOST)

        assert state(nodes, coming) is NodeState.SILENT


async def test_a_server_without_a_certificate_of_the_cluster_is_not_a_node(
    files: tuple[Files, Files], folder: Path
) -> None:
    make_certificates(folder / "others", days=1)
    async with FakeNode(of(folder / "others", "node")) as stranger, knowing(files[0], stranger) as nodes:
        assert nodes.views() == []
        assert "certificate" in nodes.problems().lower()


async def test_an_address_without_a_listener_is_named_as_a_problem(files: tuple[Files, Files], node: FakeNode) -> None:
    await node.aclose()
    async with knowing(files[0], node) as nodes:
        assert nodes.views() == []
        assert f"{HOST}:{node.port}" in nodes.problems()


async def test_an_unknown_host_name_is_named_as_a_problem(files: tuple[Files, Files]) -> None:
    tls = client_context(files[0].ca, files[0].cert, files[0].key)
    nodes = Nodes([("no-such-host.invalid", 7443)], tls=tls, tls_name=NODE_NAME, lost_s=1.0, every_s=EVERY_S)
    try:
        await nodes.settled()

        assert "no-such-host.invalid" in nodes.problems()
    finally:
        await nodes.aclose()


async def test_the_error_of_a_refused_request_has_the_nodes_message(files: tuple[Files, Files], node: FakeNode) -> None:
    async with knowing(files[0], node) as nodes:
        with pytest.raises(BackendError, match="machine-n1 answers 404: no such image"):
            async with nodes.request(N1, "GET", "/env-gateway/images/none"):
                pass


# -- the gates


@pytest.fixture
async def nodes(files: tuple[Files, Files], node: FakeNode) -> AsyncIterator[Nodes]:
    async with knowing(files[0], node) as made:
        yield made


@pytest.fixture
async def gates(folder: Path, nodes: Nodes) -> AsyncIterator[GateSockets]:
    made = GateSockets(folder / "sockets", nodes)
    yield made
    await made.aclose()


async def ask(url: str, path: str) -> bytes:
    reader, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: engine\r\n\r\n".encode())
        async with asyncio.timeout(HANG_S):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return await reader.readexactly(size)
    finally:
        writer.close()


async def test_the_gate_of_a_node_answers_at_a_local_socket(gates: GateSockets) -> None:
    url = await gates.open(N1)

    assert await ask(url, "/v1.41/_ping") == b"GET /v1.41/_ping"
    assert await gates.open(N1) == url


async def test_the_socket_is_for_this_user_only_and_is_removed_with_the_gates(gates: GateSockets, folder: Path) -> None:
    path = Path((await gates.open(N1)).removeprefix("unix://"))

    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    await gates.aclose()
    assert list((folder / "sockets").iterdir()) == []


async def test_a_connection_to_an_unreachable_node_is_closed_immediately(gates: GateSockets, node: FakeNode) -> None:
    url = await gates.open(N1)
    await node.aclose()

    with pytest.raises((ConnectionError, EOFError)):
        await ask(url, "/_ping")


async def test_a_connection_without_a_request_does_not_reach_the_node(gates: GateSockets, node: FakeNode) -> None:
    url = await gates.open(N1)

    for _ in range(3):
        _, writer = await asyncio.open_unix_connection(url.removeprefix("unix://"))
        writer.close()
        await writer.wait_closed()

    assert await ask(url, "/first") == b"GET /first"
    assert [one.target for one in node.requests if one.target != "/env-gateway/node"] == ["/first"]


async def test_a_request_to_a_node_that_is_cut_off_ends(gates: GateSockets, node: FakeNode) -> None:
    url = await gates.open(N1)
    node.hangs = True
    asked = asyncio.ensure_future(ask(url, "/events"))
    await until(lambda: any(one.target == "/events" for one in node.requests))

    gates.cut(N1)

    with pytest.raises((ConnectionError, EOFError)):
        await asked


async def test_sockets_of_a_killed_process_are_removed_but_sockets_of_a_live_process_are_not(
    nodes: Nodes, folder: Path
) -> None:
    left, used = folder / "gates-left", folder / "gates-used"
    for place in (left, used):
        place.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left / "n1.sock"))
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(used / "n1.sock"))
        alive.listen()
        for place in (left, used):
            os.utime(place, (0, 0))
        gates = GateSockets(folder, nodes)

        await gates.open(N1)

        assert not left.exists()
        assert (used / "n1.sock").exists()
        await gates.aclose()
