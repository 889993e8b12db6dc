"""Parsing of worker addresses, and requests to each kind of address with real servers."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.core.addresses import Address, Kind, parse_address
from gateway.core.errors import UpstreamGone
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Request
from gateway.upstreams import transport as module
from gateway.upstreams.transport import HttpTransport
from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.raw_http import Connection, RawServer

ONE = WorkerId("one")
GET = Request(b"GET", b"/tasks?split=a%20b")


@pytest.fixture
async def relay() -> AsyncIterator[HttpTransport]:
    relay = HttpTransport()
    yield relay
    await relay.aclose()


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ra-") as name:
        yield Path(name)


async def answers(connection: Connection) -> None:
    while True:
        await connection.request()
        await connection.answer(b"ok")


async def ask(relay: HttpTransport, address: str, request: Request = GET) -> bytes:
    exchange = await relay.send(ONE, address, request, silence_s=HANG_S)
    try:
        return await exchange.read(1000)
    finally:
        await exchange.aclose()


@contextlib.asynccontextmanager
async def serving(host: str, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[Connection]]]:
    """Run a server on *host*, and yield its port and its connections."""
    connections: list[Connection] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(Connection(reader, writer))
        with contextlib.suppress(ConnectionError, EOFError):
            await answers(connections[-1])
        writer.close()

    server = await asyncio.start_server(serve, host, 0, ssl=tls)
    try:
        yield server.sockets[0].getsockname()[1], connections
    finally:
        server.close()
        for connection in connections:
            connection.abort()
        await asyncio.gather(*(one.writer.wait_closed() for one in connections), return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "address", "authority"),
    [
        ("unix:/run/w1/worker.sock", Address(kind=Kind.UNIX, path="/run/w1/worker.sock"), "worker"),
        ("unix:/run/w1/server.sock", Address(kind=Kind.UNIX, path="/run/w1/server.sock"), "localhost"),
        ("tcp:127.0.0.1:8000", Address(kind=Kind.TCP, host="127.0.0.1", port=8000), "127.0.0.1:8000"),
        ("tcp:[::1]:8000", Address(kind=Kind.TCP, host="::1", port=8000), "[::1]:8000"),
        ("http://envs.example", Address(kind=Kind.URL, host="envs.example", port=80), "envs.example"),
        ("http://envs.example:80/", Address(kind=Kind.URL, host="envs.example", port=80), "envs.example"),
        ("https://envs.example", Address(kind=Kind.URL, host="envs.example", port=443, tls=True), "envs.example"),
        ("https://envs.example:80", Address(kind=Kind.URL, host="envs.example", port=80, tls=True), "envs.example:80"),
        (
            "http://[2001:db8::1]:8000/a/b%20c/",
            Address(kind=Kind.URL, host="2001:db8::1", port=8000, prefix="/a/b%20c"),
            "[2001:db8::1]:8000",
        ),
    ],
)
def test_an_address_is_parsed(text: str, address: Address, authority: str) -> None:
    assert parse_address(text) == address
    assert parse_address(text).authority == authority


@pytest.mark.parametrize(
    "text",
    [
        "",
        "unix:",
        "unix:relative/path",
        "tcp:127.0.0.1",
        "tcp::80",
        "tcp:127.0.0.1:0",
        "tcp:127.0.0.1:65536",
        "tcp:127.0.0.1:+80",
        "ftp://envs.example",
        "http://",
        "http:///path",
        "http://:80",
        "http://envs.example:http",
        "http://envs.example:99999",
        "http://envs.example:0",
        "http://user:secret@envs.example",
        "http://envs.example/a?b=c",
        "http://envs.example/a?",
        "http://envs.example/#top",
        "http://envs.example/a b",
        "http://envs.example/\r\nx-injected: 1",
        "http://envs.example/ü",
        "http://[::1",
    ],
)
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_address(text)


def test_a_secret_in_a_url_is_not_repeated_in_its_refusal() -> None:
    with pytest.raises(ValueError, match="a user in it") as error:
        parse_address("http://user:s3cret@envs.example")

    assert "s3cret" not in str(error.value)


def test_an_address_yields_urls_for_other_clients() -> None:
    assert parse_address("http://envs.example:8000/a/").url("/ws?x=1", scheme="ws") == "ws://envs.example:8000/a/ws?x=1"
    assert parse_address("https://envs.example").url("/ws", scheme="ws") == "wss://envs.example/ws"
    assert parse_address("unix:/run/server.sock").url("/health") == "http://localhost/health"


async def test_the_path_of_a_url_becomes_the_prefix_of_the_target_and_its_host_the_host_header(
    relay: HttpTransport,
) -> None:
    async with serving("127.0.0.1") as (port, connections):
        assert await ask(relay, f"http://localhost:{port}/envs/math/") == b"ok"

        (request,) = connections[0].requests
    assert request.target == "/envs/math/tasks?split=a%20b"
    assert request.headers == {"host": f"localhost:{port}"}


async def test_a_url_without_a_path_has_no_prefix(relay: HttpTransport) -> None:
    async with serving("127.0.0.1") as (port, connections):
        assert await ask(relay, f"http://127.0.0.1:{port}") == b"ok"

        assert connections[0].requests[0].target == "/tasks?split=a%20b"


@pytest.mark.parametrize("address", ["http://[::1]:{port}/x", "tcp:[::1]:{port}"])
async def test_an_ipv6_address_is_reached(relay: HttpTransport, address: str) -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    async with serving("::1") as (port, connections):
        assert await ask(relay, address.format(port=port)) == b"ok"

        assert connections[0].requests[0].headers == {"host": f"[::1]:{port}"}


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.fixture
def certificate(folder: Path) -> Path:
    """A file with a private key and a self-signed certificate for ``localhost``."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    form, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
    path = folder / "server.pem"
    path.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()) + made.public_bytes(encoding))
    return path


