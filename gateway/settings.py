"""The only reader of the process environment: one frozen model, prefix ``GATEWAY_``.

An unknown ``GATEWAY_`` variable is an error (`unknown_variables`): a typing mistake must not silently mean a default.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import os
import re
import secrets as random_secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from gateway import BUNDLED
from gateway.core.errors import ConfigError

PREFIX = "GATEWAY_"
COMMAND_LINE = frozenset(("GATEWAY_URL", "GATEWAY_KEY"))
"""Of ``gateway ps`` and the demo: where a gateway is, and the key for it."""


OWN_CATALOG = Path("env_images")
"""Where environments are looked for first, and where new ones are written."""


def _catalog_dir() -> Path:
    bundled = BUNDLED / "env_images"
    return bundled if bundled.is_dir() and not OWN_CATALOG.is_dir() else OWN_CATALOG


def _state_dir() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "env-gateway"


def _sandbox_dir() -> Path:
    return Path("/var/lib/env-gateway/sandboxes") if os.geteuid() == 0 else _state_dir() / "sandboxes"


def _socket_dir() -> Path:
    # Short on purpose: the path of a Unix socket holds 107 bytes.
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() == 0:
        return Path("/run/env-gateway")
    return Path(runtime) / "env-gateway" if runtime else Path(tempfile.gettempdir()) / f"env-gateway-{os.geteuid()}"


class Settings(BaseSettings):
    """What an operator can set."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)

    host: str = "127.0.0.1"
    """Address to listen on; one that is not loopback needs keys, or ``insecure``."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, which the log line ``gateway_ready`` names."""
    insecure: bool = False
    """Serve an address that is not loopback without keys."""

    store: str = "memory"
    """``memory``, or a Redis URL (``redis://``, ``rediss://``, ``unix://``; for one that Sentinels watch
    ``redis+sentinel://HOST:PORT,…/SERVICE`` or ``rediss+sentinel://…``)."""
    store_prefix: str = "gateway"
    """First part of every key in Redis: gateways that share a Redis need different ones."""
    backend: Literal["process", "docker", "swarm"] = "process"
    """``process`` runs environments as local processes, ``docker`` as containers, ``swarm`` as containers on the
    machines of ``nodes``."""
    docker_url: str = "unix:///var/run/docker.sock"
    """The Docker engine, or better the engine gate in front of it."""
    docker_threads: int = Field(default=8, ge=1, le=64)
    """Engine requests under way at once; an engine starts 5 to 7 containers a second whatever the parallelism."""
    nodes: Annotated[tuple[str, ...], NoDecode] = ()
    """Of the swarm backend: where ``gateway node`` is served on each machine, ``HOST[:PORT]``, comma-separated (port
    7443). A name with several addresses stands for all of them, as ``tasks.node`` does in a Swarm stack."""
    nodes_lost_s: float = Field(default=8.0, ge=2, le=3600)
    """A machine that did not answer for so long is lost: its sessions end, and others take its workers' places."""
    socket_dir: Path = Field(default_factory=_socket_dir)
    """Where the workers' Unix sockets are, as this process sees it."""
    socket_volume: str | None = None
    """The Docker volume that is mounted at ``socket_dir``; unset where the engine sees that very path."""
    sandbox_dir: Path = Field(default_factory=_sandbox_dir)
    """Of the process backend: where sandboxes have their root filesystem (100 MB, made when first needed) and are
    mounted. Where the gateway is root, every user must be able to pass through it."""
    state_dir: Path = Field(default_factory=_state_dir)
    """Where the gateway's own secret is kept (``secret``, mode 0600), and locks that say which store each instance
    has; of a node in a cluster, that it drains. Keep it: a gateway with another secret is another gateway, and leaves
    the workers of this one alone."""
    secret: SecretStr | None = None
    """Replaces the secret file; replicas on several machines need the same one."""
    secrets_dir: Path | None = None
    """Folder of settings in files, as Swarm and compose give secrets: ``gateway_secret``, ``gateway_trainer_keys`` and
    the like. A variable that is set wins."""
    instance: str = Field(default="env-gateway", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$")
    """Label of everything that this gateway makes on an engine. Another label, ``env-gateway.owner``, is made of the
    secret: a gateway touches nothing that does not bear both. Gateways with one secret and one instance need one
    store; others are refused."""

    catalog_dir: Path = Field(default_factory=_catalog_dir)
    """Folder of ``<environment>/environment.toml``; default: ``env_images``, and where that is missing the environments
    that the installed package has."""
    image_tag: str = Field(default="", pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$")
    """Tag of this project's own images (``env-gateway/…``) where an ``environment.toml`` names none; empty: the
    engine's ``latest``, which every build on this engine moves."""
    custom_tasks_dir: Path | None = None
    """Folder of operators' task modules, a sub-folder for each environment that names a module in its ``[tasks]``."""
    custom_tasks_volume: str | None = None
    """The Docker volume that is mounted at ``custom_tasks_dir``; unset where the engine sees that very path."""
    curricula_dir: Path = Path("curricula")
    """Folder of ``<name>.toml``, each a curriculum; there need be none."""
    task_keys: Path | None = None
    """Folder of the public keys whose signatures on task bundles are trusted."""
    task_signatures: Literal["optional", "required"] = "optional"
    """``required``: tasks are taken at run time only in bundles that a trusted key signed."""
    environments: Annotated[tuple[str, ...], NoDecode] = ()
    """Names of the environments to serve, comma-separated; empty: all in ``catalog_dir``."""
    default_environment: str = ""
    """The environment that paths without one mean; empty: the first of ``environments``, or by name."""
    static: Annotated[tuple[str, ...], NoDecode] = ()
    """Servers that somebody else runs: ``NAME=URL``, comma-separated. Unless ``environments`` names others, these are
    all that is served."""
    forwarder_image: str = "env-gateway/base:latest"
    """The image of the small containers that stand between the gateway and images that listen on TCP."""
    peer_url: str = ""
    """Under which other replicas reach this one, ``http://host:port``; empty: worked out from ``host`` and ``port``."""

    trainer_keys: SecretStr = SecretStr("")
    """Keys that open sessions: ``name:key``, comma-separated. A session belongs to the key that opened it."""
    operator_keys: SecretStr = SecretStr("")
    """Keys for ``/admin/v1`` and ``/metrics``: ``name:key``, comma-separated."""

    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """The largest request body; beyond it 413."""
    max_workers: int = Field(default=0, ge=0)
    """Workers of all environments at once, below what each may have by its own ``max_workers``; idle ones make room for
    those that are wanted. 0: no limit of its own."""
    queue_max: int = Field(default=10_000, ge=1)
    """Openings that may wait for a slot of one environment."""
    closed_kept_s: float = Field(default=600.0, ge=0)
    """How long the reason is remembered of a session that the gateway ended."""
    lazy_binding: bool = True
    """With several environments: a create by split and index that names none is bound by its first request's path."""
    strict_paths: bool = True
    """Answer 409 when the path names another environment than the session's."""
    strip_platform_keys: bool = True
    """Keep ``api_key`` and ``OPENREWARD_API_KEY``, which one SDK adds to every session's secrets, from environments
    whose ``environment.toml`` does not say ``platform_keys = true``."""
    drain_notice_s: float = Field(default=0.0, ge=0, le=600)
    """How long new connections are still taken after SIGTERM, while ``/readyz`` says 503 and answers close their
    connections: longer than a load balancer takes to notice, and than clients keep an idle connection (15 s). Of a
    ``gateway node`` in a cluster: longer than its successor takes to start, and gateways to find that."""
    drain_s: float = Field(default=10.0, ge=0)
    """How long calls under way may finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged."""

    node_socket: Path = Path("/run/env-gateway/engine.sock")
    """Where ``gateway node`` serves the engine gate."""
    node_engine: str = "unix:///var/run/docker.sock"
    """The engine behind the gate."""
    node_makes_folders: bool = False
    """The gate makes the workers' folders in ``socket_dir``, and the gateway must not be able to write there: one that
    is taken over could otherwise put a link in a folder's place and have anything of the machine mounted."""
    node_max_containers: int = Field(default=500, ge=1)
    """Containers that the gate lets this instance have at once."""
    node_listen: str = ""
    """``HOST:PORT`` where ``gateway node`` serves the gateways of a cluster over TLS: the engine gate on this port, the
    workers' sockets on the next one. Needs the ``cluster_`` files and ``node_makes_folders``; empty: not served."""
    node_drain_s: float = Field(default=30.0, ge=0, le=3600)
    """How long requests to workers that go through this node may finish after SIGTERM."""
    node_image_max_bytes: int = Field(default=20 * 2**30, ge=1)
    """The largest image that gateways may bring to a node; its tar is kept in ``state_dir`` while it is checked."""
    cluster_ca: Path | None = None
    """The CA whose certificates the gateways and nodes of a cluster show each other (PEM; ``gateway certs``)."""
    cluster_cert: Path | None = None
    """This process' own certificate: a node's or a gateway's."""
    cluster_key: Path | None = None
    """Its key."""

    @field_validator("environments", "static", "nodes", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        given = (value,) if isinstance(value, str) else value
        if not isinstance(given, (tuple, list)) or not all(isinstance(entry, str) for entry in given):
            return value
        return tuple(name.strip() for entry in given for name in entry.split(",") if name.strip())

    @field_validator("static")
    @classmethod
    def _static_servers_are_well_formed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            name, equals, url = entry.partition("=")
            if not (equals and re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name) and re.match(r"https?://[^/]", url)):
                raise ValueError(f"{entry!r} is not of the form NAME=URL, as counter=http://127.0.0.1:8000")
        names = [entry.partition("=")[0] for entry in value]
        if len(set(names)) != len(names):
            raise ValueError("a name stands twice")
        return value

    @field_validator("trainer_keys", "operator_keys")
    @classmethod
    def _keys_are_well_formed(cls, value: SecretStr) -> SecretStr:
        parse_keys(value)
        return value

    def checked(self) -> Settings:
        """Return self if the combination may be served.

        Raises:
            ConfigError: an address that is not loopback without keys; trainers' and operators' keys that overlap; a
                volume of custom tasks that this process does not see; signatures without keys to check them by.
        """
        trainers, operators = parse_keys(self.trainer_keys), parse_keys(self.operator_keys)
        if set(trainers.values()) & set(operators.values()):
            raise ConfigError("a key is in both GATEWAY_TRAINER_KEYS and GATEWAY_OPERATOR_KEYS; they must differ")
        if self.task_signatures == "required" and self.task_keys is None:
            raise ConfigError("GATEWAY_TASK_SIGNATURES=required needs GATEWAY_TASK_KEYS: no key is trusted yet")
        if self.custom_tasks_volume is not None and self.custom_tasks_dir is None:
            raise ConfigError("GATEWAY_CUSTOM_TASKS_VOLUME needs GATEWAY_CUSTOM_TASKS_DIR: where it is mounted here")
        if not trainers and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without keys: set GATEWAY_TRAINER_KEYS, listen on 127.0.0.1, "
                "or say --insecure"
            )
        if self.backend == "swarm":
            self.cluster_files()
            if not self.nodes:
                raise ConfigError("GATEWAY_BACKEND=swarm needs GATEWAY_NODES: where gateway node is served")
        return self

    def cluster_files(self) -> tuple[Path, Path, Path]:
        """CA, certificate and key of this process. Raises ``ConfigError`` if one is not set."""
        if self.cluster_ca is None or self.cluster_cert is None or self.cluster_key is None:
            raise ConfigError(
                "GATEWAY_CLUSTER_CA, GATEWAY_CLUSTER_CERT and GATEWAY_CLUSTER_KEY are needed: nodes talk to nobody "
                "without a certificate (gateway certs makes some)"
            )
        return self.cluster_ca, self.cluster_cert, self.cluster_key

    @property
    def uses_containers(self) -> bool:
        """Whether workers are containers, which outlive the gateway and run in images."""
        return self.backend != "process"

    def static_servers(self) -> dict[str, str]:
        """The servers that somebody else runs: URL by name."""
        return {name: url for name, _, url in (entry.partition("=") for entry in self.static)}

    def read_secret(self) -> bytes:
        """The gateway's own secret, made on first use; worker tokens are derived from it.

        Raises:
            ConfigError: the state folder can't be written, or the secret's file is empty.
        """
        if self.secret is not None:
            return self.secret.get_secret_value().encode()
        path = self.state_dir / "secret"
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                _make_secret(path)
            secret = path.read_text().strip().encode()
        except OSError as error:
            raise ConfigError(f"GATEWAY_STATE_DIR={self.state_dir}: {error}") from error
        if not secret:
            raise ConfigError(f"{path} is empty: remove it, and a new secret is made")
        return secret

    def read_owner(self) -> str:
        """Who this gateway is to those that share its engines: 16 hexadecimal digits, the same for all replicas.

        Raises:
            ConfigError: as `read_secret`.
        """
        return hmac.new(self.read_secret(), b"owner", hashlib.sha256).hexdigest()[:16]


def _make_secret(path: Path) -> None:
    """Write a new secret at *path*, whole or not at all; of replicas that start together, the first one's stays."""
    draft = path.with_name(f"secret.{random_secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(random_secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def load(**overrides: object) -> Settings:
    """Read the settings; *overrides* (from the command line) win.

    Raises:
        ConfigError: a value is wrong, or a variable is unknown.
    """
    unknown = unknown_variables(os.environ)
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(unknown)}")
    try:
        given = {key: value for key, value in overrides.items() if value is not None}
        return Settings(_secrets_dir=_secrets_dir(), **given)  # type: ignore[arg-type, call-arg]  # names are fields
    except ValidationError as error:
        lines = [
            f"{PREFIX}{'_'.join(map(str, e['loc'])).upper()}: {e['msg']}" for e in error.errors(include_input=False)
        ]
        raise ConfigError("; ".join(lines)) from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Names that start like settings and are none."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | COMMAND_LINE
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in known)


