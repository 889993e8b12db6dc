"""Reads the settings from the process environment into one frozen model, with the prefix ``GATEWAY_``.

No other module reads the process environment. An unknown ``GATEWAY_`` variable is an error (`unknown_variables`), so
that a typing mistake does not silently select a default.
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
from gateway.core.validation import did_you_mean, reason_of
from gateway.settings.keys import Keyring, parse_keys

PREFIX = "GATEWAY_"
COMMAND_LINE = frozenset(("GATEWAY_URL", "GATEWAY_KEY", "GATEWAY_OPERATOR_KEY"))
"""Variables of commands and the demo, which are not settings: the URL of a gateway and its keys."""
_LINK_NAME = re.compile(
    r"GATEWAY(_\w+)?_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR|START|END))?)"
    r"|GATEWAY_ENV_\w+"
)
_LINK_VALUES = ((re.compile(r"GATEWAY(_\w+)?_PORT"), r"(tcp|udp|sctp)://"), (re.compile(r"GATEWAY(_\w+)?_NAME"), "/"))


OWN_CATALOG = Path("env_images")
"""Folder that is searched for environments first, and that new environments are written to."""


def _catalog_dir() -> Path:
    """Return ``env_images``, else the package's own."""
    bundled = BUNDLED / "env_images"
    return bundled if bundled.is_dir() and not OWN_CATALOG.is_dir() else OWN_CATALOG


