"""Mutual authentication between gateways and nodes, on real sockets and both event loops."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import stat
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.core.errors import ConfigError
from gateway.node.tls import GATEWAY_NAME, NODE_NAME, client_context, make_certificates, server_context
from tests.deadlines import HANG_S
from tests.fakes.certificates import CLIENT, DAY, SERVER, Files, cluster, expired_authority, of, signed

REFUSED = (ssl.SSLError, ConnectionError)
"""The errors of a refusal. ``OSError`` is too broad, because a timeout is one."""
Run = Callable[[Coroutine[Any, Any, Any]], Any]
LOOPS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


def serving(files: Files) -> ssl.SSLContext:
    return server_context(files.ca, files.cert, files.key)


def asking(files: Files) -> ssl.SSLContext:
    return client_context(files.ca, files.cert, files.key)


def unchecked(protocol: int, files: Files) -> ssl.SSLContext:
    """Return a TLS context that verifies nothing about its peer."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.load_cert_chain(files.cert, files.key)
    return context


async def echoed(server: ssl.SSLContext, client: ssl.SSLContext) -> bytes:
    """Send a word over a new connection, and return the echo. Raise ``OSError`` if either side refused."""
    served: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            served.append(await reader.read(100))
            writer.write(served[-1])
            await writer.drain()
        except OSError:
            pass  # the client refused the server
        finally:
            writer.close()

    async with asyncio.timeout(HANG_S), await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server) as listening:
        host, port = listening.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(host, port, ssl=client, server_hostname=NODE_NAME)
        try:
            writer.write(b"word")
            answer = await reader.read(100)
        finally:
            writer.close()
    if not answer:
        assert served in ([], [b""])
        raise ConnectionResetError("the server hung up")
    return answer


@LOOPS
def test_a_gateway_and_a_node_of_one_cluster_connect_at_any_address(tmp_path: Path, run: Run) -> None:
    gateway, node = cluster(tmp_path)

    assert run(echoed(serving(node), asking(gateway))) == b"word"


def test_tls_below_1_3_is_refused(tmp_path: Path) -> None:
    gateway, node = cluster(tmp_path)
    older = unchecked(ssl.PROTOCOL_TLS_CLIENT, gateway)
    older.maximum_version = ssl.TLSVersion.TLSv1_2

    with pytest.raises(REFUSED):
        asyncio.run(echoed(serving(node), older))


@LOOPS
def test_a_gateway_of_another_ca_is_refused(tmp_path: Path, run: Run) -> None:
    _, node = cluster(tmp_path / "ours")
    stranger, _ = cluster(tmp_path / "theirs")

    with pytest.raises(REFUSED):
        run(echoed(serving(node), unchecked(ssl.PROTOCOL_TLS_CLIENT, stranger)))


@LOOPS
def test_a_node_of_another_ca_is_refused(tmp_path: Path, run: Run) -> None:
    gateway, _ = cluster(tmp_path / "ours")
    _, stranger = cluster(tmp_path / "theirs")

    with pytest.raises(ssl.SSLCertVerificationError):
        run(echoed(unchecked(ssl.PROTOCOL_TLS_SERVER, stranger), asking(gateway)))


@LOOPS
def test_a_client_without_a_certificate_is_refused(tmp_path: Path, run: Run) -> None:
    _, node = cluster(tmp_path)
    nobody = ssl.create_default_context(cafile=node.ca)
    nobody.check_hostname = False

    with pytest.raises(REFUSED):
        run(echoed(serving(node), nobody))


@LOOPS
def test_a_client_with_a_nodes_certificate_is_refused(tmp_path: Path, run: Run) -> None:
    _, node = cluster(tmp_path)

    with pytest.raises(REFUSED):
        run(echoed(serving(node), unchecked(ssl.PROTOCOL_TLS_CLIENT, node)))


@LOOPS
def test_a_server_with_a_gateways_certificate_is_refused(tmp_path: Path, run: Run) -> None:
    gateway, _ = cluster(tmp_path)

    with pytest.raises(ssl.SSLCertVerificationError):
        run(echoed(unchecked(ssl.PROTOCOL_TLS_SERVER, gateway), asking(gateway)))


