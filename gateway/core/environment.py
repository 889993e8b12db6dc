"""Environments: the server that workers run, the resources that they get, and their settings for each protocol.

Frozen values.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.core.ids import EnvironmentName, Owner

TaskSpec = Mapping[str, Any]
"""A task in the format of its environment: a JSON object that is opaque to the gateway."""
_NO_NAME = EnvironmentName("")
ALL_GPUS = -1
TENANT_MARK = "@"
"""Character between an environment's name and its tenant. It occurs in no name of an environment, split or key."""


class ServerProtocol(StrEnum):
    """The protocol that a worker's server speaks."""

    ORS = "ors"
    OPENENV = "openenv"
    AREAL = "areal"
    NEMO = "nemo"


class UpstreamKind(StrEnum):
    """The upstream that the gateway uses towards a worker."""

    OWN = "own"  #: ORS with the extensions of the gateway's own images
    ORS = "ors"  #: a standard ORS server
    OPENENV = "openenv"
    AREAL = "areal"
    NEMO = "nemo"  #: NeMo Gym's resources servers


class Isolation(StrEnum):
    """How concurrent sessions of one environment are separated from each other."""

    SHARED = "shared"  #: each session is an object in a worker that serves many sessions
    SANDBOX = "sandbox"  #: each session has its own sandbox in a worker that serves many sessions
    EXCLUSIVE = "exclusive"  #: each session has its own worker, which is destroyed after it


class SeedRule(StrEnum):
    """The seed of an episode whose trainer gives none."""

    TASK = "task"  #: a listed task has a seed of its own, so it begins alike every time
    DRAWN = "drawn"  #: members of a group share a seed, and every other episode gets a random one


class TaskView(StrEnum):
    """What a listing shows of the environment's tasks to a trainer's key."""

    PUBLIC = "public"  #: no answers, hidden tests, reference solutions and reward arguments
    FULL = "full"  #: complete tasks


class StepLogging(StrEnum):
    """What the step log keeps of an environment's episodes."""

    OFF = "off"  #: nothing
    SAMPLED = "sampled"  #: begin and end of each episode, and the calls of a share of the episodes
    FULL = "full"  #: begin, end and calls of each episode


class SplitType(StrEnum):
    """The purpose of a split."""

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
    """The number of workers of an environment, and of sessions in each worker."""

    slots: int = 16
    """Maximum number of concurrent sessions in one worker."""
    min_workers: int = 0
    """Number of workers that the pool keeps even if they are idle."""
    max_workers: int = 4
    """Maximum number of live workers of the current revision, including workers that start, pause or drain. During a
    rollout, as many workers of the old revision may run as well, until their sessions have ended."""
    warm: int = 0
    """Minimum number of free slots to keep ready. The pool also keeps as many free slots as openings arrive while a
    worker starts."""
    idle_worker_s: float = 60.0
    """Seconds without a session after which a worker above ``min_workers`` is retired."""
    pause_idle_s: float = 0.0
    """Seconds without a session after which a worker is paused; 0 means never. A paused worker keeps its memory and
    takes no CPU. The control loop wakes it when its slots are needed."""
    max_uses: int = 0
    """Sessions after which a worker is replaced: 0 means never, 1 gives each session a fresh worker."""
    learns_slots: bool = False
    """True if ``slots`` is only an assumption that holds until a worker has reported its capacity."""
    is_separate: bool = False
    """True if each trainer's key has workers of its own, up to ``max_workers``. Sessions of different keys then
    share no process and no container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of one worker."""

    memory_bytes: int = 512 * 2**20
    cpus: float = 1.0
    pids: int = 256
    tmp_bytes: int = 64 * 2**20
    """Size of the tmpfs at /tmp. A hardened worker can write only there and in its socket directory."""
    gpus: int = 0
    """Number of GPUs, which a Docker device request assigns. ``ALL_GPUS`` means all GPUs of the machine."""
    gpu_ids: tuple[str, ...] = ()
    """UUIDs or indices of specific GPUs, used instead of ``gpus``. The worker gets all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Time limits of an environment, in seconds."""

    idle_s: float = 300.0
    """Seconds after the end of its last call after which a session expires."""
    start_s: float = 60.0
    """Seconds from the request to the backend for a worker to the worker's first answer."""
    open_s: float = 60.0
    """Seconds that a create waits for a free slot."""
    setup_s: float = 60.0
    """Seconds that a worker may take to confirm that a session is open. The task's own setup runs later and does not
    count."""
    call_s: float = 3600.0
    """Maximum duration of a call."""
    close_s: float = 30.0
    """Maximum duration of a session's teardown."""
    judge_s: float = 0.0
    """Maximum seconds for which the environment judges an episode, as its author declares. Each frontend's limit of a
    step must be longer, because a step that is cut off loses the episode's reward."""
    together_s: float = 10.0
    """Seconds for which free slots are kept for a group of openings. They are kept until there are enough for the whole
    group, and then until its last opening has arrived. 0: each opening starts independently."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxations:
    """The exceptions of an environment from the hardened default; ``gateway check`` prints each of them."""

    user: str = "10001:10001"
    writable_root: bool = False
    network: str = "none"
    capabilities: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Return a description of each exception from the hardened default."""
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
    """Resource limits of one session's sandbox; 0 leaves the limit to the environment's server."""

    memory_bytes: int = 0
    pids: int = 0
    disk_bytes: int = 0
    """Bytes that the session may write; they are held in memory."""
    cpu_s: int = 0
    """CPU seconds of one process."""