def _state_dir() -> Path:
    """Return ``$XDG_STATE_HOME/env-gateway``, else ``~/.local/state/env-gateway``."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "env-gateway"


def _sandbox_dir() -> Path:
    """Return ``/var/lib/env-gateway/sandboxes`` (root), else a folder below ``state_dir``."""
    return Path("/var/lib/env-gateway/sandboxes") if os.geteuid() == 0 else _state_dir() / "sandboxes"


def _socket_dir() -> Path:
    """Return ``/run/env-gateway`` (root), else a folder below ``$XDG_RUNTIME_DIR`` or of temporary files."""
    # Short on purpose: the path of a Unix socket holds 107 bytes.
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if os.geteuid() == 0:
        return Path("/run/env-gateway")
    return Path(runtime) / "env-gateway" if runtime else Path(tempfile.gettempdir()) / f"env-gateway-{os.geteuid()}"


class Settings(BaseSettings):
    """All settings of an operator.

    ``scripts/settings-table`` prints the fields' docstrings as the table of ``docs/reference.md``, so a link in a
    docstring is relative to that page. The default of a field with a factory is the factory's docstring.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)

    host: str = "127.0.0.1"
    """Address to listen on. An address that is not loopback needs keys, or ``insecure``."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on. With 0 the gateway takes a free port and logs it in ``gateway_ready``."""
    insecure: bool = False
    """Allow listening on an address that is not loopback without keys."""
    public_names: Annotated[tuple[str, ...], NoDecode] = ()
    """Further host names of a gateway without trainers' keys, comma-separated. Against web pages of other sites, such a
    gateway answers 403 unless ``Host`` is an IP address, ``localhost``, a name that ends in ``.localhost`` or
    ``.internal``, the ``host`` setting, or one of these names. If ``host`` is not loopback, names without dots are
    accepted too. Pages of these names may send requests."""

    store: str = "memory"
    """``memory``, or a Redis URL: ``redis://``, ``rediss://`` or ``unix://``. For a Redis that Sentinels watch:
    ``redis+sentinel://HOST:PORT,…/SERVICE`` or ``rediss+sentinel://…``."""
    store_prefix: str = "gateway"
    """First part of every key in Redis. Gateways that share a Redis need different prefixes. With ``docker`` and
    ``swarm``, a gateway does not start while a live gateway with another secret uses this prefix. It waits up to 6 s to
    find out."""
    backend: Literal["process", "docker", "swarm"] = "process"
    """``process`` runs environments as local processes, ``docker`` as containers, ``swarm`` as containers on the
    machines of ``nodes``."""
    docker_url: str = "unix:///var/run/docker.sock"
    """URL of the Docker engine, or better of the engine gate in front of it."""
    docker_threads: int = Field(default=8, ge=1, le=64)
    """Concurrent requests to the engine. An engine starts 5 to 7 containers a second at any concurrency."""
    nodes: Annotated[tuple[str, ...], NoDecode] = ()
    """Addresses of ``gateway node`` on the machines of the swarm backend: ``HOST[:PORT]``, comma-separated (default
    port 7443). A name with several addresses means all of them, as ``tasks.node`` does in a Swarm stack. Needs the
    ``cluster_`` files."""
    nodes_lost_s: float = Field(default=8.0, ge=2, le=3600)
    """Seconds without an answer after which a machine is lost: its sessions end, and new workers replace its
    workers."""
    socket_dir: Path = Field(default_factory=_socket_dir)
    """Folder of the workers' Unix sockets, as this process sees it."""
    socket_volume: str | None = None
    """Docker volume that is mounted at ``socket_dir``; unset if the engine sees that same path."""
    sandbox_dir: Path = Field(default_factory=_sandbox_dir)
    """For the process backend: folder of the sandboxes' root filesystem (100 MB, created on first use) and of their
    mounts. If the gateway runs as root, every user needs search permission for it."""
    state_dir: Path = Field(default_factory=_state_dir)
    """Folder of the gateway's own secret (``secret``, mode 0600), and of ``INSTANCE-OWNER.lock``, which names the store
    of running gateways. A cluster node records there that it drains. Keep this folder: a gateway with another secret is
    another gateway, and does not touch the workers of this gateway."""
    step_log: Path | None = None
    """Folder of the step log, which replicas on one machine share. Empty: ``step_log`` in ``state_dir``."""
    step_log_bytes: int = Field(default=10 * 2**30, ge=0)
    """Maximum size of the step log's folder, for all replicas that share it. The oldest episodes of the keys with the
    most records make room for new ones. 0: nothing is recorded."""
    step_log_days: float = Field(default=14.0, gt=0)
    """Days for which the step log keeps records."""
    otlp_endpoint: str = ""
    """URL of an OpenTelemetry collector, such as ``http://127.0.0.1:4318``, which gets a span of each request. Needs
    the extra ``telemetry``. Empty: no spans; the trace context of requests reaches workers in any case."""
    secret: SecretStr | None = None
    """Replaces the secret file. Replicas on several machines need the same secret."""
    secrets_dir: Path | None = None
    """Folder of settings in files, as Swarm and compose provide secrets: ``gateway_secret``, ``gateway_trainer_keys``
    and others. A variable overrides the file."""
    instance: str = Field(default="env-gateway", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}$")
    """Label of everything that this gateway creates on an engine. A second label, ``env-gateway.owner``, is derived
    from the secret. A gateway touches only objects with both labels. Containers of one instance and one secret belong
    to one store. With ``docker`` and ``swarm``, gateways of one state folder run at the same time only if they have the
    same ``store`` and ``store_prefix``, and not with ``memory``. The URL identifies a store: host, port and database,
    or the Sentinels and the name of their master."""

    catalog_dir: Path = Field(default_factory=_catalog_dir)
    """Folder of ``<environment>/environment.toml``. If the current folder has no ``env_images``, an installed package
    offers its own environments and tasks. ``gateway env add`` writes to ``env_images`` in both cases."""
    image_tag: str = Field(default="", pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$")
    """Tag of this project's own images (``env-gateway/…``) if an ``environment.toml`` names no tag. Empty: the engine's
    ``latest``, which every build on this engine moves."""
    custom_tasks_dir: Path | None = None
    """Folder of operators' task modules, with a sub-folder for each environment that names a module in its
    ``[tasks]``."""
    custom_tasks_volume: str | None = None
    """Docker volume that is mounted at ``custom_tasks_dir``; unset if the engine sees that same path."""
    curricula_dir: Path = Path("curricula")
    """Folder of ``<name>.toml``, one file for each curriculum. [curricula.md](curricula.md#a-file) has the keys and
    defaults. The folder may be missing."""
    task_keys: Path | None = None
    """Folder of the public keys whose signatures on task bundles are trusted."""
    task_signatures: Literal["optional", "required"] = "optional"
    """``required``: the gateway accepts run-time tasks only in bundles that a trusted key signed."""
    environments: Annotated[tuple[str, ...], NoDecode] = ()
    """Names of the environments to serve, comma-separated. Empty: all in ``catalog_dir``."""
    default_environment: str = ""
    """Environment for paths that name no environment. Empty: the first of ``environments``, or the first by name."""
    static: Annotated[tuple[str, ...], NoDecode] = ()
    """External servers: ``NAME=URL``, comma-separated (``gateway serve --static``); ``NAME=URL#ENV`` chooses one
    environment of a server. Unless ``environments`` names others, the gateway serves only these."""
    static_step_s: float = Field(default=0.0, ge=0)
    """Seconds that a reset and a step on a server of ``static`` may take over OpenEnv and AReaL (``gateway serve
    --step-s``). 0: 50, or four times as long as the slowest of the inspection."""
    forwarder_image: str = "env-gateway/base:latest"
    """Image of the small containers that connect the gateway to images that listen on TCP."""
    peer_url: str = ""
    """URL at which other replicas reach this replica, ``http://host:port``. Empty: built from ``host`` and ``port``.
    Only replicas that share a Redis query each other; the requests are signed, not encrypted."""

    trainer_keys: SecretStr = SecretStr("")
    """Keys that open sessions: ``name:key``, comma-separated. A session belongs to the key that opened it. A key has at
    least 8 characters; the gateway warns about fewer than 16 (``short_keys``)."""
    operator_keys: SecretStr = SecretStr("")
    """Keys for ``/admin/v1`` and ``/metrics``: ``name:key``, comma-separated."""
    keys_file: Path | None = None
    """File of keys with their limits, which ``gateway keys`` writes. It holds digests, not keys. While it exists, every
    request needs a key. Empty: ``keys.json`` in ``state_dir``. Replicas need the same file, which each reads again
    within a second after a change."""

    max_body_bytes: int = Field(default=32 * 2**20, ge=1024)
    """Maximum size of a request body; the gateway answers a larger body with 413."""
    max_held_bytes: int = Field(default=256 * 2**20, ge=2**20)
    """Maximum number of bytes that the requests of all keys hold in this replica: their bodies until they are answered,
    openings in the queue, creates that wait for the name of their environment, and frames of WebSockets. A request
    beyond it gets 429, or AReaL's 503; a WebSocket is closed with 1013. A single request may exceed it."""
    max_held_bytes_per_key: int = Field(default=128 * 2**20, ge=2**20)
    """As ``max_held_bytes``, for the requests of one key. Without keys, all requests count as those of one key."""
    max_connections: int = Field(default=20_000, ge=1)
    """Maximum number of client connections of this replica. Further connections get 503."""
    max_workers: int = Field(default=0, ge=0)
    """Maximum number of workers of all environments together; each environment's ``max_workers`` applies as well. Idle
    workers make room for workers that are needed. 0: only the environments' own limits."""
    queue_max: int = Field(default=10_000, ge=1)
    """Maximum number of openings that wait for a slot of one environment."""
    closed_kept_s: float = Field(default=600.0, ge=0)
    """Seconds for which the gateway remembers why it ended a session."""
    lazy_binding: bool = True
    """With several environments: a create by split and index may name no environment. The path of the session's first
    request then binds it."""
    strict_paths: bool = True
    """Answer 409 if a path names another environment than the session's."""
    strip_platform_keys: bool = True
    """Remove ``api_key`` and ``OPENREWARD_API_KEY``, which one SDK adds to every session's secrets, unless an
    environment's ``environment.toml`` sets ``platform_keys = true``."""
    drain_notice_s: float = Field(default=0.0, ge=0, le=600)
    """Seconds for which the gateway still takes new connections after SIGTERM. Meanwhile ``/readyz`` says 503 and
    responses close their connections. Choose more than a load balancer needs to notice, and more than clients keep an
    idle connection (15 s). See [Leaving](#leaving). For a ``gateway node`` in a cluster: choose more than its successor
    takes to start, and gateways to find the successor."""
    drain_s: float = Field(default=10.0, ge=0)
    """Seconds that running calls may take to finish after SIGTERM."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of logged messages."""
    log_format: Literal["", "text", "json"] = ""
    """``text`` or ``json``. Empty: on a terminal a short log for a person, elsewhere ``text``."""

    node_socket: Path = Path("/run/env-gateway/engine.sock")
    """Unix socket on which ``gateway node`` serves the engine gate."""
    node_engine: str = "unix:///var/run/docker.sock"
    """URL of the engine behind the gate."""
    node_makes_folders: bool = False
    """The gate creates the workers' folders in ``socket_dir``, and the gateway must not be able to write there.
    Otherwise an attacker who controls the gateway could replace a folder with a link and have any path of the machine
    mounted."""
    node_max_containers: int = Field(default=500, ge=1)
    """Maximum number of containers that this instance has concurrently. A worker of an image with a TCP port counts as
    two."""
    node_listen: str = ""
    """``HOST:PORT`` where ``gateway node`` serves the gateways of a cluster over TLS: the engine gate on this port, the
    workers' sockets on the next port. Needs the ``cluster_`` files and ``node_makes_folders``. Empty: not served."""
    node_drain_s: float = Field(default=30.0, ge=0, le=3600)
    """Seconds that requests to workers through this node may take to finish after SIGTERM."""
    node_image_max_bytes: int = Field(default=20 * 2**30, ge=1)
    """Maximum size of an image that gateways may load onto a node. The node keeps its tar in ``state_dir`` while it
    checks it."""
    node_image_ids: Path | None = None
    """File of the only images that a cluster node accepts, lines ``REFERENCE sha256:ID`` (``gateway node images``).
    Unset: each image for which another node vouches."""
    cluster_ca: Path | None = None
    """Certificate of the CA that signs the certificates of the cluster's gateways and nodes (PEM; ``gateway
    certs``)."""
    cluster_cert: Path | None = None
    """Certificate of this process: a node's or a gateway's."""
    cluster_key: Path | None = None
    """Private key of ``cluster_cert``."""

    @field_validator("environments", "static", "nodes", "public_names", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        given = (value,) if isinstance(value, str) else value
        if not isinstance(given, (tuple, list)) or not all(isinstance(entry, str) for entry in given):
            return value
        return tuple(name.strip() for entry in given for name in entry.split(",") if name.strip())

    @field_validator("port", mode="before")
    @classmethod
    def _port_is_no_service_link(cls, value: object) -> object:
        return cls.model_fields["port"].default if is_service_link(f"{PREFIX}PORT", str(value)) else value

    @field_validator("static")
    @classmethod
    def _static_servers_are_well_formed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            name, equals, url = entry.partition("=")
            if not (equals and re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name) and re.match(r"https?://[^/]", url)):
                better = f"{name}=http://{url}" if equals and "://" not in url else "counter=http://127.0.0.1:8000"
                raise ValueError(f"{entry!r} is not of the form NAME=URL, as {better}")
        names = [entry.partition("=")[0] for entry in value]
        if len(set(names)) != len(names):
            raise ValueError("a name occurs twice")
        return value

    @field_validator("trainer_keys", "operator_keys")
    @classmethod
    def _keys_are_well_formed(cls, value: SecretStr) -> SecretStr:
        parse_keys(value)
        return value

    def checked(self) -> Settings:
        """Return self if the combination of settings is allowed.

        Raises:
            ConfigError: A combination is not allowed: an address that is not loopback without keys, or one key for
                trainers and operators. A volume of custom tasks without its folder. Required signatures without keys to
                verify them. A swarm without ``nodes`` or ``cluster_`` files.
        """
        trainers, operators = parse_keys(self.trainer_keys), parse_keys(self.operator_keys)
        if set(trainers.values()) & set(operators.values()):
            raise ConfigError("a key is in both GATEWAY_TRAINER_KEYS and GATEWAY_OPERATOR_KEYS; they must differ")
        if self.task_signatures == "required" and self.task_keys is None:
            raise ConfigError("GATEWAY_TASK_SIGNATURES=required needs GATEWAY_TASK_KEYS: no key is trusted yet")
        if self.custom_tasks_volume is not None and self.custom_tasks_dir is None:
            raise ConfigError("GATEWAY_CUSTOM_TASKS_VOLUME needs GATEWAY_CUSTOM_TASKS_DIR: where it is mounted here")
        has_keys = bool(trainers) or self.keys_path.exists()
        if not has_keys and not self.insecure and not is_loopback(self.host):
            raise ConfigError(
                f"refusing to listen on {self.host} without keys: make one (gateway keys add NAME), set "
                "GATEWAY_TRAINER_KEYS, listen on 127.0.0.1, or pass --insecure"
            )
        if self.backend == "swarm":
            self.cluster_files()
            if not self.nodes:
                raise ConfigError("GATEWAY_BACKEND=swarm needs GATEWAY_NODES, the hosts that run gateway node")
        return self

    def cluster_files(self) -> tuple[Path, Path, Path]:
        """Return the paths of CA, certificate and key of this process. Raises ``ConfigError`` if one is not set."""
        if self.cluster_ca is None or self.cluster_cert is None or self.cluster_key is None:
            raise ConfigError(
                "GATEWAY_CLUSTER_CA, GATEWAY_CLUSTER_CERT and GATEWAY_CLUSTER_KEY are needed: nodes accept only "
                "clients with a certificate (gateway certs creates certificates)"
            )
        return self.cluster_ca, self.cluster_cert, self.cluster_key

    def known_secrets(self) -> tuple[str, ...]:
        """Return the secrets in the settings: keys and the gateway's own secret. Raises ``ConfigError``."""
        keys = (*parse_keys(self.trainer_keys).values(), *parse_keys(self.operator_keys).values())
        return (*keys, self.read_secret().decode(errors="replace"))

    @property
    def step_log_path(self) -> Path:
        """The folder of the step log."""
        return self.step_log or self.state_dir / "step_log"

    @property
    def keys_path(self) -> Path:
        """The path of the file of keys, which may be missing."""
        return self.keys_file or self.state_dir / "keys.json"

    def keyring(self) -> Keyring:
        """Return the keys of the settings and of the file. Raises ``ConfigError``."""
        return Keyring(parse_keys(self.trainer_keys), parse_keys(self.operator_keys), path=self.keys_path)

    @property
    def uses_containers(self) -> bool:
        """True if workers are containers, which outlive the gateway and run in images."""
        return self.backend != "process"

    def static_servers(self) -> dict[str, str]:
        """Return the external servers: URL by name."""
        return {name: url for name, _, url in (entry.partition("=") for entry in self.static)}

    def read_secret(self) -> bytes:
        """Return the gateway's own secret, from which worker tokens are derived; create it on first use.

        Raises:
            ConfigError: The state folder can't be written, or the secret's file is empty.
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
        """Return the id of this gateway on shared engines: 16 hexadecimal digits, the same for all replicas.

        Raises:
            ConfigError: See `read_secret`.
        """
        return hmac.new(self.read_secret(), b"owner", hashlib.sha256).hexdigest()[:16]


def _make_secret(path: Path) -> None:
    """Write a new secret at *path* atomically; of replicas that start together, the first secret stays."""
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
    """Read the settings; *overrides* (from the command line) take precedence.

    Raises:
        ConfigError: A value is wrong, or a variable is unknown.
    """
    unknown = unknown_variables(os.environ)
    if unknown:
        known = [PREFIX + name.upper() for name in Settings.model_fields]
        raise ConfigError("; ".join(f"unknown setting {name}{did_you_mean(name, known)}" for name in unknown))
    try:
        given = {key: value for key, value in overrides.items() if value is not None}
        return Settings(_secrets_dir=_secrets_dir(), **given)  # type: ignore[arg-type, call-arg]  # names are fields
    except ValidationError as error:
        lines = [
            f"{PREFIX}{'_'.join(map(str, e['loc'])).upper()}: {reason_of(e)}" for e in error.errors(include_input=False)
        ]
        raise ConfigError("; ".join(lines)) from None


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names with the prefix of settings that are neither settings nor service links."""
    known = {PREFIX + name.upper() for name in Settings.model_fields} | COMMAND_LINE
    given = ((name, value) for name, value in environ.items() if name.startswith(PREFIX) and name not in known)
    return sorted(name for name, value in given if not is_service_link(name, value))


def is_service_link(name: str, value: str) -> bool:
    """Return True for a variable that Kubernetes or Docker sets in containers beside a service named ``gateway…``."""
    by_value = any(names.fullmatch(name) and re.match(values, value) for names, values in _LINK_VALUES)
    return by_value or _LINK_NAME.fullmatch(name) is not None


def service_links() -> list[str]:
    """Return the names of this process's service links, which are ignored."""
    return sorted(name for name, value in os.environ.items() if is_service_link(name, value))


def _secrets_dir() -> Path | None:
    """Return the folder of settings in files, if it is set; files without the prefix are ignored.

    Raises:
        ConfigError: The folder or a file can't be read, a file is empty, or a file with the prefix is not a setting.
    """
    directory = os.environ.get(f"{PREFIX}SECRETS_DIR")
    if not directory:
        return None
    try:
        files = [entry for entry in Path(directory).iterdir() if entry.name.upper().startswith(PREFIX)]
        # An attacker could guess an empty secret.
        empty = [entry.name for entry in files if not entry.read_text().strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{PREFIX}SECRETS_DIR={directory}: {error}") from error
    if empty:
        raise ConfigError(f"{PREFIX}SECRETS_DIR={directory}: empty: {', '.join(empty)}")
    unknown = unknown_variables({entry.name.upper(): "" for entry in files})
    if unknown:
        raise ConfigError(f"{PREFIX}SECRETS_DIR={directory}: unknown settings: {', '.join(unknown).lower()}")
    return Path(directory)


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach *host*."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def inherited_environ() -> Mapping[str, str]:
    """Return this process's environment variables; local workers get only a few harmless variables of them."""
    return dict(os.environ)
