"""Checks whether this machine can run the environments: engine, images, Redis, bubblewrap, kernel, clock and disk.

Each check has a deadline. A finding names the environments that it affects and the command that mends it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, Isolation
from gateway.core.errors import BackendError, EnvironmentUnavailable, StoreUnavailable
from gateway.core.ports.step_log import ANY, EpisodeFilter, StepLogQueries
from gateway.settings import Settings
from gateway.settings.session_secrets import SessionSecrets

CHECK_S: Final = 10.0
"""Maximum seconds of one check."""
SKEW_S: Final = 2.0
"""Difference of two machines' clocks above which deadlines of sessions become wrong."""
FREE_BYTES: Final = 2 * 2**30
"""Free space below which a disk is reported."""
FREE_SHARE: Final = 0.05
HOUR_S: Final = 3600.0
UNEXPECTED_SHARE: Final = 0.05
"""Share of an environment's episodes of an hour above which unexpected errors of its tools are reported."""
SAMPLE: Final = 2_000
"""Newest episodes that are counted."""
OWN_IMAGES: Final = "env-gateway/"
_CGROUP: Final = Path("/sys/fs/cgroup/cgroup.controllers")
_CONTROLLERS: Final = frozenset(("cpu", "memory", "pids"))


class Status(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARNING = "warning"  #: it works now, and may fail under load or later
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found."""

    check: str
    status: Status = Status.OK
    detail: str
    fix: str = ""
    """A command or a setting that mends it. Empty: nothing is to be done."""
    environments: tuple[str, ...] = ()
    """The environments that cannot run because of it. Empty: all, or none."""


async def examine(settings: Settings, catalog: Catalog) -> list[Finding]:
    """Run all checks that concern this configuration, and return what they found."""
    checks: list[Callable[[], Awaitable[list[Finding]]]] = [
        lambda: asyncio.to_thread(_left_out, catalog),
        lambda: asyncio.to_thread(_secrets, settings, catalog),
        lambda: asyncio.to_thread(_kernel, settings, catalog),
        lambda: asyncio.to_thread(_disks, settings),
        lambda: asyncio.to_thread(_open_files, settings),
        lambda: _unexpected(settings),
    ]
    if settings.backend == "docker":
        checks.append(lambda: asyncio.to_thread(_engine, settings, catalog))
    if settings.store != "memory":
        checks.append(lambda: _redis(settings))
    found = await asyncio.gather(*(_within(check) for check in checks))
    return [finding for some in found for finding in some]


async def _within(check: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    try:
        async with asyncio.timeout(CHECK_S):
            return await check()
    except TimeoutError:
        return [Finding(check="doctor", status=Status.FAILED, detail=f"a check did not end within {CHECK_S:g} s")]
    except OSError as error:  # a folder that this user must not read
        return [Finding(check="doctor", status=Status.WARNING, detail=f"a check could not look: {error}")]


def _left_out(catalog: Catalog) -> list[Finding]:
    return [
        Finding(
            check="environment",
            status=Status.WARNING,
            detail=f"{name} is not offered: {reason}",
            environments=(name,),
        )
        for name, reason in catalog.left_out.items()
    ]


def _secrets(settings: Settings, catalog: Catalog) -> list[Finding]:
    secrets, found = SessionSecrets(settings.secrets_dir), []
    for environment in catalog:
        try:
            secrets.of(environment)
        except EnvironmentUnavailable as error:
            found.append(
                Finding(check="secrets", status=Status.FAILED, detail=str(error), environments=(environment.name,))
            )
    return found


# -- the environments' own code -------------------------------------------------------------------------------------


async def _unexpected(settings: Settings) -> list[Finding]:
    from gateway.stores.step_log.reader import StepLogReader

    return await unexpected_errors(StepLogReader(settings.step_log_path))


async def unexpected_errors(queries: StepLogQueries, *, gateway: str = "") -> list[Finding]:
    """Return a finding for each environment that had unexpected errors in too many episodes of the last hour.

    It names the most frequent exception, with its line. *gateway*: see `EpisodeFilter`.
    """
    since = time.time() - HOUR_S
    wanted = EpisodeFilter(since=since, gateway=gateway)
    marked = await queries.episodes(replace(wanted, unexpected_error=ANY), limit=SAMPLE)
    found = []
    for name in sorted({row["environment"] for row in marked}):
        rows = await queries.episodes(replace(wanted, environment=name), limit=SAMPLE)
        ended = [row for row in rows if row["closed_at"] is not None]
        errors = Counter(row["unexpected_error"] for row in ended if row["unexpected_error"])
        if errors.total() <= UNEXPECTED_SHARE * len(ended):
            continue
        error, count = errors.most_common(1)[0]
        finding = Finding(
            check="tools",
            status=Status.WARNING,
            detail=f"{name}: tools raised unexpected errors in {errors.total()} of {len(ended)} episodes of the last "
            f"hour, in {count} of them {error}",
            fix="correct the tool, or raise ToolError for an error of the agent",
        )
        found.append(finding)
    return found


# -- the engine and its images --------------------------------------------------------------------------------------


def _engine(settings: Settings, catalog: Catalog) -> list[Finding]:
    from gateway.backends.docker.calls import image_id
    from gateway.backends.docker.engine import connect, translated

    try:
        began_at = time.time()
        with translated(settings.docker_url), closing(connect(settings.docker_url, timeout_s=CHECK_S / 2)) as client:
            version: dict[str, Any] = client.version()
            images = {one.name: image_id(client, image=one.image) for one in catalog if one.image}
    except BackendError as error:
        fix = "systemctl start docker (a checkout: scripts/docker-engine), or set GATEWAY_DOCKER_URL"
        return [Finding(check="engine", status=Status.FAILED, detail=error.detail, fix=fix)]
    took_s = time.time() - began_at
    found = [
        Finding(check="engine", detail=f"Docker {version.get('Version')} at {settings.docker_url}, {took_s:.2f} s")
    ]
    return found + [_image(one, images[one.name]) for one in catalog if one.image]


def _image(environment: Environment, id: str) -> Finding:
    if id:
        return Finding(check="image", detail=f"{environment.image} ({id.removeprefix('sha256:')[:12]})")
    is_own = environment.image.startswith(OWN_IMAGES)
    return Finding(
        check="image",
        status=Status.FAILED,
        detail=f"the engine has no image {environment.image}",
        fix=f"scripts/build-images {environment.name}" if is_own else f"docker pull {environment.image}",
        environments=(environment.name,),
    )


# -- Redis ----------------------------------------------------------------------------------------------------------


async def _redis(settings: Settings) -> list[Finding]:
    from gateway.stores.redis.client import facts, place_of

    place = place_of(settings.store)
    try:
        known = await facts(settings.store)
    except StoreUnavailable as error:
        fix = "start Redis (a checkout: scripts/redis), or set GATEWAY_STORE"
        if error.is_refusal:
            fix = "correct user and password in GATEWAY_STORE=redis://USER:PASSWORD@HOST, or the user's rights in Redis"
        return [Finding(check="redis", status=Status.FAILED, detail=f"{place}: {error.detail}", fix=fix)]
    found = [Finding(check="redis", detail=f"Redis {known.version} at {place}, {known.answer_s * 1000:.1f} ms")]
    if known.policy not in ("", "noeviction") and known.max_bytes:
        found.append(
            Finding(
                check="redis",
                status=Status.WARNING,
                detail=f"maxmemory-policy {known.policy} removes sessions when Redis is full",
                fix="redis-cli config set maxmemory-policy noeviction",
            )
        )
    if abs(known.ahead_s) > SKEW_S:
        found.append(
            Finding(
                check="clock",
                status=Status.WARNING,
                detail=f"the clock of Redis differs from this machine's by {known.ahead_s:.1f} s",
                fix="timedatectl set-ntp true (on both machines)",
            )
        )
    else:
        found.append(Finding(check="clock", detail=f"differs from that of Redis by {abs(known.ahead_s) * 1000:.0f} ms"))
    return found


# -- the kernel and the machine -------------------------------------------------------------------------------------


def _kernel(settings: Settings, catalog: Catalog) -> list[Finding]:
    found = [Finding(check="kernel", detail=f"Linux {os.uname().release}")]
    controllers = set(_read(_CGROUP).split())
    if missing := sorted(_CONTROLLERS - controllers):
        found.append(
            Finding(
                check="kernel",
                status=Status.WARNING,
                detail=f"no cgroup v2 controllers {', '.join(missing)}: sandboxes get weaker limits",
                fix="boot with systemd.unified_cgroup_hierarchy=1",
            )
        )
    sandboxed = tuple(one.name for one in catalog if one.isolation is Isolation.SANDBOX)
    if settings.uses_containers or not sandboxed:
        return found
    if trouble := _sandbox_trouble():
        finding = Finding(
            check="bubblewrap", status=Status.FAILED, detail=trouble[0], fix=trouble[1], environments=sandboxed
        )
        return [*found, finding]
    return [*found, Finding(check="bubblewrap", detail=f"sandboxes open ({', '.join(sandboxed)})")]


def _sandbox_trouble() -> tuple[str, str] | None:
    """Return why a sandbox cannot be made here, and the command that mends it; None: one was made."""
    program = shutil.which("bwrap")
    if program is None:
        return "there is no bwrap on PATH", "apt-get install bubblewrap (a checkout: scripts/bubblewrap)"
    command = [program, "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S / 2, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}", "apt-get install --reinstall bubblewrap"
    if done.returncode == 0:
        return None
    for file, wrong, fix in (
        ("/proc/sys/user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ):
        if _read(Path(file)).strip() == wrong:
            return f"bwrap makes no sandbox: {done.stderr.strip()}", fix
    return f"bwrap makes no sandbox: {done.stderr.strip()}", "run the gateway outside a container, or as root"


def _disks(settings: Settings) -> list[Finding]:
    found, known = [], set()
    for name, folder in (
        ("state", settings.state_dir),
        ("step log", settings.step_log_path),
        ("sockets", settings.socket_dir),
    ):
        here = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
        device = here.stat().st_dev
        if device in known:
            continue
        known.add(device)
        usage = shutil.disk_usage(here)
        detail = f"{usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free for {name} ({here})"
        is_low = usage.free < min(FREE_BYTES, FREE_SHARE * usage.total)
        found.append(
            Finding(
                check="disk",
                status=Status.WARNING if is_low else Status.OK,
                detail=detail,
                fix="docker system prune, or a smaller GATEWAY_STEP_LOG_BYTES" if is_low else "",
            )
        )
    return found


def _open_files(settings: Settings) -> list[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * settings.max_connections
    detail = f"{soft} open files; {settings.max_connections} connections may need two each"
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return [Finding(check="files", detail=detail)]
    fix = f"ulimit -n {needed + 1000}, or a smaller GATEWAY_MAX_CONNECTIONS"
    return [Finding(check="files", status=Status.WARNING, detail=detail, fix=fix)]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def failures(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that keep an environment from running."""
    return [one for one in found if one.status is Status.FAILED]