@LOOPS
@pytest.mark.parametrize("name", [NODE_NAME, "gateway.env-gateway.example", "*.env-gateway"])
def test_a_client_with_the_right_key_usage_and_another_name_is_refused(tmp_path: Path, run: Run, name: str) -> None:
    _, node = cluster(tmp_path)
    other = signed(tmp_path, name=name, usages=[CLIENT, SERVER])

    with pytest.raises(REFUSED):
        run(echoed(serving(node), unchecked(ssl.PROTOCOL_TLS_CLIENT, other)))


@LOOPS
def test_a_server_with_another_name_is_refused_even_without_a_host_name_check(tmp_path: Path, run: Run) -> None:
    gateway, _ = cluster(tmp_path)
    other = signed(tmp_path, name=GATEWAY_NAME, usages=[CLIENT, SERVER])
    context = asking(gateway)
    context.check_hostname = False  # as urllib3 does, because it checks names itself

    with pytest.raises(ssl.SSLCertVerificationError, match=f"for {GATEWAY_NAME}, and not for {NODE_NAME}"):
        run(echoed(unchecked(ssl.PROTOCOL_TLS_SERVER, other), context))


@LOOPS
def test_an_expired_client_is_refused(tmp_path: Path, run: Run) -> None:
    _, node = cluster(tmp_path)
    expired = signed(tmp_path, name=GATEWAY_NAME, usages=[CLIENT], ends=-DAY)

    with pytest.raises(REFUSED):
        run(echoed(serving(node), unchecked(ssl.PROTOCOL_TLS_CLIENT, expired)))


def test_a_plain_socket_of_a_gateway_refuses_a_server_of_another_name(tmp_path: Path) -> None:
    gateway, _ = cluster(tmp_path)
    other = signed(tmp_path, name=GATEWAY_NAME, usages=[CLIENT, SERVER])

    async def hostile() -> None:
        async def ignore(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.close()

        context = unchecked(ssl.PROTOCOL_TLS_SERVER, other)
        async with await asyncio.start_server(ignore, "127.0.0.1", 0, ssl=context) as listening:
            await asyncio.to_thread(connect, listening.sockets[0].getsockname())

    def connect(address: tuple[str, int]) -> None:
        with (
            socket.create_connection(address, timeout=HANG_S) as plain,
            asking(gateway).wrap_socket(plain, server_hostname=NODE_NAME),
        ):
            pass

    with pytest.raises(ssl.SSLCertVerificationError, match=NODE_NAME):
        asyncio.run(hostile())


async def test_an_http_client_needs_the_context_and_the_name(tmp_path: Path) -> None:
    gateway, node = cluster(tmp_path)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0, ssl=serving(node)) as listening:
        port = listening.sockets[0].getsockname()[1]
        async with httpx.AsyncClient(verify=asking(gateway), trust_env=False) as client:
            response = await client.get(f"https://127.0.0.1:{port}/", extensions={"sni_hostname": NODE_NAME})

    assert response.text == "ok"


# -- invalid files --------------------------


@pytest.mark.parametrize("lacking", ["ca", "cert", "key"])
def test_the_error_names_a_missing_file(tmp_path: Path, lacking: str) -> None:
    _, node = cluster(tmp_path)
    files = replace(node, **{lacking: tmp_path / "nowhere.pem"})

    with pytest.raises(ConfigError, match=r"nowhere\.pem: No such file"):
        serving(files)


@pytest.mark.parametrize("spoiled", ["ca", "cert", "key"])
def test_the_error_names_a_file_that_is_not_pem(tmp_path: Path, spoiled: str) -> None:
    _, node = cluster(tmp_path)
    (tmp_path / "odd.pem").write_bytes(b"\x30\x00 not text")
    files = replace(node, **{spoiled: tmp_path / "odd.pem"})

    with pytest.raises(ConfigError, match=r"odd\.pem: .* in PEM"):
        serving(files)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    gateway, node = cluster(tmp_path)

    with pytest.raises(ConfigError, match=r"gateway-key\.pem is not the key of the certificate .*node\.pem"):
        serving(replace(node, key=gateway.key))


