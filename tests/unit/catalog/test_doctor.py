"""What the doctor finds on a machine with and without the needs of environments."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog import doctor
from gateway.catalog.catalog import Catalog
from gateway.catalog.doctor import Finding, Status, examine, failures
from gateway.core.environment import Isolation
from gateway.settings import Settings
from tests.service.stack import environment

SANDBOXED = replace(environment("os"), isolation=Isolation.SANDBOX)


def settings(folder: Path, **more: Any) -> Settings:
    return Settings(**{"state_dir": folder, "socket_dir": folder / "s", **more})


async def found(folder: Path, *environments: Any, **more: Any) -> dict[str, list[Finding]]:
    """Return the findings by check."""
    by_check: dict[str, list[Finding]] = {}
    for one in await examine(settings(folder, **more), Catalog(environments or (environment(),))):
        by_check.setdefault(one.check, []).append(one)
    return by_check


async def test_a_machine_that_has_everything_has_no_failure(tmp_path: Path) -> None:
    known = await found(tmp_path)

    assert failures([one for some in known.values() for one in some]) == []
    assert {"kernel", "disk", "files"} <= known.keys()
    assert not {"engine", "redis", "bubblewrap"} & known.keys(), "local processes on the memory store need none of them"


async def test_a_secret_that_the_gateway_cannot_read_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc\n")
    missing, short = replace(environment("os"), secrets={"K": "env:NO_SUCH"}), f"file:{tmp_path}/short"
    (one, other) = (await found(tmp_path, missing, replace(environment("math"), secrets={"K": short})))["secrets"]

    assert (one.status, one.environments) == (Status.FAILED, ("os",))
    assert one.detail == "secrets.K = 'env:NO_SUCH' of environment os: the gateway has no variable NO_SUCH"
    assert other.detail.endswith("it has 3 characters, and a secret needs at least 8 to be masked in logs")


async def test_a_missing_engine_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    known = await found(tmp_path, backend="docker", docker_url=f"unix://{tmp_path}/none.sock")
    (engine,) = known["engine"]

    assert engine.status is Status.FAILED
    assert f"{tmp_path}/none.sock" in engine.detail
    assert "systemctl start docker" in engine.fix


async def test_a_missing_redis_is_a_failure_without_its_password(tmp_path: Path) -> None:
    known = await found(tmp_path, store="redis://:hunter2@127.0.0.1:1/0")
    (redis,) = known["redis"]

    assert redis.status is Status.FAILED
    assert redis.detail.startswith("127.0.0.1:1 database 0: ")
    assert "hunter2" not in f"{redis}"


async def test_missing_bubblewrap_affects_the_environments_with_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (finding,) = (await found(tmp_path, environment(), SANDBOXED))["bubblewrap"]

    assert (finding.status, finding.environments) == (Status.FAILED, ("os",))
    assert "apt-get install bubblewrap" in finding.fix


@pytest.mark.parametrize(
    ("file", "content", "fix"),
    [
        ("max_user_namespaces", "0\n", "sysctl user.max_user_namespaces=15000"),
        ("unprivileged_userns_clone", "0\n", "sysctl kernel.unprivileged_userns_clone=1"),
        ("apparmor_restrict_unprivileged_userns", "1\n", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
        ("nothing", "", "run the gateway outside a container, or as root"),
    ],
)
async def test_a_sandbox_that_the_kernel_refuses_has_the_setting_that_allows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str, fix: str
) -> None:
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions to create a new namespace' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(doctor, "_read", lambda path: content if path.name == file else "")
    (finding,) = (await found(tmp_path, SANDBOXED))["bubblewrap"]

    assert (finding.status, finding.fix) == (Status.FAILED, fix)
    assert "No permissions to create a new namespace" in finding.detail


async def test_a_nearly_full_disk_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(total=100 * 2**30, free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    known = await found(tmp_path)

    assert {one.status for one in known["disk"]} == {Status.WARNING}
    assert "1.0 of 100.0 GiB free" in known["disk"][0].detail


async def test_too_few_open_files_are_a_warning(tmp_path: Path) -> None:
    (finding,) = (await found(tmp_path, max_connections=10**9))["files"]

    assert finding.status is Status.WARNING
    assert "ulimit -n 2000001000" in finding.fix


async def test_a_check_that_hangs_ends_with_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: Settings) -> list[Finding]:
        raise TimeoutError

    monkeypatch.setattr(doctor, "_redis", hang)
    (finding,) = (await found(tmp_path, store="redis://127.0.0.1:1"))["doctor"]

    assert finding.status is Status.FAILED


async def test_environments_that_are_not_offered_are_named(tmp_path: Path) -> None:
    catalog = Catalog((environment(), replace(SANDBOXED, server=replace(SANDBOXED.server)))).runnable(
        containers=True, default=""
    )
    known = await examine(settings(tmp_path), catalog)

    assert [one.environments for one in known if one.check == "environment"] == [(name,) for name in catalog.left_out]
