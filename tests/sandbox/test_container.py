"""Sandboxes in a worker's container: two capabilities, no new privileges, a seccomp profile, no network."""

import json
import os
import secrets
import shutil
import tarfile
from pathlib import Path

import docker
import pytest
from envserver.sandbox import Box

from tests.deadlines import HANG_S

IMAGE = "env-gateway/base:latest"
ENVSERVER = Path(__file__).parents[2] / "env_images" / "base"
PROFILE = (ENVSERVER.parents[1] / "gateway" / "backends" / "docker" / "sandbox-seccomp.json").read_text()
"""The profile that ships with the image: it allows the needed system calls and refuses the others."""
_RIGHTS = "+setuid,+setgid"


DOCKERFILE = f"""
FROM {IMAGE}
USER 0
COPY bwrap /usr/bin/bwrap
COPY envserver /srv/envserver/envserver
COPY driver /srv/driver
ADD box.tar /srv/box
"""


def build(client: docker.APIClient, box: Box, bubblewrap: str, folder: Path) -> str:
    """Build an image with a box in it. The context is sent to the engine, which need not see this machine's files."""
    with tarfile.open(folder / "box.tar", "w") as tar:
        tar.add(box.path, arcname=".")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    with tarfile.open(folder / "context.tar", "w") as tar:
        tar.add(folder / "box.tar", arcname="box.tar")
        tar.add(folder / "Dockerfile", arcname="Dockerfile")
        tar.add(os.path.realpath(bubblewrap), arcname="bwrap")
        tar.add(ENVSERVER / "envserver", arcname="envserver")
        tar.add(Path(__file__).parent, arcname="driver")
    tag = f"env-gateway/sandbox-test:{secrets.token_hex(4)}"
    with (folder / "context.tar").open("rb") as context:
        for step in client.build(fileobj=context, custom_context=True, tag=tag, rm=True, decode=True):
            assert "error" not in step, step
    return tag


def host_config(client: docker.APIClient) -> dict[str, object]:
    config: dict[str, object] = client.create_host_config(
        cap_drop=["ALL"],
        cap_add=["SETUID", "SETGID"],
        security_opt=["no-new-privileges", f"seccomp={PROFILE}"],
        network_mode="none",
        read_only=True,
        tmpfs={"/work": "exec,mode=1777"},
        mem_limit="1g",
        pids_limit=1024,
        nano_cpus=1_000_000_000,
    )
    # Unmasked: with masked paths the kernel refuses a fresh /proc in a nested PID namespace.
    config["MaskedPaths"] = []
    config["ReadonlyPaths"] = []
    return config


def test_a_hardened_container_opens_sandboxes(box: Box, tmp_path: Path) -> None:
    bubblewrap = shutil.which("bwrap")
    assert bubblewrap is not None
    client = docker.APIClient(timeout=HANG_S)
    command = [
        *("setpriv", "--reuid", "100000", "--regid", "100000", "--clear-groups"),
        *("--inh-caps", _RIGHTS, "--ambient-caps", _RIGHTS),
        *("python3", "/srv/driver/driver.py", "/srv/box", "/work"),
    ]
    image = build(client, box, bubblewrap, tmp_path)
    container = client.create_container(
        image,
        command,
        user="0",
        environment={"PYTHONPATH": "/srv/envserver"},
        host_config=host_config(client),
    )["Id"]
    try:
        client.start(container)
        status = client.wait(container, timeout=HANG_S)["StatusCode"]
        words = client.logs(container, stdout=True, stderr=True).decode()
    finally:
        client.remove_container(container, force=True)
        client.remove_image(image, force=True)
        client.close()

    assert status == 0, words
    facts = json.loads(words.splitlines()[-1])
    assert facts["uid"] == 100_000
    assert (facts["setuid"], facts["kernel"]) == (True, True)
    assert facts["id"] == "0\njack\nmade"
    assert "No space left" in facts["disk"]
    assert "Read-only file system" in facts["core_pattern"]
    assert "sysrq-trigger: " in facts["sysrq"]  # denied or missing
    assert "permission denied" in facts["mount"].lower()
    assert facts["processes"] in ("3", "4")  # its init, bash, ls and wc, one of which may have ended
    assert facts["network"] == "1"
    assert (facts["niceness"], facts["judged"]) == ("19", "0")
    assert (facts["bomb"], facts["hog"], facts["after"]) == ("pids", "memory", "fine")


pytestmark = [pytest.mark.docker]