def test_a_certificate_of_another_ca_is_refused(tmp_path: Path) -> None:
    _, node = cluster(tmp_path / "ours")
    cluster(tmp_path / "theirs")

    with pytest.raises(ConfigError, match=r"node\.pem was not signed by the CA in .*theirs"):
        serving(replace(node, ca=tmp_path / "theirs" / "ca.pem"))


def test_one_ca_file_may_hold_an_old_ca_and_a_new_one(tmp_path: Path) -> None:
    gateway, _ = cluster(tmp_path / "new")
    _, node = cluster(tmp_path / "old")
    both = tmp_path / "both.pem"
    both.write_bytes(gateway.ca.read_bytes() + node.ca.read_bytes())

    answer = asyncio.run(echoed(serving(replace(node, ca=both)), asking(replace(gateway, ca=both))))

    assert answer == b"word"


def test_an_expired_ca_is_refused_unless_the_used_ca_is_in_the_same_file(tmp_path: Path) -> None:
    gateway, node = cluster(tmp_path / "ours")
    old = expired_authority(tmp_path / "old.pem")
    both = tmp_path / "both.pem"
    both.write_bytes(old.read_bytes() + node.ca.read_bytes())

    answer = asyncio.run(echoed(serving(replace(node, ca=both)), asking(gateway)))

    assert answer == b"word"
    with pytest.raises(ConfigError, match=r"was not signed by the CA in .*old\.pem"):
        serving(replace(node, ca=old))


def test_a_ca_that_expired_before_its_certificates_is_refused(tmp_path: Path) -> None:
    _, node = cluster(tmp_path)
    expired_authority(tmp_path / "ca.pem", key=tmp_path / "ca-key.pem")

    with pytest.raises(ConfigError, match=r"ca\.pem expired at"):
        serving(node)


@pytest.mark.parametrize(
    ("ends", "begins", "said"),
    [
        pytest.param(-DAY, -2 * DAY, "expired at", id="expired"),
        pytest.param(2 * DAY, DAY, "is not valid before", id="not yet valid"),
    ],
)
def test_a_certificate_that_is_out_of_date_is_refused(tmp_path: Path, ends: Any, begins: Any, said: str) -> None:
    cluster(tmp_path)
    files = signed(tmp_path, name=NODE_NAME, usages=[SERVER], ends=ends, begins=begins)

    with pytest.raises(ConfigError, match=f"further.pem {said}"):
        serving(files)


def test_swapped_roles_are_refused_at_the_start(tmp_path: Path) -> None:
    gateway, node = cluster(tmp_path)

    with pytest.raises(ConfigError, match=f"for {GATEWAY_NAME}, and not for {NODE_NAME}"):
        serving(gateway)
    with pytest.raises(ConfigError, match=f"for {NODE_NAME}, and not for {GATEWAY_NAME}"):
        asking(node)


def test_a_certificate_of_the_wrong_usage_is_refused(tmp_path: Path) -> None:
    cluster(tmp_path)

    with pytest.raises(ConfigError, match="lacks the extended key usage serverAuth"):
        serving(signed(tmp_path, name=NODE_NAME, usages=[CLIENT]))


# -- creation --


def test_keys_are_readable_only_by_their_owner_with_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_certificates(tmp_path / "new", days=3)
    finally:
        os.umask(before)

    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {"ca-key.pem", "gateway-key.pem", "node-key.pem"}
    assert {name for name, mode in modes.items() if mode == 0o644} == {"ca.pem", "gateway.pem", "node.pem"}


def test_nothing_is_overwritten_and_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "node.pem").write_text("mine")

    with pytest.raises(ConfigError, match=r"has node\.pem already"):
        make_certificates(tmp_path, days=3)

    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"node.pem": "mine"}


def test_the_error_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match="file"):
        make_certificates(tmp_path / "file" / "below", days=3)


def test_the_certs_command_creates_valid_files_and_prints_their_names(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["certs", str(tmp_path / "made"), "--days", "2"])

    assert result.exit_code == 0, result.output
    assert "node-key.pem" in result.output
    assert asyncio.run(echoed(serving(of(tmp_path / "made", "node")), asking(of(tmp_path / "made", "gateway"))))