@pytest.fixture
def tls(certificate: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    return context


@pytest.fixture
def system_trust(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the certificate to the system's trusted certificates, and clear the cached TLS context."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    module._tls.cache_clear()
    yield
    module._tls.cache_clear()


@pytest.mark.usefixtures("system_trust")
async def test_a_url_with_tls_is_reached_if_the_system_trusts_it(relay: HttpTransport, tls: ssl.SSLContext) -> None:
    async with serving("127.0.0.1", tls=tls) as (port, connections):
        assert await ask(relay, f"https://localhost:{port}/x") == b"ok"
        assert await ask(relay, f"https://localhost:{port}/x") == b"ok"

        assert [len(connection.requests) for connection in connections] == [2]
        assert connections[0].requests[0].headers == {"host": f"localhost:{port}"}


async def test_an_untrusted_certificate_is_an_error_and_nothing_was_sent(
    relay: HttpTransport, tls: ssl.SSLContext
) -> None:
    async with serving("127.0.0.1", tls=tls) as (port, connections):
        with pytest.raises(UpstreamGone, match="certificate") as error:
            await ask(relay, f"https://localhost:{port}")

        assert not error.value.sent
        assert [connection.requests for connection in connections] == []


async def test_an_invalid_address_can_t_be_reached_and_leaves_nothing_behind(relay: HttpTransport) -> None:
    with pytest.raises(UpstreamGone, match="is not an address") as error:
        await ask(relay, "carrier-pigeon:7")

    assert not error.value.sent
    assert relay._workers == {}


async def test_an_unknown_host_name_can_t_be_reached(relay: HttpTransport) -> None:
    with pytest.raises(UpstreamGone, match="no connection") as error:
        await ask(relay, "http://nowhere.invalid")

    assert not error.value.sent
    assert relay._workers == {}


async def test_idle_connections_are_reused_without_a_time_limit_only_to_the_gateway_s_own_servers(folder: Path) -> None:
    async with (
        contextlib.aclosing(HttpTransport(kept_s=0.0)) as relay,
        RawServer(answers, path=folder / "worker.sock") as own,
        RawServer(answers, path=folder / "server.sock") as foreign,
    ):
        for server in (own, own, foreign, foreign):
            await ask(relay, server.address)

        assert [len(connection.requests) for connection in own.connections] == [2]
        assert [len(connection.requests) for connection in foreign.connections] == [1, 1]
        await until(lambda: foreign.open_connections == 1)
