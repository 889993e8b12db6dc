"""The decisions of the scripts, and the commands that they run; stubs replace the programs that they call."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import pytest

from tests.deadlines import COMMAND_S

PROJECT = Path(__file__).resolve().parents[3]
BASH = shutil.which("bash") or "bash"


def program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)


def run(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run *script* with only these environment variables."""
    command = [BASH, str(script), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=COMMAND_S)


# -- scripts/bubblewrap ------------------------------------------------------------------------------------------------


class Machine:
    """A simulated machine: a folder of programs that is its whole PATH."""

    def __init__(self, folder: Path, *, user: int, packages: bool) -> None:
        self.bwrap = folder / "bwrap"
        self._folder = folder
        self._asked = folder / "asked"
        program(folder / "id", f"echo {user}")
        if packages:
            install = f'printf "#!/bin/sh\\n" > "{self.bwrap}"; /bin/chmod 755 "{self.bwrap}"; echo noise'
            program(folder / "apt-get", f'echo "$*" >> "{self._asked}"', f'case "$*" in "install "*) {install} ;; esac')

    def run(self) -> subprocess.CompletedProcess[str]:
        return run(PROJECT / "scripts" / "bubblewrap", PATH=str(self._folder))

    def asked(self) -> list[str]:
        """Return the argument lines of all calls of apt-get."""
        return self._asked.read_text().splitlines() if self._asked.exists() else []


def test_root_installs_a_missing_bubblewrap_and_only_its_path_is_printed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=0, packages=True)

    done = machine.run()

    assert (done.returncode, done.stdout) == (0, f"{machine.bwrap}\n")
    update, install = machine.asked()
    assert update.startswith("update")
    assert install.startswith("install")
    assert install.endswith(" bubblewrap")


@pytest.mark.parametrize(("user", "packages"), [(1000, True), (0, False)], ids=["not root", "no apt-get"])
def test_without_root_or_apt_get_the_script_fails_and_asks_for_bubblewrap(
    tmp_path: Path, user: int, packages: bool
) -> None:
    machine = Machine(tmp_path, user=user, packages=packages)

    done = machine.run()

    assert (done.returncode, done.stdout, machine.asked()) == (1, "", [])
    assert done.stderr == "scripts/bubblewrap: no bwrap on the PATH: install bubblewrap >= 0.8\n"


def test_an_installed_bubblewrap_is_used(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=0, packages=True)
    program(machine.bwrap)

    done = machine.run()

    assert (done.returncode, done.stdout, machine.asked()) == (0, f"{machine.bwrap}\n", [])


# -- scripts/build-images ----------------------------------------------------------------------------------------------


def builds(folder: Path, **variables: str) -> dict[str, list[str]]:
    """Return the builds that scripts/build-images starts, in order: each image's name with its further arguments."""
    (folder / "scripts").mkdir()
    for name in ("build-images", "env-file"):
        shutil.copy(PROJECT / "scripts" / name, folder / "scripts" / name)
    program(folder / "scripts" / "build-image", f'echo "$*" >> "{folder}/built"')
    shutil.copy(PROJECT / "pyproject.toml", folder)
    for top in ("deploy", "env_images"):
        for file in (PROJECT / top).glob("*/Dockerfile"):
            copy = folder / file.relative_to(PROJECT)
            copy.parent.mkdir(parents=True)
            shutil.copy(file, copy)

    done = run(folder / "scripts" / "build-images", PATH=os.environ["PATH"], **variables)

    assert done.returncode == 0, done.stderr
    found = (line.split() for line in (folder / "built").read_text().splitlines())
    return {image: words for image, *words in found}


def bases(built: Mapping[str, list[str]]) -> set[str]:
    """Return the gateway's own images that other images are built from."""
    return {word.removeprefix("BASE=") for words in built.values() for word in words if word.startswith("BASE=")}


def test_with_a_tag_every_image_and_its_base_have_that_tag_and_no_image_has_another(tmp_path: Path) -> None:
    built = builds(tmp_path, IMAGE_TAG="mine")

    names = {file.parent.name for top in ("deploy", "env_images") for file in (PROJECT / top).glob("*/Dockerfile")}
    assert set(built) == {f"env-gateway/{name}:mine" for name in names}
    assert bases(built) == {"env-gateway/base:mine", "env-gateway/base-sandbox:mine"}
    assert [word for words in built.values() for word in words if "--tag" in word or ":latest" in word] == []
    order = list(built)
    assert order.index("env-gateway/base:mine") < order.index("env-gateway/base-sandbox:mine")
    assert order.index("env-gateway/base-sandbox:mine") < order.index("env-gateway/os:mine")


