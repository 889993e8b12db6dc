"""Three machines on this one, as `scripts/swarm-lab` brings them up: real engines in one Swarm.

Under a name and in a net of its own, so that labs which others use may be up beside it.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.deadlines import scaled

PROJECT_DIR = Path(__file__).resolve().parents[2]
SCRIPT = PROJECT_DIR / "scripts" / "swarm-lab"
NODES = ("node1", "node2", "node3")
COMMAND_S = scaled(180.0)
"""The longest command: `up`, or `load` of some hundred MB; the script's own waits are shorter."""
ENGINE_S = int(scaled(100))
"""The longest answer, and the longest program in a container: machines may hear of each other's names 30 s late."""
ELECTION_S = scaled(60.0)
"""An election takes 10 to 20 s; a busy machine may need several."""
NO_LEADER = "The swarm does not have a leader"

LOCKS = Path("/var/lib/swarm-lab")
PLACES = 8
"""Labs that tests have at once, of all checkouts on this machine."""
LOG_LINES = 60

PROBE = """
command -v ip >/dev/null || exit 0  # the script installs it
ip link add name probe-br type bridge
ip link add name probe-va type veth peer name probe-vb
ip link add name probe-vx type vxlan id 7 dstport 4789 remote 192.0.2.1
"""
"""In namespaces that end with it."""


def expect_namespaces() -> None:
    """Skip what needs a lab where machines can't have networks of their own; in CI that is a failure."""
    command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "sh", "-ec", PROBE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(30), check=False)
    if done.returncode:
        why = f"no namespaces, bridge, veth or vxlan here: {done.stderr.strip()[:200]}"
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)


@dataclass(frozen=True)
class Lab:
    """A lab; its machines may be up or not."""

    name: str
    net: str
    nodes: int = 3
    lock: int | None = None
    """Descriptor of its lock, by which it is this process's and no other one may remove it."""
    directory: Path = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "directory", Path("/var/lib/swarm-lab") / self.name)

    def run(self, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Run the script and return what it printed."""
        done = self.attempt(*command, environ=environ)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def attempt(self, *command: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the script, whatever comes of it."""
        return subprocess.run(
            [SCRIPT, *command],
            env={**os.environ, **self.environ(), **(environ or {})},
            pass_fds=() if self.lock is None else (self.lock,),
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )

    def environ(self) -> dict[str, str]:
        """The variables by which the script knows it."""
        return {
            "SWARM_LAB_NAME": self.name,
            "SWARM_LAB_NET": self.net,
            "SWARM_LAB_DIR": str(self.directory),
            "SWARM_LAB_NODES": str(self.nodes),
            "SWARM_LAB_LOCK": "" if self.lock is None else str(self.lock),
        }

    def address(self, node: str) -> str:
        """Where a machine is, from this one and from the others."""
        return f"{self.net}.{10 + int(node.removeprefix('node'))}"

    def on(self, node: str, *command: str, environ: Mapping[str, str] | None = None) -> str:
        """Run the docker command on a machine's engine, from outside; what it printed.

        On a busy machine the managers miss each other's heartbeats and elect a leader again. A command that is refused
        meanwhile did nothing, so it is repeated, as an operator would.
        """
        deadline = time.monotonic() + ELECTION_S
        while True:
            done = subprocess.run(
                ["docker", "--host", self.url(node), *command],
                env={**{k: v for k, v in os.environ.items() if not k.startswith("DOCKER_")}, **(environ or {})},
                capture_output=True,
                text=True,
                timeout=COMMAND_S,
            )
            if done.returncode and NO_LEADER in done.stderr and time.monotonic() < deadline:
                time.sleep(1.0)
                continue
            assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
            return done.stdout.strip()

    def url(self, node: str) -> str:
        """Where a machine's engine is, from outside."""
        return f"unix://{self.directory}/{node}/docker.sock"

    @contextmanager
    def engine(self, node: str) -> Iterator[docker.APIClient]:
        """A machine's engine."""
        client = docker.APIClient(base_url=self.url(node), version="auto", timeout=ENGINE_S)
        try:
            yield client
        finally:
            client.close()

    def log(self, node: str) -> str:
        """The last lines that a machine's engine has logged."""
        lines = (self.directory / node / "dockerd.log").read_text(errors="replace").splitlines()
        return "\n".join([f"-- log of {node}", *lines[-LOG_LINES:]])

    def members(self, asked: str = "node1") -> dict[str, str]:
        """What the Swarm says of its machines, in the words of the one that is *asked*: state by name."""
        with self.engine(asked) as engine:
            # One that has just joined has no description yet.
            return {node["Description"].get("Hostname", ""): node["Status"]["State"] for node in engine.nodes()}


@contextmanager
def own_lab(*, nodes: int = 3) -> Iterator[Lab]:
    """A lab that is this process's alone, without machines; it is removed on leaving.

    It is the first one that no process has: what is left of a run that was killed is removed by the next one.
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
    """All that there is of a lab on this machine: namespaces, links, mounts, cgroups, processes, folders."""
    found = [f"namespace {entry.name}" for entry in _entries(Path("/run/netns")) if entry.name.startswith(lab.name)]
    found += [f"link {entry.name}" for entry in _entries(Path("/sys/class/net")) if entry.name.startswith(lab.name)]
    found += [f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if _is_of(lab, line)]
    # Not Path.glob: it raises where a group of a neighbor's container ends while it looks.
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
    """Return this machine's iptables rules, without counters; of networks that come and go only those of *lab*.

    Tests beside this one make networks of their own, whose bridges are named ``br-…``, and publish ports in them.
    """
    listed = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True, timeout=scaled(30)).stdout
    rules = (line for line in listed.splitlines() if line.startswith("-A"))
    return [rule for rule in rules if lab.net in rule or lab.name in rule or not re.search(r" br-|--dport", rule)]


def _is_of(lab: Lab, text: str) -> bool:
    return str(lab.directory) in text or f"/{lab.name}-" in text


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def read(path: Path) -> str:
    """A file of a process; nothing, if that has ended."""
    try:
        return path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it ended
        return ""


def sees(engine: docker.APIClient, image: str, *, network: str, program: str, arguments: list[Any]) -> str:
    """Run a Python *program* in a container of its own in *network*; what it printed."""
    container = engine.create_container(
        image,
        command=["-c", program, *map(str, arguments)],
        entrypoint=["python3"],
        host_config=engine.create_host_config(network_mode=network),
    )["Id"]
    try:
        engine.start(container)
        status = engine.wait(container, timeout=ENGINE_S)["StatusCode"]
        printed: str = engine.logs(container).decode()
        assert status == 0, printed
        return printed.strip()
    finally:
        engine.remove_container(container, force=True)
