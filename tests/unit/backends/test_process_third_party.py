"""Third-party servers as local processes: their assigned port, and their end together with the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.backends.process import ProcessBackend
from gateway.backends.process_io import PORTS, free_port, is_program, with_port
from gateway.core.environment import Environment, Server
from gateway.core.errors import StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from tests.fakes.eventually import until

SLEEPER = "\nimport time\nwhile True: time.sleep(1)"
TELLS = "import json, os, sys; open('part', 'w').write(json.dumps([sys.argv[1:], dict(os.environ)]))" + (
    "; os.rename('part', 'out')" + SLEEPER
)


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
async def backend(sockets: Path) -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend(
        socket_dir=sockets,
        sandbox_dir=sockets / "sandboxes",
        stop_grace_s=20,
        environ={"PATH": os.environ["PATH"], "GATEWAY_SECRET": "s3cret"},
    )
    yield made
    await made.aclose()


def running(folder: Path, *command: str, variables: dict[str, str] | None = None) -> Environment:
    return Environment(
        name=EnvironmentName("theirs"),
        image="none",
        directory=folder,
        command=command,
        server=Server(port=8000),
        variables=variables or {},
    )


def worker(environment: Environment, id: str = "w1") -> Worker:
    return Worker(id=WorkerId(id), environment=environment.name, digest=environment.digest(), slots=1)


async def told(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the arguments and environment variables that the server received."""
    await until((folder / "out").exists)
    arguments, variables = json.loads((folder / "out").read_text())
    return arguments, variables


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_the_port_is_in_the_servers_command_and_in_a_variable(
    backend: ProcessBackend, sockets: Path, tmp_path: Path
) -> None:
    environment = running(
        tmp_path,
        "python3",
        "-c",
        TELLS,
        "--port",
        "{port}",
        "--url=http://127.0.0.1:{port}/{other}",
        variables={"COLOUR": "green", "PORT": "1"},
    )

    address = await backend.start(worker(environment), environment)

    arguments, variables = await told(tmp_path)
    port = address.removeprefix("tcp:127.0.0.1:")
    assert arguments == ["--port", port, f"--url=http://127.0.0.1:{port}/{{other}}"]
    assert (variables["PORT"], variables["COLOUR"], variables["HOME"]) == (port, "green", str(sockets / "w1"))
    assert "s3cret" not in variables.values()
    assert [name for name in variables if name.startswith(("ENVSERVER_", "GATEWAY_"))] == []
    assert [found.address for found in await backend.found()] == [address]


async def test_a_missing_program_is_a_failed_start_that_leaves_nothing_behind(
    backend: ProcessBackend, sockets: Path, tmp_path: Path
) -> None:
    for program in ("no-such-program", "./no-such-program", "/no/such/program"):
        environment = running(tmp_path, program, "{port}")

        with pytest.raises(StartFailed, match=f"cannot run {program}"):
            await backend.start(worker(environment), environment)

        assert (os.listdir(sockets), await backend.found()) == ([], [])


async def test_a_program_next_to_the_environments_file_is_found(backend: ProcessBackend, tmp_path: Path) -> None:
    (tmp_path / "serve").write_text(f'#!/bin/sh\nexec {sys.executable} -c "$PROGRAM" $1\n')
    (tmp_path / "serve").chmod(0o755)
    environment = running(tmp_path, "./serve", "{port}", variables={"PROGRAM": TELLS})

    address = await backend.start(worker(environment), environment)

    arguments, _ = await told(tmp_path)
    assert address == f"tcp:127.0.0.1:{arguments[0]}"


async def test_third_party_servers_of_a_killed_gateway_end(sockets: Path, tmp_path: Path) -> None:
    program = "import os; open('part', 'w').write(str(os.getpid())); os.rename('part', 'out')" + SLEEPER
    gateway = f"""
        import asyncio, pathlib
        from gateway.backends.process import ProcessBackend
        from gateway.core.environment import Environment, Server
        from gateway.core.worker import Worker
        sockets, folder = pathlib.Path({str(sockets)!r}), pathlib.Path({str(tmp_path)!r})
        environment = Environment(
            name="theirs", image="none", directory=folder, command=("python3", "-c", {program!r}), server=Server(port=1)
        )
        worker = Worker(id="w1", environment="theirs", digest="d", slots=1)
        async def main():
            await ProcessBackend(socket_dir=sockets, sandbox_dir=sockets / "boxes").start(worker, environment)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(gateway))
    await until((tmp_path / "out").exists)
    pid = int((tmp_path / "out").read_text())
    assert lives(pid)

    process.kill()
    await process.wait()

    await until(lambda: not lives(pid))


async def test_ten_concurrent_starts_have_a_port_each(backend: ProcessBackend, tmp_path: Path) -> None:
    program = "import socket, sys; socket.create_server(('127.0.0.1', int(sys.argv[1])))" + SLEEPER
    environment = running(tmp_path, "python3", "-c", program, "{port}")

    workers = [worker(environment, f"w{number}") for number in range(10)]
    addresses = await asyncio.gather(*(backend.start(one, environment) for one in workers))

    assert len(set(addresses)) == 10


async def test_the_port_of_a_stopped_server_is_released(backend: ProcessBackend, tmp_path: Path) -> None:
    environment = running(tmp_path, "python3", "-c", SLEEPER)
    await backend.start(worker(environment), environment)
    assert len(backend._ports) == 1

    await backend.stop(WorkerId("w1"))

    assert backend._ports == {}


def test_a_free_port_is_neither_used_nor_reserved() -> None:
    with socket.create_server(("127.0.0.1", free_port())):
        pass
    asked: list[int] = []

    class FirstTwo(set[int]):
        """A set of reserved ports that contains the first two ports that are looked up."""

        def __contains__(self, port: object) -> bool:
            assert isinstance(port, int)
            asked.append(port)
            return len(asked) <= 2

    assert free_port(but=FirstTwo()) == asked[2]


def test_a_port_is_not_one_that_the_kernel_gives_to_connections() -> None:
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()

    assert free_port() in PORTS
    assert PORTS.stop <= int(ephemeral[0])


def test_without_a_free_port_the_start_fails_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", free_port())) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr("gateway.backends.process_io.PORTS", range(port, port + 1))
        monkeypatch.setattr("gateway.backends.process_io.PORTS_TRIED", 1)

        with pytest.raises(StartFailed, match=f"no port from {port} to {port} is free"):
            free_port()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("serve", "{port}"), ("serve", "80")),
        (("serve", "--port={port}", "{port}{port}"), ("serve", "--port=80", "8080")),
        (("serve", "{ port }", "{}", "{ports}"), ("serve", "{ port }", "{}", "{ports}")),
        ((), ()),
    ],
)
def test_only_port_in_braces_is_replaced(words: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert with_port(words, 80) == expected


def test_programs_are_searched_in_the_servers_folder_and_on_its_path(tmp_path: Path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "tool").chmod(0o755)

    assert is_program("./tool", tmp_path, "/nowhere")
    assert is_program("tool", Path("/"), str(tmp_path))
    assert is_program(sys.executable, tmp_path, "/nowhere")
    assert not is_program("tool", tmp_path, "/nowhere")
    assert not is_program("./tool", Path("/"), str(tmp_path))