def _secrets_dir() -> Path | None:
    """The folder of settings in files, if there is one; files with other names are somebody else's.

    Raises:
        ConfigError: it or a file in it can't be read, or a file is empty, or is named like a setting and is none.
    """
    directory = os.environ.get(f"{PREFIX}SECRETS_DIR")
    if not directory:
        return None
    try:
        files = [entry for entry in Path(directory).iterdir() if entry.name.upper().startswith(PREFIX)]
        # An empty secret would be one that anybody can guess.
        empty = [entry.name for entry in files if not entry.read_text().strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{PREFIX}SECRETS_DIR={directory}: {error}") from error
    if empty:
        raise ConfigError(f"{PREFIX}SECRETS_DIR={directory}: empty: {', '.join(empty)}")
    unknown = unknown_variables({entry.name.upper(): "" for entry in files})
    if unknown:
        raise ConfigError(f"{PREFIX}SECRETS_DIR={directory}: unknown settings: {', '.join(unknown).lower()}")
    return Path(directory)


def parse_keys(value: SecretStr) -> dict[str, str]:
    """Turn ``name:key,name:key`` into a mapping from name to key; a key shorter than 8 characters is refused."""
    keys: dict[str, str] = {}
    for position, entry in enumerate(filter(None, (part.strip() for part in value.get_secret_value().split(","))), 1):
        name, colon, key = entry.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"entry {position} is not of the form name:key")
        if len(key) < 8 or not (key.isascii() and key.isprintable()) or any(c in "/ " for c in key):
            raise ValueError(
                f"the key of {name!r} needs at least 8 printable ASCII characters without spaces and slashes"
            )
        if name in keys:
            raise ValueError(f"the name {name!r} stands twice")
        if key in keys.values():
            raise ValueError(f"{name!r} has the same key as another name: sessions belong to one")
        keys[name] = key
    return keys


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach *host*."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def inherited_environ() -> Mapping[str, str]:
    """This process's variables, of which local workers get a few harmless ones."""
    return dict(os.environ)
