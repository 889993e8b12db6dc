"""The forwarder that runs next to a third-party image: tests with a real process, Unix socket and TCP servers."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import until
from tests.fakes.ports import reserved_port
from tests.fakes.splicing import serving

PROGRAM = Path(__file__).parents[3] / "env_images" / "base" / "envserver" / "forwarder.py"
RESTING_FILES = 5
"""Descriptors of a forwarder without connections: three standard streams, its socket and its event poll."""
LISTENING = "00010000"
"""The flags of a listening socket in ``/proc/net/unix``."""


@dataclass
class Forwarder:
    """A running forwarder process and the path of its Unix socket."""

    process: asyncio.subprocess.Process
    path: Path

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Connect a client to the forwarder; a deadline bounds the whole block."""
        async with asyncio.timeout(HANG_S):
            reader, writer = await asyncio.open_unix_connection(str(self.path))
            try:
                yield reader, writer
            finally:
                writer.transport.abort()

    @property
    def memory_kib(self) -> int:
        """Resident memory of the process in KiB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    @property
    def open_files(self) -> int:
        """Number of the process's open descriptors."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    @property
    def cpu_ticks(self) -> int:
        """CPU time that the process has used, in hundredths of a second."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder with a short path, because the path of a Unix socket is limited."""
    with tempfile.TemporaryDirectory(prefix="fw-") as name:
        yield Path(name)


