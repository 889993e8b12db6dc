"""An environment: what its workers run, what they may use, and how each protocol shows it. Frozen values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.core.ids import EnvironmentName

TaskSpec = Mapping[str, Any]
"""A task as its environment designed it: a JSON object that is opaque to the gateway."""
_NO_NAME = EnvironmentName("")
ALL_GPUS = -1


class ServerProtocol(StrEnum):
    """What a worker speaks."""

    ORS = "ors"
    OPENENV = "openenv"
    AREAL = "areal"


class UpstreamKind(StrEnum):
    """Which of the upstreams speaks to a worker."""

    OWN = "own"  #: ORS with what our own images add to it
    ORS = "ors"  #: a standard ORS server
    OPENENV = "openenv"
    AREAL = "areal"


class Isolation(StrEnum):
    """What one session is inside a worker."""

    SHARED = "shared"  #: an object in a worker that serves many
    SANDBOX = "sandbox"  #: a sandbox of its own in a worker that serves many
    EXCLUSIVE = "exclusive"  #: a worker of its own, destroyed after it


class SplitType(StrEnum):
    """What a split is for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Split:
    """A named, ordered set of tasks."""

    name: str
    type: SplitType


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPolicy:
    """How many workers an environment has, and how many sessions each holds."""

    slots: int = 16
    """Sessions that one worker holds at once."""
    min_workers: int = 0
    """Workers that are kept although idle."""
    max_workers: int = 4
    """Workers of the present make that may live at once, those that start, pause or drain included. While a new make
    rolls out, as many of the old one may live beside them until their sessions have ended."""
    warm: int = 0
    """Free slots that are kept ready at least. Beyond them the pool keeps as many as arrive while a worker starts."""
    idle_worker_s: float = 60.0
    """How long a worker above ``min_workers`` may stay without a session."""
    pause_idle_s: float = 0.0
    """A worker that was idle for this long is paused: it holds its memory, takes no CPU, and is woken when it is
    needed. 0: never."""
    max_uses: int = 0
    """Sessions after which a worker is replaced; 0 is never, 1 gives each session a fresh one."""
    learns_slots: bool = False
    """Whether ``slots`` is only what holds until a worker has told its capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one worker may use."""

    memory_bytes: int = 512 * 2**20
    cpus: float = 1.0
    pids: int = 256
    tmp_bytes: int = 64 * 2**20
    """Size of the tmpfs at /tmp, the only place besides its socket directory where a hardened worker can write."""
    gpus: int = 0
    """GPUs that it gets, by a Docker device request; ``ALL_GPUS``: all of the machine's."""
    gpu_ids: tuple[str, ...] = ()
    """Certain GPUs instead (their UUIDs or indices), all of which it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long things of an environment may take, in seconds."""

    idle_s: float = 300.0
    """A session ends this long after the end of its last call."""
    start_s: float = 60.0
    """From asking the backend for a worker to its first answer."""
    open_s: float = 60.0
    """How long a create waits for a free slot."""
    setup_s: float = 60.0
    """How long a worker may take to answer that a session is open (not the task's own setup, which runs after it)."""
    call_s: float = 3600.0
    """The longest call."""
    close_s: float = 30.0
    """The longest teardown of a session."""
    together_s: float = 10.0
    """How long free slots are kept for a group of openings: until there are enough for all of it, and then until the
    last of it has come. 0: each begins by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxations:
    """What an environment needs beyond the hardened default; each is printed by ``gateway check``."""

    user: str = "10001:10001"
    writable_root: bool = False
    network: str = "none"
    capabilities: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Name what differs from the hardened default."""
        default = Relaxations()
        found = []
        if self.user != default.user:
            found.append(f"user={self.user}")
        if self.writable_root:
            found.append("writable root")
        if self.network != default.network:
            found.append(f"network={self.network}")
        found += [f"capability {name}" for name in self.capabilities]
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one session's sandbox may use; 0 leaves it to the environment's server."""

    memory_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    """What may be written; it is memory."""
    cpu_s: int = 0
    """CPU seconds of one process."""


class ObservationType(StrEnum):
    """What AReaL's clients get to see."""

    TEXT = "text"
    MESSAGES = "messages"  #: a conversation as the first observation, text after it
    JSON = "json"  #: the structured observation where the environment gives one
    IMAGE = "image"  #: the last image where there is one, else text