class ObservationType(StrEnum):
    """The format of the observations that AReaL clients receive."""

    TEXT = "text"
    MESSAGES = "messages"  #: a conversation as the first observation, text after it
    JSON = "json"  #: the structured observation, if the environment provides it
    IMAGE = "image"  #: the last image, or text if there is no image


class ActionType(StrEnum):
    """The action format that AReaL clients are asked to send; the gateway accepts both."""

    TEXT = "text"
    STRUCTURED = "structured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Areal:
    """Settings of an environment in AReaL's task server API, whose requests carry few parameters."""

    name: str = ""
    """Name in ``task/info``; empty: the environment's name."""
    description: str = ""
    """One line for humans; empty: the environment's description."""
    split: str = "train"
    """The split to which integer task ids refer, and whose tasks ``num_samples`` counts."""
    max_turns: int | None = 20
    """Maximum number of steps in an episode. 20 is also the client's own default. None: the server's own limit."""
    sample_ids: str | tuple[str, ...] = "{}"
    """Names of the samples of an AReaL server: a format of their numbers from 0, or a list. Empty: they are unknown, so
    that the server has no split, and a task has to name its sample."""
    observation_type: ObservationType = ObservationType.TEXT
    action_type: ActionType = ActionType.TEXT
    start_s: float = 50.0
    """Maximum seconds for a start, including the wait for a slot. It is below the 60 s after which the client gives
    up."""
    step_s: float = 50.0
    """Maximum seconds for a step. It is below the client's timeout of 60 s too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnv:
    """Settings of an environment for OpenEnv clients, which wait 60 s for each reply and send few parameters."""

    split: str = "train"
    """The split from which a reset that names no task takes its task."""
    reset_s: float = 50.0
    """Maximum seconds for a reset, including the wait for a slot. It is below the 60 s after which the client gives
    up."""
    step_s: float = 50.0
    """Maximum seconds for a step. It is below the client's timeout of 60 s too."""
    task_keys: Mapping[str, str] = field(default_factory=dict)
    """Keys of a reset that select a task. Each key maps to the path of the value in the task (``config.task_name``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nemo:
    """Settings of an environment for NeMo Gym's agents."""

    final_text: bool | None = None
    """Whether the text of an agent that calls no more tools is an answer. None: on our own servers, and on ORS servers
    for their terminal tool."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """How the gateway reaches a server; the default is the Unix socket of the gateway's own images."""

    port: int = 0
    """TCP port on which the server listens. 0: it listens on the Unix socket that it is given, as the gateway's own
    images do."""
    url: str = ""
    """URL of an external server, ``http://host:port/prefix``, for which the gateway starts no worker. Empty: the
    gateway starts workers."""
    ready: str = ""
    """Path that answers 200 once the server is up. The gateway requests it before the protocol's own check. Empty: only
    the protocol's own check runs."""

    @cached_property
    def is_foreign(self) -> bool:
        """True for a third-party server, which has no token, no session list and no seed beyond the standard."""
        return bool(self.port or self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """A path or volume on the engine's machine that is mounted into workers."""

    source: str
    """Absolute path on the engine's machine, or the name of a volume."""
    target: str
    """Mount point inside workers."""
    read_only: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMapping:
    """How a text, or an object that names no tool, becomes a tool call for a server that accepts only tool calls."""

    default_tool: str = ""
    """The tool that receives them as its input; empty: the server's only tool."""
    text_field: str = ""
    """The input field that receives a text; empty: the only field that is required and is a string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationMapping:
    """How an OpenEnv server's observations become texts and images, for clients of other protocols.

    Fields have paths: ``question``, ``metadata.prompt``.
    """

    text: tuple[str, ...] = ()
    """Fields that come first, in this order and without their names; empty: the usual ones. All others follow."""
    images: tuple[str, ...] = ()
    """Fields with an image that is not recognized as one, such as rows of gray values."""
    hide: tuple[str, ...] = ()
    """Fields that the agent does not see; ``metadata`` stands for all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetMapping:
    """The arguments of an OpenEnv server's ``reset``. The server silently drops all other arguments."""

    keys: tuple[str, ...] = ("seed", "episode_id")
    """Names of the arguments that the server reads."""
    from_task: Mapping[str, str] = field(default_factory=dict)
    """Maps an argument to a path in the task, keys joined by dots: ``{"task_name": "environment_config.page"}``."""
    seeds: int = 1000
    """Number of tasks of a server that has no tasks of its own. Such tasks differ only in their seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomTasks:
    """Task modules of an operator, in a folder that workers mount read-only at ``/opt/openenv/custom_tasks``."""

    module: str
    """Modules that workers import at their start: dotted names, comma-separated (``OPENENV_TASK_MODULE``)."""
    folder: str
    """Name of the folder below the folder of all environments' custom tasks."""
    content: str = ""
    """Digest of the folder's content; empty: not read yet, or there is no such folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scorer:
    """The parts of an own image that judge episodes. The server hashes them into the version of its scorer.

    Without ``files``, all modules of the server count. A third-party image's version is the image's id.
    """

    files: tuple[str, ...] = ()
    """Patterns of paths, relative to the server's folder, or ``envserver/…`` for files of the environment server."""
    packages: tuple[str, ...] = ()
    """Names of installed Python packages with which the server judges."""


class Unexpected(StrEnum):
    """What an exception in a tool of an own image means that is no ``ToolError``."""

    MARK = "mark"  #: the agent reads it and may go on; the episode is marked, and left out of records and means
    FAIL = "fail"  #: the episode ends by its author's fault
    AGENT = "agent"  #: an error of the agent, as a ``ToolError``


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogPolicy:
    """What the step log keeps of an environment's episodes."""

    mode: StepLogging = StepLogging.FULL
    share: float = 0.1
    """Share of the episodes whose calls are kept with ``sampled``, between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The definition of an environment, as its ``environment.toml`` states it."""

    name: EnvironmentName
    image: str
    """Image of its workers; empty: it runs only as local processes."""
    directory: Path
    """Folder of its ``environment.toml``; local processes run there."""
    command: tuple[str, ...]
    """Command that starts the server as a local process. Empty: it runs only in its image, which has its own
    command."""
    description: str = ""
    protocol: ServerProtocol = ServerProtocol.ORS
    isolation: Isolation = Isolation.SHARED
    upstream_name: str = ""
    """Its name in the worker's protocol; empty: the gateway's name for it."""
    variables: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Where the gateway reads a secret of all sessions, by the secret's name: ``env:VARIABLE`` or ``file:PATH``. A
    trainer's secret of the same name takes precedence."""
    platform_keys: bool = False
    """True if sessions receive the caller's platform key, which one SDK adds to every session's secrets."""
    pool: PoolPolicy = PoolPolicy()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    loosened: Relaxations = Relaxations()
    sandbox: SandboxLimits = SandboxLimits()
    areal: Areal = Areal()
    openenv: OpenEnv = OpenEnv()
    nemo: Nemo = Nemo()
    server: Server = Server()
    actions: ActionMapping = ActionMapping()
    resets: ResetMapping = ResetMapping()
    observations: ObservationMapping = ObservationMapping()
    volumes: tuple[Volume, ...] = ()
    """Mounts of its containers; local processes have none."""
    tasks: Path | None = None
    """Folder of its ``<split>.jsonl`` files."""
    env_types: tuple[str, ...] = ()
    """Alternative names of the environment that tasks may use as their ``env_type``."""
    task_view: TaskView = TaskView.PUBLIC
    seed_rule: SeedRule = SeedRule.TASK
    public_fields: tuple[str, ...] = ()
    """Dotted paths of further task fields that a public listing shows."""
    custom_tasks: CustomTasks | None = None
    scorer: Scorer = Scorer()
    unexpected: Unexpected = Unexpected.MARK
    step_log: StepLogPolicy = StepLogPolicy()
    image_id: str = ""
    """The engine's current id of the image (``sha256:…``); empty: not queried yet, or there is no image."""
    splits: Mapping[str, Environment] = field(default_factory=dict)
    """Variants by split, for splits whose sessions get other resources. A variant is an environment with its own pool,
    named ``<environment>.<split>``. Trainers do not address it by that name."""
    tenants: Mapping[Owner, Environment] = field(default_factory=dict)
    """Variants by key, if the pool is separate: environments with pools of their own, named ``<environment>@<key>``.
    The catalog derives them from the keys."""
    base: EnvironmentName = _NO_NAME
    """Name of the environment that a variant belongs to; empty: this environment is not a variant."""

    @cached_property
    def worker_name(self) -> str:
        """The environment's name in requests to its workers."""
        return self.upstream_name or self.base or self.name

    @property
    def needs_an_engine(self) -> bool:
        """True if it runs only in its image: it has no command for a local process and no external server."""
        return not self.command and not self.server.url

    @cached_property
    def wire(self) -> UpstreamKind:
        """The upstream for its workers."""
        return UpstreamKind(self.protocol.value) if self.server.is_foreign else UpstreamKind.OWN

    def for_tenant(self, tag: str) -> Environment:
        """Return the variant for the sessions of one key; *tag* is its `tenant_tag`."""
        name = EnvironmentName(f"{self.name}{TENANT_MARK}{tag}")
        return replace(self, name=name, base=self.base or self.name, splits={}, tenants={})

    def digest(self) -> str:
        """Return the digest of everything that its workers are made from.

        Workers of another digest get no new sessions. A change of pool policy (except slots), timeouts, description,
        tasks, mappings, secrets of sessions or a frontend's settings needs no new workers.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
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
        if self.server.is_foreign:
            parts.append([self.server.port, self.server.url])
        if self.volumes:
            parts.append([[one.source, one.target, one.read_only] for one in self.volumes])
        if self.limits.gpus or self.limits.gpu_ids:
            parts.append([self.limits.gpus, list(self.limits.gpu_ids)])
        if self.image_id:
            parts.append(self.image_id)
        if self.scorer != Scorer():
            parts.append([self.scorer.files, self.scorer.packages])
        if self.unexpected is not Unexpected.MARK:
            parts.append([self.unexpected.value])
        if self.custom_tasks is not None:
            parts.append([self.custom_tasks.module, self.custom_tasks.folder, self.custom_tasks.content])
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def tenant_tag(owner: Owner) -> str:
    """Return the part of a variant's name that stands for the key *owner*: its name, or a digest of another name."""
    if re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,31}", owner):
        return owner
    return "k." + hashlib.sha256(owner.encode("utf-8", "surrogatepass")).hexdigest()[:16]
