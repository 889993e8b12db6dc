"""`deploy/swarm/stack.yaml`, read and not run: it agrees with the settings and the README."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.backends.docker.container import LABEL_INSTANCE, LABEL_OWNER
from gateway.settings import PREFIX, Settings, load
from gateway.settings.keys import parse_keys
from tests.deadlines import COMMAND_S
from tests.docker.swarm_lab import PROJECT_DIR

TEXT = (PROJECT_DIR / "deploy" / "swarm" / "stack.yaml").read_text()
README = (PROJECT_DIR / "deploy" / "README.md").read_text()
SECRETS = "/run/secrets"
VARIABLE = re.compile(r"\$\{([A-Z_]+):-([^}]*)\}")
STACK_NAME = '{{index .Service.Labels "com.docker.stack.namespace"}}'
"""Swarm replaces this with the name given to ``docker stack deploy``. test_swarm_lab_stack.py checks it."""


def read(**given: str) -> dict[str, Any]:
    """Return the parsed file, with *given* or the defaults in place of its variables."""
    read: dict[str, Any] = yaml.safe_load(VARIABLE.sub(lambda found: given.get(found[1], found[2]), TEXT))
    return read


def in_stack(name: str, value: object) -> str:
    """Return *value* of the file as a task of the stack *name* gets it."""
    return str(value).replace(STACK_NAME, name)


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = read()["services"][name]
    return found


def seconds(period: str) -> float:
    assert period.endswith("s"), period
    return float(period.removesuffix("s"))


def targets(name: str) -> set[str]:
    return {secret["target"] for secret in service(name)["secrets"]}


@pytest.mark.parametrize("name", ["gateway", "node"])
def test_the_variables_of_a_service_make_valid_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    for variable in [variable for variable in os.environ if variable.startswith(PREFIX)]:
        monkeypatch.delenv(variable)
    for secret in targets(name):
        (tmp_path / secret).write_text("trainer:trainers-key" if "trainer" in secret else "operator:operators-key")
    for variable, value in service(name)["environment"].items():
        monkeypatch.setenv(variable, in_stack("mine", value).replace(SECRETS, str(tmp_path)))

    settings = load().checked()

    assert settings.instance == "mine"
    assert settings.socket_volume == "mine_workers"
    if name == "gateway":
        assert parse_keys(settings.trainer_keys) == {"trainer": "trainers-key"}
        assert parse_keys(settings.operator_keys) == {"operator": "operators-key"}
        assert settings.secret is not None


@pytest.mark.parametrize("name", ["gateway", "node"])
def test_the_files_of_the_cluster_are_among_the_secrets_of_the_service(name: str) -> None:
    files = [value for variable, value in service(name)["environment"].items() if "_CLUSTER_" in variable]

    assert len(files) == 3
    assert {file.removeprefix(f"{SECRETS}/") for file in files} <= targets(name)


def test_a_node_gets_no_secret_of_a_gateway() -> None:
    sources = {secret["source"] for secret in service("node")["secrets"]}

    assert sources == {"ca", "node-cert", "node-key"}


def test_a_stopped_gateway_or_node_gets_the_time_that_it_needs() -> None:
    gateway, node = service("gateway"), service("node")
    notice_s = float(gateway["environment"]["GATEWAY_DRAIN_NOTICE_S"])

    assert notice_s >= 15  # as long as clients keep an idle connection
    assert seconds(gateway["stop_grace_period"]) > notice_s + 2 * Settings.model_fields["drain_s"].default
    waits = [float(node["environment"][name]) for name in ("GATEWAY_DRAIN_NOTICE_S", "GATEWAY_NODE_DRAIN_S")]
    assert seconds(node["stop_grace_period"]) > sum(waits)


def test_only_the_node_has_the_engines_socket_and_only_the_gateway_a_port_and_a_way_out() -> None:
    stack = read()
    services = stack["services"]

    assert [name for name, one in services.items() if "docker.sock" in str(one.get("volumes"))] == ["node"]
    assert [name for name, one in services.items() if "ports" in one] == ["gateway"]
    for name in ("node", "redis"):
        (network,) = services[name]["networks"]
        assert stack["networks"][network] == {"internal": True}
    assert set(services["node"]["networks"]).isdisjoint(services["redis"]["networks"])


@pytest.mark.parametrize("name", ["gateway", "node", "redis"])
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    one = service(name)

    assert one["read_only"] is True
    assert one["cap_drop"] == ["ALL"]
    assert one.get("cap_add", []) == (["DAC_OVERRIDE"] if name == "node" else [])
    assert {"memory", "pids"} <= one["deploy"]["resources"]["limits"].keys()


def test_gateways_and_nodes_agree_with_any_name_of_the_stack() -> None:
    services = read(GATEWAY_ENVIRONMENTS="math")["services"]
    gateway, node = (services[name]["environment"] for name in ("gateway", "node"))

    for name in ("GATEWAY_INSTANCE", "GATEWAY_SOCKET_VOLUME", "GATEWAY_ENVIRONMENTS"):
        assert gateway[name] == node[name]


@pytest.mark.parametrize("name", ["gateway", "node"])
def test_two_stacks_with_default_settings_share_neither_labels_nor_volumes(name: str) -> None:
    stack = read()
    variables = stack["services"][name]["environment"]
    instances, volumes = (
        [in_stack(each, variables[variable]) for each in ("one", "two")]
        for variable in ("GATEWAY_INSTANCE", "GATEWAY_SOCKET_VOLUME")
    )

    assert instances == ["one", "two"]
    assert volumes == ["one_workers", "two_workers"]
    # Swarm puts the stack's name before a volume without a name, as the setting assumes for `workers`.
    assert stack["volumes"] == {"redis": {}, "node": {}, "step-log": {}, "workers": {}}
    assert "workers:/run/gateway/workers" in stack["services"]["node"]["volumes"]


def test_the_readme_creates_every_secret_and_one_variable_renews_all_but_the_owners() -> None:
    secrets = read(SECRETS="7")["secrets"]
    made = set(re.findall(r"(?:^|\| )secret ([a-z-]+) ", README, re.M))

    assert set(secrets) == made
    assert {secret["name"] for secret in secrets.values()} == {
        f"env-gateway-{name}-{'1' if name == 'secret' else '7'}" for name in made
    }
    assert read(OWNER_SECRET="2")["secrets"]["secret"]["name"] == "env-gateway-secret-2"


def test_the_readme_removes_a_former_owners_workers_by_their_labels() -> None:
    (command,) = re.findall(r"^docker ps .*\n.*xargs .*docker rm .*$", README, re.M)

    assert f"--filter label={LABEL_INSTANCE}=env-gateway " in command
    assert f"--filter label={LABEL_OWNER}=" in command


def test_the_head_of_the_file_names_every_variable() -> None:
    head = TEXT[: TEXT.index("\nversion:")]

    assert {found[1] for found in VARIABLE.finditer(TEXT) if found[1] not in head} == set()


def test_keys_that_the_readme_creates_are_readable_by_their_owner_only_and_ignored_by_git(
    tmp_path: Path,
) -> None:
    (commands,) = re.findall(r"## 4\. Certificates and secrets\n\n```sh\n(.*?)```", README, re.DOTALL)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "docker").write_text('#!/bin/sh\n[ "$1" != run ] || mkdir cluster-certs\ncat >/dev/null\n')
    (programs / "docker").chmod(0o755)
    (programs / "openssl").write_text("#!/bin/sh\necho 0123\n")
    (programs / "openssl").chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"

    subprocess.run(
        ["bash", "-ec", f"umask 022\n{commands}"],
        cwd=tmp_path,
        env={"PATH": path, "GATEWAY_IMAGE": "x"},
        stdin=subprocess.DEVNULL,
        check=True,
        timeout=COMMAND_S,
    )
    made = [path for path in tmp_path.iterdir() if path != programs]

    assert sorted(path.name for path in made) == ["cluster-certs", "operator.key", "trainer.key"]
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made] == [0, 0, 0]
    names = ["cluster-certs/ca-key.pem", "operator.key", "trainer.key"]
    ignored = subprocess.run(
        ["git", "check-ignore", *names], cwd=PROJECT_DIR, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert ignored.stdout.split() == names


@pytest.mark.skipif(os.geteuid() != 0, reason="the lab needs root")
def test_the_lab_saves_images_of_this_machines_engine_even_if_docker_host_names_another(tmp_path: Path) -> None:
    programs, calls = tmp_path / "bin", tmp_path / "calls"
    programs.mkdir()
    (tmp_path / "lab").mkdir()
    (tmp_path / "scripts").mkdir()  # a copy: only one process of a script file runs at a time
    script = shutil.copy(PROJECT_DIR / "scripts" / "swarm-lab", tmp_path / "scripts")
    (programs / "docker").write_text(f'#!/bin/sh\necho "${{DOCKER_HOST:-own}} $*" >>{calls}\n')
    (programs / "docker").chmod(0o755)
    variables = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "DOCKER_HOST": "unix:///another.sock",
        "SWARM_LAB_NAME": "none",
        "SWARM_LAB_DIR": str(tmp_path / "lab"),
    }

    subprocess.run([script, "load", "an-image"], env=variables, check=True, timeout=COMMAND_S)

    said = calls.read_text().splitlines()
    assert next(line for line in said if " save " in line).startswith("own save --output ")
    assert sum(" load " in line for line in said) == 3
    assert not [line for line in said if line.startswith("unix:")]