def test_without_a_tag_images_are_tagged_latest_and_with_the_version_of_the_project(tmp_path: Path) -> None:
    version = re.findall(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.M)[0]

    built = builds(tmp_path)

    assert bases(built) == {"env-gateway/base:latest", "env-gateway/base-sandbox:latest"}
    for image, words in built.items():
        name, _, tag = image.partition(":")
        assert (tag, f"--tag={name}:{version}" in words) == ("latest", True)


# -- scripts/compose-project and scripts/down --------------------------------------------------------------------------


class Checkout:
    """A copy of the project that uses an engine with the containers and volumes of one stack."""

    def __init__(self, folder: Path, engine: Path) -> None:
        (folder / "scripts").mkdir(parents=True)
        for name in ("scripts/compose-project", "scripts/down", "scripts/env-file", "compose.yaml"):
            shutil.copy(PROJECT / name, folder / name)
        self.folder = folder
        self._engine = engine

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self._engine}{os.pathsep}{os.environ['PATH']}"
        return run(self.folder / "scripts" / script, *arguments, PATH=path, **variables)

    def own(self, **variables: str) -> str:
        """Return the Compose project name with which `make up` starts this checkout."""
        done = self.run("compose-project", "--own", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def env(self) -> str:
        file = self.folder / ".env"
        return file.read_text() if file.exists() else ""


@dataclass(frozen=True)
class Engine:
    """A stub of the docker command that lists one stack's folders of containers and its volumes."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Engine:
        folder.mkdir()
        (folder / "folders").touch()
        (folder / "volumes").touch()
        program(
            folder / "docker",
            f'here="{folder}"',
            'named=$(sed -n "s/^COMPOSE_PROJECT_NAME=//p" .env 2>/dev/null)',
            'case "$*" in',
            '  "compose config") echo "name: ${COMPOSE_PROJECT_NAME:-${named:-env-gateway}}" ;;',
            '  "ps --all --filter label=com.docker.compose.project=env-gateway --format "*) cat "$here/folders" ;;',
            '  "volume inspect "*) for last; do :; done; grep -qxF "$last" "$here/volumes" && echo /nowhere ;;',
            '  *) echo "$*" >>"$here/asked" ;;',
            "esac",
        )
        return cls(folder)

    def has(self, *, containers_of: Iterable[Path] = (), volumes: Iterable[str] = ()) -> None:
        (self.folder / "folders").write_text("".join(f"{folder}\n" for folder in containers_of))
        (self.folder / "volumes").write_text("".join(f"{name}\n" for name in volumes))

    def asked(self) -> list[str]:
        """Return the calls of docker that are not queries."""
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine.make(tmp_path / "engine")


def test_checkouts_without_a_set_name_get_names_of_their_own_and_keep_them(tmp_path: Path, engine: Engine) -> None:
    one, two = (Checkout(tmp_path / name, engine.folder) for name in ("one", "two"))

    names = [one.own(), two.own()]  # neither stack runs, so the engine cannot show which checkout owns the fixed name

    assert names[0] != names[1]
    assert all(re.fullmatch(r"env-gateway-[0-9a-f]{8}", name) for name in names)
    engine.has(containers_of=[two.folder])
    assert [one.own(), two.own()] == names
    assert one.run("compose-project").stdout.strip() == names[0]
    assert one.env() == f"COMPOSE_PROJECT_NAME={names[0]}\n"


def test_a_stack_that_this_folder_ran_keeps_its_name_while_it_is_down(tmp_path: Path, engine: Engine) -> None:
    checkout = Checkout(tmp_path / "checkout", engine.folder)
    engine.has(containers_of=[checkout.folder])

    assert checkout.own() == "env-gateway"

    engine.has()
    assert checkout.own() == "env-gateway"


def test_a_checkout_does_not_take_the_name_of_a_stack_that_another_folder_shares(
    tmp_path: Path, engine: Engine
) -> None:
    checkout, other = (Checkout(tmp_path / name, engine.folder) for name in ("checkout", "other"))
    engine.has(containers_of=[checkout.folder, other.folder])

    assert checkout.own() != "env-gateway"


def test_volumes_alone_do_not_reserve_the_fixed_name_and_the_script_explains_how_to_keep_them(
    tmp_path: Path, engine: Engine
) -> None:
    checkout = Checkout(tmp_path / "checkout", engine.folder)
    engine.has(volumes=["env-gateway_state"])

    done = checkout.run("compose-project", "--own")

    assert re.fullmatch(r"env-gateway-[0-9a-f]{8}\n", done.stdout)
    assert "write COMPOSE_PROJECT_NAME=env-gateway into .env" in done.stderr


def test_a_name_that_is_set_is_used(tmp_path: Path, engine: Engine) -> None:
    checkout = Checkout(tmp_path / "checkout", engine.folder)

    assert checkout.own(COMPOSE_PROJECT_NAME="mine") == "mine"
    assert checkout.env() == ""
    (checkout.folder / ".env").write_text("COMPOSE_PROJECT_NAME=env-gateway\nGATEWAY_PORT=1\n")
    assert checkout.own() == "env-gateway"
    assert checkout.env() == "COMPOSE_PROJECT_NAME=env-gateway\nGATEWAY_PORT=1\n"


@pytest.mark.parametrize("is_up", [True, False], ids=["another folder's", "nothing but a volume"])
def test_down_without_a_name_refuses_a_stack_that_may_belong_to_another_folder(
    tmp_path: Path, engine: Engine, is_up: bool
) -> None:
    checkout, other = (Checkout(tmp_path / name, engine.folder) for name in ("checkout", "other"))
    engine.has(containers_of=[other.folder] if is_up else [], volumes=["env-gateway_workers"])

    done = checkout.run("down")

    assert (done.returncode, engine.asked()) == (1, [])
    assert "set COMPOSE_PROJECT_NAME=env-gateway" in done.stderr
    assert (str(other.folder) if is_up else "env-gateway_workers") in done.stderr


@pytest.mark.parametrize("variables", [{}, {"COMPOSE_PROJECT_NAME": "env-gateway"}], ids=["this folder's", "named"])
def test_down_removes_the_stack_of_this_folder_and_a_stack_that_is_named(
    tmp_path: Path, engine: Engine, variables: dict[str, str]
) -> None:
    checkout, other = (Checkout(tmp_path / name, engine.folder) for name in ("checkout", "other"))
    engine.has(containers_of=[other.folder if variables else checkout.folder], volumes=["env-gateway_workers"])

    done = checkout.run("down", **variables)

    assert done.returncode == 0, done.stderr
    assert engine.asked()[0] == "compose down --remove-orphans"
    assert engine.asked()[-1] == "volume rm --force env-gateway_workers"


def test_make_up_builds_nothing_without_a_name() -> None:
    """A failed substitution in an assignment before a command goes unnoticed, and the tag would be empty."""
    makefile = (PROJECT / "Makefile").read_text()

    (line,) = re.findall(r"^\t(.*IMAGE_TAG=.*)$", makefile, re.M)

    assert line == "project=$$(scripts/compose-project --own) && IMAGE_TAG=$$project scripts/build-images"


# -- scripts/swarm-lab -------------------------------------------------------------------------------------------------


def test_the_page_prints_the_addresses_that_the_lab_assigns(tmp_path: Path) -> None:
    source = (PROJECT / "scripts" / "swarm-lab").read_text()
    values = re.findall(r"^(?:NAME|NET|COUNT)=.*$", source, re.M)
    functions = re.findall(r"^(?:nodes|number|address)\(\) \{\n.*?^\}$", source, re.M | re.S)
    assert (len(values), len(functions)) == (3, 3)
    script = tmp_path / "script"
    script.write_text("\n".join([*values, *functions, 'for node in $(nodes); do address "$node"; done']))

    first, *others = run(script, PATH=os.environ["PATH"]).stdout.split()

    net = first.rpartition(".")[0]
    page = (PROJECT / "deploy" / "README.md").read_text()
    *middle, last = [other.removeprefix(net) for other in others]
    assert f"{', '.join([first, *middle])} and {last} " in page
    assert set(re.findall(rf"{re.escape(net)}\.\d+", page)) == {first}


@pytest.fixture
def machine() -> Iterator[Path]:
    """Yield the folder of a lab's machines. It is not a folder of pytest, because paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="eg-") as folder:
        yield Path(folder)


class LabScript:
    """A checkout with the lab's script, on a machine where stubs replace the engines and always succeed."""

    def __init__(self, folder: Path, machine: Path) -> None:
        self.folder = folder
        self._machine = machine
        (folder / "scripts").mkdir(parents=True)
        text = (PROJECT / "scripts" / "swarm-lab").read_text()
        assert "/var/lib/swarm-lab/" in text
        (folder / "scripts" / "swarm-lab").write_text(text.replace("/var/lib/swarm-lab/", f"{machine}/"))
        program(machine / "id", "echo 0")
        for name in ("ip", "dockerd"):
            program(machine / name)
        begun, found = machine / "engine-began", machine / "engine-was-found"
        program(
            machine / "docker",
            f'case "$*" in *version) [ -e "{begun}" ] && touch "{found}" ;; *info*) echo active ;; esac',
        )
        program(
            machine / "nsenter",
            f'readlink /proc/self/fd/* >"{machine}/inherited"',
            f'touch "{begun}"',
            # A stub that ended before the script found it would count as a failed start.
            f'for look in $(seq 600); do [ -e "{found}" ] || sleep 0.1; done',
        )

    def run(self, command: str, *arguments: str, lock: TextIO | None = None) -> subprocess.CompletedProcess[str]:
        """Run the script on a lab of one machine; *lock* is this process's open file of the lab's lock."""
        variables = {"PATH": f"{self._machine}{os.pathsep}{os.environ['PATH']}", "SWARM_LAB_NODES": "1"}
        fds = () if lock is None else (lock.fileno(),)
        variables["SWARM_LAB_LOCK"] = "".join(map(str, fds))
        return subprocess.run(
            [BASH, str(self.folder / "scripts" / "swarm-lab"), command, *arguments],
            env=variables,
            pass_fds=fds,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )


COMMANDS = [("up",), ("down",), ("kill", "node1"), ("start", "node1")]


def test_other_checkouts_may_not_touch_a_lab_until_it_is_down_or_its_checkout_is_gone(
    tmp_path: Path, machine: Path
) -> None:
    one, two = (LabScript(tmp_path / name, machine) for name in ("one", "two"))
    disk = machine / "swl" / "node1"
    assert one.run("up").returncode == 0

    for command in COMMANDS:
        refused = two.run(*command)
        assert (refused.returncode, disk.exists()) == (1, True)
        assert f"the lab swl belongs to checkout {one.folder}: take it down there" in refused.stderr
    assert one.run("down").returncode == 0
    assert not disk.exists()

    assert two.run("up").returncode == 0
    shutil.rmtree(two.folder)
    assert one.run("down").returncode == 0
    assert not disk.exists()


def test_a_lab_that_a_process_locked_is_refused_to_all_others_while_that_process_lives(
    tmp_path: Path, machine: Path
) -> None:
    one, two = (LabScript(tmp_path / name, machine) for name in ("one", "two"))
    with (machine / "swl.lock").open("a") as lock:
        assert one.run("up", lock=lock).returncode == 0

        for script in (one, two):  # a manual call in the same checkout is refused, too
            for command in COMMANDS:
                refused = script.run(*command)
                assert (refused.returncode, (machine / "swl" / "node1").exists()) == (1, True)
                assert f"the lab swl belongs to process {os.getpid()} of {one.folder}: " in refused.stderr
        assert one.run("kill", "node1", lock=lock).returncode == 0

    # The machines outlive the process. If they inherited its lock, the lab would stay locked permanently.
    assert "swl.lock" not in (machine / "inherited").read_text()
    assert two.run("down").returncode == 0
    assert not (machine / "swl").exists()


def test_a_descriptor_of_another_file_is_refused_as_a_lock(tmp_path: Path, machine: Path) -> None:
    script = LabScript(tmp_path / "one", machine)

    with (tmp_path / "another").open("a") as another:
        refused = script.run("down", lock=another)

    assert refused.returncode == 1
    assert f"not the number of a descriptor of {machine}/swl.lock" in refused.stderr
