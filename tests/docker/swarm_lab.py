"""Three machines on this one, as `scripts/swarm-lab` brings them up: real engines in one Swarm.

Each lab has its own name and network, so that other labs may be up next to it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.deadlines import COMMAND_S, HANG_S
from tests.fakes.eventually import eventually_now

PROJECT_DIR = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT_DIR / "scripts" / "swarm-lab"
NODES = ("node1", "node2", "node3")
NO_LEADER = "The swarm does not have a leader"
"""An engine's refusal while the managers elect. The command had no effect."""
TIMED_OUT = ("context deadline exceeded", "code = Unavailable", "code = DeadlineExceeded")
"""An engine's answers when the leader to which it passed a command was lost. The command may have had its effect."""
NOT_REPEATABLE = {"create", "rm"}

LOCKS = Path("/var/lib/swarm-lab")
PLACES = 8
"""Number of labs that tests may have concurrently, over all checkouts on this machine."""
LOG_LINES = 60

PROBE = """
command -v ip >/dev/null || exit 0  # the script installs it
ip link add name probe-br type bridge
ip link add name probe-va type veth peer name probe-vb
ip link add name probe-vx type vxlan id 7 dstport 4789 remote 192.0.2.1
"""
"""A shell script, run in namespaces that end with it."""


def expect_namespaces() -> None:
    """Skip a test that needs a lab where machines cannot have networks of their own. With CI set, fail instead."""
    command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-ec", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    if done.returncode:
        why = f"no namespaces, bridge, veth or vxlan here: {done.stderr.strip()[:200]}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)


@dataclass(frozen=True)
class Lab:
    """A lab. Its machines may be up or down."""

    name: str
    net: str
    nodes: int = 3
    lock: int | None = None
    """Descriptor of the lab's lock. While this process holds it, no other process may remove the lab."""
    directory: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path("/var/lib/swarm-lab") / self.name)

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Run the script, assert that it succeeds, and return its output."""
        done = self.attempt(*command, environ=environ)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def attempt(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the script and return its result, even if it fails."""
        return subprocess.run(
            [SCRIPT, *command],
            env={**os.environ, **self.environ(), **(environ or {})},
            pass_fds=() if self.lock is None else (self.lock,),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )

    def environ(self) -> dict[str, str]:
        """The variables that name this lab to the script."""
        return {
            "SWARM_LAB_NAME": self.name,
            "SWARM_LAB_NET": self.net,
            "SWARM_LAB_DIR": str(self.directory),
            "SWARM_LAB_NODES": str(self.nodes),
            "SWARM_LAB_LOCK": "" if self.lock is None else str(self.lock),
        }

    def address(self, node: str) -> str:
        """The address of a machine, for this machine and the others."""
        return f"{self.net}.{10 + int(node.removeprefix('node'))}"

    def on(self, node: str, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Run the docker command on a machine's engine, from outside, and return its output.

        On a busy machine the managers miss each other's heartbeats and elect a leader again. This method repeats a
        command that failed because of it, as an operator would, if its repetition does no harm.
        """
        lost = (NO_LEADER,) if NOT_REPEATABLE & set(command) else (NO_LEADER, *TIMED_OUT)
        deadline = time.monotonic() + HANG_S
        while True:
            done = subprocess.run(
                ["docker", "--host", self.url(node), *command],
                env={**{k: v for k, v in os.environ.items() if not k.startswith("DOCKER_")}, **(environ or {})},
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
            )
            if done.returncode and any(words in done.stderr for words in lost) and time.monotonic() < deadline:
                time.sleep(1.0)
                continue
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            return done.stdout.strip()

    def url(self, node: str) -> str:
        """The URL of a machine's engine, from outside."""
        return f"unix://{self.directory}/{node}/docker.sock"

    @contextmanager
    def engine(self, node: str) -> Iterator[docker.APIClient]:
        """A client of a machine's engine."""
        client = docker.APIClient(base_url=self.url(node), version="auto", timeout=HANG_S)
        try:
            yield client
        finally:
            client.close()

    def log(self, node: str) -> str:
        """The last lines of the log of a machine's engine."""
        lines = (self.directory / node / "dockerd.log").read_text(errors="replace").splitlines()
        return "\n".join([f"-- log of {node}", *lines[-LOG_LINES:]])

    def members(self, asked: str = "node1") -> dict[str, str]:
        """Return the state of each machine by name, as the machine *asked* reports it."""
        return {name: state for name, state, _ in self._listed(asked)}

    def leaders(self, asked: str) -> set[str]:
        """Return the machine that leads the managers, as the machine *asked* reports it. Empty while they elect."""
        return {name for name, _, role in self._listed(asked) if role == "Leader"}

    def _listed(self, asked: str) -> list[tuple[str, str, str]]:
        """Return each machine's name, state and role. A machine that has just joined has the name ``Unknown``."""
        words = "{{.Hostname}}|{{.Status}}|{{.ManagerStatus}}"
        rows = [line.split("|") for line in self.on(asked, "node", "ls", "--format", words).splitlines()]
        return [(name, state.lower(), role) for name, state, role in rows]


@contextmanager
def own_lab(*, nodes: int = 3) -> Iterator[Lab]:
    """Yield a lab without machines that only this process uses. It is removed on leaving.

    It is the first lab that no process locks. The next run therefore removes the remains of a killed run.
    """
    LOCKS.mkdir(parents=True, exist_ok=True)
    refusals = []
    for place in range(PLACES):
        name = f"swtst{place}"
        with (LOCKS / f"{name}.lock").open("a") as lock:
            lab = Lab(name, f"198.18.{100 + place}", nodes, lock.fileno())
            tried = lab.attempt("down")
            if tried.returncode and "belongs to" in tried.stderr:
                refusals.append(tried.stderr)
                continue
            assert tried.returncode == 0, tried.stderr
            try:
                yield lab
            finally:
                lab.run("down")
            return
    raise AssertionError(refusals)


def left_of(lab: Lab) -> list[str]:
    """Return everything of a lab on this machine: namespaces, links, mounts, cgroups, processes, folders."""
    found = [f"namespace {entry.name}" for entry in _entries(Path("/run/netns")) if entry.name.startswith(lab.name)]
    found += [f"link {entry.name}" for entry in _entries(Path("/sys/class/net")) if entry.name.startswith(lab.name)]
    found += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if _is_of(lab, line)]
    # Not Path.glob: it raises if a cgroup of an unrelated container disappears during the scan.
    groups = (Path(parent, name) for parent, names, _ in os.walk("/sys/fs/cgroup") for name in names)
    found += [f"cgroup {group}" for group in groups if group.name.startswith(f"{lab.name}-node")]
    for process in Path("/proc").glob("[0-9]*"):
        said = read(process / "cmdline") + read(process / "cgroup")
        if _is_of(lab, said):
            found.append(f"process {process.name} {read(process / 'comm').strip()}")
    if lab.directory.exists():
        found.append(f"folder {lab.directory}")
    return found