class ActionType(StrEnum):
    """What AReaL's clients are told to send; both are understood."""

    TEXT = "text"
    STRUCTURED = "structured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Areal:
    """How an environment is offered over AReaL's task server API, whose requests say so little."""

    name: str = ""
    """What ``task/info`` calls it; empty: the environment's name."""
    description: str = ""
    """One line for humans; empty: the environment's description."""
    split: str = "train"
    """The split that integers mean, and that is counted in ``num_samples``."""
    max_turns: int = 20
    """Steps of an episode; 20 is the turn limit that the client itself has unless it is told another."""
    observation_type: ObservationType = ObservationType.TEXT
    action_type: ActionType = ActionType.TEXT
    start_s: float = 50.0
    """The longest start, the wait for a slot included: below the 60 s after which the client gives up."""
    step_s: float = 50.0
    """The longest step, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnv:
    """How an environment is offered to OpenEnv's clients, who wait 60 s for each reply and send few words."""

    split: str = "train"
    """Where a reset that names no task takes one from."""
    reset_s: float = 50.0
    """The longest reset, the wait for a slot included: below the 60 s after which the client gives up."""
    step_s: float = 50.0
    """The longest step, for the same reason."""
    task_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of a reset that select a task: key → the place in the task that has its value (``config.task_name``)."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """Where the server of an image that somebody else made is found; by default it is one of our own images'."""

    port: int = 0
    """The TCP port that it listens on; 0: it listens on the Unix socket that it is given, as our own images do."""
    url: str = ""
    """Of a server that somebody else runs, ``http://host:port/prefix``: no worker is started. Empty: workers are."""
    ready: str = ""
    """A path that answers 200 once the server is up, asked before the protocol's own check; empty: only that."""

    @cached_property
    def is_foreign(self) -> bool:
        """Whether it is not one of our own images: no token, no session list, no seed beside the standard."""
        return bool(self.port or self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Something of the engine's machine that workers see."""

    source: str
    """An absolute path there, or the name of a volume."""
    target: str
    """Where workers find it."""
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMapping:
    """What a text, or an object that names no tool, means to a server that knows tool calls only."""

    default_tool: str = ""
    """The tool that they are an input of; empty: the only one that there is."""
    text_field: str = ""
    """The field of its input that a text fills; empty: the only one that must be given and is a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetMapping:
    """What the ``reset`` of an OpenEnv image understands: it drops everything else without a word."""

    keys: tuple[str, ...] = ("seed", "episode_id")
    """The arguments that it looks at."""
    from_task: Mapping[str, str] = field(default_factory=dict)
    """Argument → place in the task, keys joined by dots: ``{"task_name": "environment_config.page"}``."""
    seeds: int = 1000
    """How many tasks an image has that has none of its own: they are told apart by their seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomTasks:
    """Task modules of an operator's, in a folder that workers see read-only at ``/opt/openenv/custom_tasks``."""

    module: str
    """What workers import at their start: dotted names, comma-separated (``OPENENV_TASK_MODULE``)."""
    folder: str
    """Its name below the folder of all environments' custom tasks."""
    content: str = ""
    """Digest of what is in it; empty: not read yet, or there is no such folder."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A kind of problem world: what is written in its ``environment.toml``."""

    name: EnvironmentName
    image: str
    """Empty: it runs as local processes only."""
    directory: Path
    """Where its ``environment.toml`` is; local processes run there."""
    command: tuple[str, ...]
    """Starts the server as a local process; an image has its own. Empty: it runs in its image only."""
    description: str = ""
    protocol: ServerProtocol = ServerProtocol.ORS
    isolation: Isolation = Isolation.SHARED
    upstream_name: str = ""
    """Its name in the worker's protocol; empty: the same as ours."""
    variables: Mapping[str, str] = field(default_factory=dict)
    platform_keys: bool = False
    """Whether its sessions get the caller's own platform key, which one SDK adds to every session's secrets."""
    pool: PoolPolicy = PoolPolicy()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    loosened: Relaxations = Relaxations()
    sandbox: SandboxLimits = SandboxLimits()
    areal: Areal = Areal()
    openenv: OpenEnv = OpenEnv()
    server: Server = Server()
    actions: ActionMapping = ActionMapping()
    resets: ResetMapping = ResetMapping()
    volumes: tuple[Volume, ...] = ()
    """Only containers have them."""
    tasks: Path | None = None
    """The folder of its ``<split>.jsonl`` files."""
    env_types: tuple[str, ...] = ()
    """Other names of it that tasks may bear as their ``env_type``."""
    custom_tasks: CustomTasks | None = None
    image_id: str = ""
    """What the engine says that the image is now (``sha256:…``); empty: not asked yet, or it has none."""
    splits: Mapping[str, Environment] = field(default_factory=dict)
    """By split, where sessions of that split get other resources: an environment of its own, with a pool of its own,
    whose name is this one's, a dot and the split's. No trainer addresses it by that name."""
    base: EnvironmentName = _NO_NAME
    """Of such a one: the name of the environment that it belongs to."""

    @cached_property
    def worker_name(self) -> str:
        """The name to use towards its workers."""
        return self.upstream_name or self.base or self.name

    @property
    def needs_an_engine(self) -> bool:
        """Whether it runs in its image only: not as a local process, and nobody else runs it."""
        return not self.command and not self.server.url

    @cached_property
    def wire(self) -> UpstreamKind:
        """The upstream that speaks to its workers."""
        return UpstreamKind(self.protocol.value) if self.server.is_foreign else UpstreamKind.OWN

    def digest(self) -> str:
        """Name what a worker was made from: workers of another digest are not given new sessions.

        Pool policy (other than slots), timeouts, description, tasks, mappings and what a front shows may change
        without new workers.
        """
        parts = [
            self.name,
            self.image,
            self.command,
            self.protocol,
            self.isolation,
            self.upstream_name,
            sorted(self.variables.items()),
            self.pool.slots,
            [self.limits.memory_bytes, self.limits.cpus, self.limits.pids, self.limits.tmp_bytes],
            self.loosened.words(),
            [self.sandbox.memory_bytes, self.sandbox.pids, self.sandbox.disk_bytes, self.sandbox.cpu_s],
        ]
        if self.server != Server():
            parts.append([self.server.port, self.server.url])
        if self.volumes:
            parts.append([[one.source, one.target, one.read_only] for one in self.volumes])
        if self.limits.gpus or self.limits.gpu_ids:
            parts.append([self.limits.gpus, list(self.limits.gpu_ids)])
        if self.image_id:
            parts.append(self.image_id)
        if self.custom_tasks is not None:
            parts.append([self.custom_tasks.module, self.custom_tasks.folder, self.custom_tasks.content])
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]