@contextlib.asynccontextmanager
async def forwarding(folder: Path, port: int, *, files: int = 8192) -> AsyncIterator[Forwarder]:
    path = folder / "server.sock"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(PROGRAM), "--socket", str(path), "--port", str(port)
    )
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (files, files))
    try:
        await until(lambda: _listens(path))
        forwarder = Forwarder(process, path)
        await until(lambda: forwarder.open_files == RESTING_FILES)
        yield forwarder
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _listens(path: Path) -> bool:
    """Whether a process listens on *path*. Asks the kernel, because a connection would be forwarded to the server."""
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return any(fields[-1] == str(path) and fields[3] == LISTENING for fields in sockets)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send all received bytes back, then close the connection."""
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()


async def test_bytes_pass_unchanged_in_both_directions(folder: Path) -> None:
    sent = bytes(range(256)) * 2**14  # 4 MiB: many times the size of the forwarder's buffers

    async with (
        serving(echo) as port,
        forwarding(folder, port) as forwarder,
        forwarder.connected() as (reader, writer),
    ):
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent


async def test_a_half_close_by_the_client_is_forwarded_and_the_other_direction_continues(folder: Path) -> None:
    async def after_the_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got = await reader.read()
        writer.write(b"got " + got)
        await writer.drain()

    async with (
        serving(after_the_end) as port,
        forwarding(folder, port) as forwarder,
        forwarder.connected() as (reader, writer),
    ):
        writer.write(b"all")
        writer.write_eof()

        assert await reader.read() == b"got all"


async def test_a_half_close_by_the_server_is_forwarded_and_the_other_direction_continues(folder: Path) -> None:
    heard = asyncio.get_running_loop().create_future()

    async def ends_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"bye")
        writer.write_eof()
        heard.set_result(await reader.read())

    async with (
        serving(ends_first) as port,
        forwarding(folder, port) as forwarder,
        forwarder.connected() as (reader, writer),
    ):
        assert await reader.read() == b"bye"
        writer.write(b"still here")
        writer.write_eof()

        assert await heard == b"still here"


async def test_the_server_sees_that_a_client_disconnected(folder: Path) -> None:
    left = asyncio.Event()

    async def waits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        writer.write(b"ok")
        await reader.read()
        left.set()

    async with serving(waits) as port, forwarding(folder, port) as forwarder:
        async with forwarder.connected() as (reader, writer):
            writer.write(b"go")
            assert await reader.readexactly(2) == b"ok"
        async with asyncio.timeout(HANG_S):
            await left.wait()
        await until(lambda: forwarder.open_files == RESTING_FILES)


async def test_the_client_sees_that_the_server_aborted_the_connection(folder: Path) -> None:
    async def aborts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(2)
        writer.transport.abort()

    async with serving(aborts) as port, forwarding(folder, port) as forwarder:
        async with forwarder.connected() as (reader, writer):
            writer.write(b"go")
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        await until(lambda: forwarder.open_files == RESTING_FILES)


async def test_connections_close_immediately_until_a_server_listens_and_later_connections_are_served(
    folder: Path,
) -> None:
    port = reserved_port()
    async with forwarding(folder, port) as forwarder:
        async with forwarder.connected() as (reader, _):
            assert await reader.read() == b""
        async with serving(echo, port=port), forwarder.connected() as (reader, writer):
            writer.write(b"here")
            assert await reader.readexactly(4) == b"here"


async def test_a_server_that_listens_only_on_the_ipv6_loopback_is_found(folder: Path) -> None:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip("this machine has no IPv6")
    async with serving(echo, host="::1", port=port), forwarding(folder, port) as forwarder:
        for _ in range(3):
            async with forwarder.connected() as (reader, writer):
                writer.write(b"six")
                assert await reader.readexactly(3) == b"six"


async def test_a_client_that_does_not_read_blocks_the_server_and_uses_no_memory(folder: Path) -> None:
    written = 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        chunk = b"x" * 2**16
        while True:
            writer.write(chunk)
            await writer.drain()
            written += len(chunk)

    async with serving(floods) as port, forwarding(folder, port) as forwarder, contextlib.AsyncExitStack() as clients:
        before = forwarder.memory_kib
        for _ in range(20):
            sock = clients.enter_context(socket.socket(socket.AF_UNIX))
            sock.connect(str(forwarder.path))
        await settled(lambda: written)

        assert written > 0
        assert (
            forwarder.memory_kib - before < 20 * 2 * 16 + 2048
        )  # far below the 20 times 64 MiB that the servers could have sent


async def settled(value: Callable[[], int]) -> None:
    """Wait until ten consecutive readings of *value* are equal."""
    last, same = value(), 0
    async with asyncio.timeout(HANG_S):
        while same < 10 or last == 0:
            await asyncio.sleep(0.02)
            same = same + 1 if value() == last else 0
            last = value()


async def test_bytes_that_a_client_sent_before_it_left_arrive_at_a_server_that_reads_late(folder: Path) -> None:
    sent = 2**23  # more than all buffers on the path can hold
    go_on, over = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def reads_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await go_on.wait()
        got = 0
        while data := await reader.read(2**16):
            got += len(data)
        if got:  # the probe of the forwarder at its start also opened a connection
            over.set_result(got)

    async with serving(reads_late) as port, forwarding(folder, port) as forwarder:
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(str(forwarder.path))
            sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(client, b"x" * sent))
            await asyncio.wait({sending}, timeout=0.1)
            go_on.set()
            async with asyncio.timeout(HANG_S):
                await sending
        async with asyncio.timeout(HANG_S):
            assert await over == sent


async def test_a_connection_that_waits_for_its_reader_uses_no_cpu(folder: Path) -> None:
    async def never_reads(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with serving(never_reads) as port, forwarding(folder, port) as forwarder:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(forwarder.path))
            client.setblocking(False)
            await until(lambda: not _sends(client))  # now all buffers on the path are full
        # The client has disconnected while its bytes are still in the buffers.
        before = forwarder.cpu_ticks
        await asyncio.sleep(0.5)
        assert forwarder.cpu_ticks - before < 10


def _sends(client: socket.socket) -> bool:
    try:
        return client.send(b"x" * 2**16) > 0
    except BlockingIOError:
        return False


async def test_many_concurrent_connections_are_served(folder: Path) -> None:
    async with serving(echo) as port, forwarding(folder, port) as forwarder:

        async def talk(number: int) -> bytes:
            async with forwarder.connected() as (reader, writer):
                writer.write(b"%04d" % number)
                return await reader.readexactly(4)

        answers = await asyncio.gather(*(talk(number) for number in range(300)))

        assert answers == [b"%04d" % number for number in range(300)]
        await until(lambda: forwarder.open_files == RESTING_FILES)


async def test_connections_beyond_the_limit_of_descriptors_wait_for_a_free_descriptor(folder: Path) -> None:
    async with serving(echo) as port, forwarding(folder, port, files=32) as forwarder:

        async def talk(number: int) -> bytes:
            async with forwarder.connected() as (reader, writer):
                writer.write(b"%04d" % number)
                try:
                    return await reader.readexactly(4)
                except (asyncio.IncompleteReadError, ConnectionError):
                    return b""  # no descriptor was left for the connection to the server

        answers = await asyncio.gather(*(talk(number) for number in range(100)))

        assert [answer for number, answer in enumerate(answers) if answer not in (b"%04d" % number, b"")] == []
        await until(lambda: forwarder.open_files == RESTING_FILES)
        assert await talk(1) == b"0001"


async def test_the_forwarder_ends_on_sigterm_while_a_connection_is_open(folder: Path) -> None:
    async with (
        serving(echo) as port,
        forwarding(folder, port) as forwarder,
        forwarder.connected() as (reader, writer),
    ):
        writer.write(b"hello")
        await reader.readexactly(5)

        forwarder.process.send_signal(signal.SIGTERM)

        async with asyncio.timeout(HANG_S):
            assert await forwarder.process.wait() == 0
        assert await reader.read() == b""


@pytest.mark.parametrize("arguments", [[], ["--socket", "/tmp/x", "--port", "all"], ["--port", "1", "--socket", "/x"]])
async def test_wrong_arguments_print_the_usage(arguments: list[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(PROGRAM), *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()

    assert (process.returncode, said) == (1, b"usage: forwarder --socket PATH --port N\n")
