"""Scripts, with stubs in the place of what they call: what they decide, and what they ask for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.deadlines import scaled

PROJECT = Path(__file__).resolve().parents[2]
BASH = shutil.which("bash") or "bash"


def program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)


def run(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run *script* with these variables and no others."""
    command = [BASH, str(script), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=scaled(60))


# -- scripts/bubblewrap ------------------------------------------------------------------------------------------------


class Machine:
    """A machine that is a folder of programs: all that there is on its PATH."""

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
        """What packages were asked for."""
        return self._asked.read_text().splitlines() if self._asked.exists() else []


def test_bubblewrap_that_is_missing_is_added_by_root_and_its_path_is_all_that_is_printed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=0, packages=True)

    done = machine.run()

    assert (done.returncode, done.stdout) == (0, f"{machine.bwrap}\n")
    update, install = machine.asked()
    assert update.startswith("update")
    assert install.startswith("install")
    assert install.endswith(" bubblewrap")


@pytest.mark.parametrize(("user", "packages"), [(1000, True), (0, False)], ids=["not root", "no apt-get"])
def test_who_cannot_add_bubblewrap_is_told_to(tmp_path: Path, user: int, packages: bool) -> None:
    machine = Machine(tmp_path, user=user, packages=packages)

    done = machine.run()

    assert (done.returncode, done.stdout, machine.asked()) == (1, "", [])
    assert done.stderr == "scripts/bubblewrap: no bwrap on the PATH: install bubblewrap >= 0.8\n"


def test_bubblewrap_that_is_there_is_taken(tmp_path: Path) -> None:
    machine = Machine(tmp_path, user=0, packages=True)
    program(machine.bwrap)

    done = machine.run()

    assert (done.returncode, done.stdout, machine.asked()) == (0, f"{machine.bwrap}\n", [])


# -- scripts/build-images ----------------------------------------------------------------------------------------------


def builds(folder: Path, **variables: str) -> dict[str, list[str]]:
    """What scripts/build-images asks to be built, in its order: for each image's name all words after it."""
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
    """The images of ours that others are built from."""
    return {word.removeprefix("BASE=") for words in built.values() for word in words if word.startswith("BASE=")}


def test_with_a_tag_every_image_and_what_it_is_built_from_have_it_and_no_other_image_is_tagged(tmp_path: Path) -> None:
    built = builds(tmp_path, IMAGE_TAG="mine")

    names = {file.parent.name for top in ("deploy", "env_images") for file in (PROJECT / top).glob("*/Dockerfile")}
    assert set(built) == {f"env-gateway/{name}:mine" for name in names}
    assert bases(built) == {"env-gateway/base:mine", "env-gateway/base-sandbox:mine"}
    assert [word for words in built.values() for word in words if "--tag" in word or ":latest" in word] == []
    order = list(built)
    assert order.index("env-gateway/base:mine") < order.index("env-gateway/base-sandbox:mine")
    assert order.index("env-gateway/base-sandbox:mine") < order.index("env-gateway/os:mine")


def test_without_a_tag_images_are_the_latest_and_have_the_projects_version(tmp_path: Path) -> None:
    version = re.findall(r'^version = "(.+)"$', (PROJECT / "pyproject.toml").read_text(), re.M)[0]

    built = builds(tmp_path)

    assert bases(built) == {"env-gateway/base:latest", "env-gateway/base-sandbox:latest"}
    for image, words in built.items():
        name, _, tag = image.partition(":")
        assert (tag, f"--tag={name}:{version}" in words) == ("latest", True)


# -- scripts/swarm-lab -------------------------------------------------------------------------------------------------


def test_the_addresses_of_the_lab_that_are_printed_are_those_that_it_gives(tmp_path: Path) -> None:
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