def filter_rules(lab: Lab) -> list[str]:
    """Return this machine's iptables rules without counters. Of networks that come and go, only those of *lab*.

    Concurrent tests create their own networks, whose bridges are named ``br-…``, and publish ports in them.
    """
    listed = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True, timeout=COMMAND_S).stdout
    rules = (line for line in listed.splitlines() if line.startswith("-A"))
    return [rule for rule in rules if lab.net in rule or lab.name in rule or not re.search(r" br-|--dport", rule)]


def _is_of(lab: Lab, text: str) -> bool:
    return str(lab.directory) in text or f"/{lab.name}-" in text


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def read(path: Path) -> str:
    """Return a file of a process, or an empty text if the process has ended."""
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # the process ended
        return ""


def _started(engine: docker.APIClient, image: str, network: str, command: list[str]) -> str:
    """Start Python with these arguments. Raises ``AssertionError`` while the engine gives the network up.

    An engine gives an overlay network up after its last container in it has ended, which takes a moment.
    """
    host = engine.create_host_config(network_mode=network)
    container: str = engine.create_container(image, command=command, entrypoint=["python3"], host_config=host)["Id"]
    try:
        engine.start(container)
    except docker.errors.NotFound as error:
        engine.remove_container(container, force=True)
        raise AssertionError(error) from error
    return container


def sees(engine: docker.APIClient, image: str, *, network: str, program: str, arguments: list[Any]) -> str:
    """Run a Python *program* in its own container in *network*. Return its output."""
    container = eventually_now(partial(_started, engine, image, network, ["-c", program, *map(str, arguments)]))
    try:
        status = engine.wait(container, timeout=HANG_S)["StatusCode"]
        printed: str = engine.logs(container).decode()
        assert status == 0, printed
        return printed.strip()
    finally:
        engine.remove_container(container, force=True)
