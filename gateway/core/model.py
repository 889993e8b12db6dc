"""The nouns: environment, task, session, worker. Frozen values; whoever changes one makes a new one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NewType

from gateway.core.faults import Fault, FaultKind

EnvironmentName = NewType("EnvironmentName", str)
WorkerId = NewType("WorkerId", str)
SessionId = NewType("SessionId", str)
Owner = NewType("Owner", str)
"""The name of the key that a session belongs to; ``""`` where no keys are configured."""
TaskSpec = Mapping[str, Any]
"""A task as its environment designed it: a JSON object that is opaque to the gateway."""


ALL_GPUS = -1
TOOL_FAILED: Final = "tool_failed"
"""The reason of a result whose tool raised an exception."""
EPISODE_FINISHED: Final = "episode_finished"
"""The reason of a result for which nothing ran, as the episode was over."""


class Protocol(StrEnum):
    """What a worker speaks."""

    ORS = "ors"
    OPENENV = "openenv"
    AREAL = "areal"


class Wire(StrEnum):
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
class Loosened:
    """What an environment needs beyond the hardened default; each is printed by ``gateway check``."""

    user: str = "10001:10001"
    writable_root: bool = False
    network: str = "none"
    capabilities: tuple[str, ...] = ()

    def words(self) -> tuple[str, ...]:
        """Name what differs from the hardened default."""
        default = Loosened()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the server of an image that somebody else made is found; by default it is one of our own images'."""

    port: int = 0
    """The TCP port that it listens on; 0: it listens on the Unix socket that it is given, as our own images do."""
    url: str = ""
    """Of a server that somebody else runs, ``http://host:port/prefix``: no worker is started. Empty: workers are."""
    ready: str = ""
    """A path that answers 200 once the server is up, asked before the protocol's own check; empty: only that."""

    @property
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    protocol: Protocol = Protocol.ORS
    isolation: Isolation = Isolation.SHARED
    upstream_name: str = ""
    """Its name in the worker's protocol; empty: the same as ours."""
    variables: Mapping[str, str] = field(default_factory=dict)
    platform_keys: bool = False
    """Whether its sessions get the caller's own platform key, which one SDK adds to every session's secrets."""
    pool: PoolPolicy = PoolPolicy()
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    loosened: Loosened = Loosened()
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
    base: EnvironmentName = EnvironmentName("")
    """Of such a one: the name of the environment that it belongs to."""

    def for_split(self, split: str) -> Environment:
        """The environment that a session of *split* runs in: this one, unless the split asks for other resources."""
        return self.splits.get(split, self)

    @property
    def worker_name(self) -> str:
        """The name to use towards its workers."""
        return self.upstream_name or self.base or self.name

    @property
    def needs_an_engine(self) -> bool:
        """Whether it runs in its image only: not as a local process, and nobody else runs it."""
        return not self.command and not self.server.url

    @property
    def wire(self) -> Wire:
        """The upstream that speaks to its workers."""
        return Wire(self.protocol.value) if self.server.is_foreign else Wire.OWN

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


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"  #: asked of the backend, not ready yet; holds no session
    READY = "ready"  #: takes sessions
    PAUSED = "paused"  #: idle and frozen: holds no session, and takes none until it is woken
    SUSPECT = "suspect"  #: it does not answer: keeps the sessions it has, and takes no more until it does
    DRAINING = "draining"  #: serves the sessions it has and takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A running container, or a local process, of an environment."""

    id: WorkerId
    environment: EnvironmentName
    digest: str
    slots: int
    max_uses: int = 0
    address: str = ""
    """``unix:PATH``, ``tcp:HOST:PORT``, or a static server's URL (``http://…``); empty while it starts."""
    state: WorkerState = WorkerState.STARTING


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """A worker as the store sees it."""

    worker: Worker
    used: int
    """Slots that are held."""
    idle_s: float
    """Since when none was held; 0 while one is."""
    age_s: float
    """Since it was added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentLoad:
    """What the control loop decides from, for one environment."""

    workers: tuple[WorkerLoad, ...] = ()
    waiting: int = 0
    """Openings that wait for a slot."""
    to_come: int = 0
    """Openings of groups that have not come yet: slots are kept for them, or waited for."""
    arrivals: int = 0
    """Openings that ever asked for a slot; counts from 0 again where the store lost its data."""
    hits: int = 0
    """Those of them that got one at once."""
    broken_s: float = 0.0
    """How much longer its breaker is open: until then openings that find no free slot fail at once."""

    @property
    def wanted(self) -> int:
        """Slots for openings that wait or are to come."""
        return self.waiting + self.to_come


@dataclass(frozen=True, slots=True)
class Lead:
    """What a replica is to the control loop."""

    fence: int
    """0: another replica leads. Else the number of this lead: each new leader's is higher, and what an old one still
    wants to change is refused."""
    is_whole: bool = True
    """Whether the store holds everything. False after it lost data: nothing may be decided from what it lacks until
    the leader has rebuilt it."""


@dataclass(frozen=True, slots=True)
class Death:
    """A worker that ended, whoever ended it."""

    id: WorkerId
    reason: CloseReason
    """``WORKER_LOST``, or ``OUT_OF_MEMORY`` where the kernel took it for its memory limit."""
    detail: str = ""
    """For logs: the exit status, the signal."""


class SessionState(StrEnum):
    """Where a session is in its life; it holds a slot in the first three."""

    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class CloseReason(StrEnum):
    """Why a session ended."""

    DELETED = "deleted"  #: by its trainer; from then on it is "not found"
    CANCELLED = "cancelled"  #: thrown away by its trainer: what was done in it counts for nothing; "not found" too
    EXPIRED = "expired"  #: idle for longer than its environment allows
    WORKER_LOST = "worker_lost"  #: its container or process died
    OUT_OF_MEMORY = "out_of_memory"  #: its container or process died for want of memory
    TIMEOUT = "timeout"  #: a call in it took longer than its environment allows: nobody knows what it did
    AUTHOR_FAULT = "author_fault"  #: the environment author's code failed: a reset, a judge, a tool at the end
    SESSION_FAILED = "session_failed"  #: what it needs in its worker broke: its sandbox, its browser
    OPEN_FAILED = "open_failed"  #: the worker could not set it up, or the trainer hung up before it was open
    SHUTDOWN = "shutdown"  #: the gateway went away together with its local workers
    OPERATOR = "operator"  #: ended by an operator

    @property
    def is_trainers(self) -> bool:
        """Whether its trainer ended it, and so is told of none from then on."""
        return self in (CloseReason.DELETED, CloseReason.CANCELLED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The wish for a session, as handed to the store."""

    id: SessionId
    name: str
    """The id as the trainer knows it."""
    owner: Owner
    environment: EnvironmentName
    lease: str
    """Unique to this wish: a late release of an earlier holder of the same id cannot touch this one's slot."""
    fingerprint: str
    """Of the request: the same again is an identical retry."""
    idle_s: float
    setup_s: float
    task: str = ""
    """``split/index`` or a task's id, for people; never the task itself."""
    episode: str = ""
    """The trainer's own name for the episode, where its protocol has one that the session's name is not."""
    policy: str = ""
    """The trainer's tag of the policy that plays it; empty: none was given."""
    group: str = ""
    """Of openings that begin together; all of one group have the same owner and environment. Empty: it is by itself."""
    group_size: int = 1
    """How many of it there will be, as far as the environment can hold them at once."""
    together_s: float = 0.0
    """How long slots are kept for its group: until there are enough, and then until all have come."""
    is_use: bool = True
    """Whether it counts against ``max_uses``; False: the gateway asks the worker a question, and opens no session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One episode on one task."""

    id: SessionId
    name: str
    owner: Owner
    environment: EnvironmentName
    lease: str
    fingerprint: str
    idle_s: float
    worker: WorkerId
    address: str
    state: SessionState
    task: str = ""
    episode: str = ""
    policy: str = ""
    reason: CloseReason | None = None
    handle: str = ""
    """What its upstream needs to find the episode again, from any replica; the upstream's own text."""


@dataclass(frozen=True, slots=True)
class Note:
    """What a replica saw of one session since its last note."""

    id: SessionId
    quiet_s: float
    """Seconds since the end of its last call or touch; 0 while a call runs."""


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session is no longer to be served from a cache; one of its id under another lease is not meant."""

    id: SessionId
    lease: str


@dataclass(frozen=True, slots=True)
class CapacityWanted:
    """An opening waits for a slot of this environment, or a worker of it is to be stopped."""

    environment: EnvironmentName


Notice = SessionEnded | CapacityWanted


@dataclass(frozen=True, slots=True)
class Group:
    """Openings that should begin together, as the episodes of one GRPO group do."""

    name: str
    """Unique among the groups of one owner in one environment."""
    size: int
    """How many openings there will be."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """An opening's place in the group of a curriculum's handle."""

    curriculum: str
    handle: int
    member: str
    number: int = -1
    """Of the group's draw; -1: it is not known."""
    group_size: int = 1

    @property
    def group(self) -> Group | None:
        """Those that opened the handle for the same draw."""
        return None if self.number < 0 else Group(f"{self.curriculum}/{self.handle}/{self.number}", self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a worker needs to set a session up; secrets are neither stored nor shown."""

    spec: TaskSpec
    seed: int | None = None
    config: Mapping[str, Any] | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    split: str = ""
    """Where the task stands, if it was asked for by its place; empty: it was not."""
    index: int | None = None
    """Its place in *split*."""
    episode: str = ""
    """The trainer's own name for the episode, where its protocol has one."""
    toolset: str = ""
    """Further tools of an ORS server's own that the trainer asks for by their name; empty: none."""
    of_split: str = ""
    """The split that the task is of, whoever has it; it decides what resources the session gets. Empty: not known."""
    policy: str = ""
    """The trainer's tag of the policy that plays the episode; empty: none was given."""
    group: Group | None = None
    """That the trainer said; a curriculum's own is its ticket's."""
    ticket: Ticket | None = None
    """Of a task that was drawn from a curriculum: the place in its group, to be given back if nothing is opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an agent does, in one of three spellings, of which exactly one is given."""

    name: str | None = None
    """Of a tool; *arguments* are its input."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    text: str | None = None
    """Free text, which the environment understands or refuses."""
    fields: Mapping[str, Any] | None = None
    """A gym-style object, for the environment's default tool."""

    def __post_init__(self) -> None:
        """Refuse none, or more than one, of the spellings."""
        if sum(given is not None for given in (self.name, self.text, self.fields)) != 1:
            raise ValueError("an action is a tool call, a text or an object: exactly one of them")


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A piece of text that the agent sees; *detail* is free JSON."""

    text: str
    detail: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image that the agent sees: *data* in base64."""

    data: str
    mime_type: str
    detail: Mapping[str, Any] | None = None


Block = TextBlock | ImageBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What came of an action. A tool that failed or was refused is a result too: the agent reads *error*."""

    blocks: tuple[Block, ...] = ()
    reward: float | None = None
    """Finite; None says "no reward here", which is not the same as 0.0."""
    finished: bool = False
    metadata: Mapping[str, Any] | None = None
    data: Any = None
    """A structured observation."""
    error: str | None = None
    """Why no tool ran, or how it failed."""
    reason: str = ""
    """Of an error, in one word: ``input_validation``, ``not_found``, ``tool_failed``, ``episode_finished`` …"""
    turn: int | None = None
    """Which of its session's turns this was, from 1 on, as its worker counts them; None: the worker does not count."""
    rewarded: bool | None = None
    """Of one that ended its episode: whether any turn of it gave a reward; None: the worker does not say."""
    faults: tuple[Fault, ...] = ()
    """What the worker tells of the author's code besides: for operators, never for agents and trainers."""

    @property
    def is_fault(self) -> bool:
        """Whether the tool itself failed, so that this is no doing of the agent's."""
        return self.reason == TOOL_FAILED


class FaultReply(bytes):
    """A worker's answer in its own protocol's words, which tells of faults."""

    faults: tuple[Fault, ...] = ()
    """As of `StepResult`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How an episode went, as its worker tells when it is closed."""

    reward: float
    finished: bool
    steps: int
    seconds: float
    is_rewarded: bool = True
    """Whether any of its steps gave a reward, be it 0: *reward* is no more than a sum of none otherwise."""
    is_judged: bool = False
    """Whether its environment judges groups of episodes: then one may end without a reward of its own."""
    is_whole: bool = True
    """False: a part of it is not known here, as another replica saw it; then *reward* is no reward."""
    fault: FaultKind | None = None
    """Who is at fault, where it ended with a fault: its setup or its last step failed."""
    faults: tuple[Fault, ...] = ()
    """As of `StepResult`: those that were told with no answer before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSession:
    """One entry of a worker's own list of sessions."""

    id: SessionId
    busy: bool
    steps: int
    idle_s: float
    session: Session | None = None
    """The session as the store knew it when it was opened, which the worker kept for us; None: it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The tasks that an environment's workers know by themselves: built in, or from an operator's modules."""

    tasks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By id; of each what people are shown (``name``, ``description``, ``tags`` …), never the task itself."""
    failed: Mapping[str, str] = field(default_factory=dict)
    """Modules that did not import, and why."""
    config_keys: tuple[str, ...] | None = None
    """Keys that the environment reads of an episode's configuration; None: the worker does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A worker that the backend knows of."""

    id: WorkerId
    environment: EnvironmentName
    digest: str
    address: str
    running: bool


def session_id(owner: Owner, name: str) -> SessionId:
    """Derive the id under which a trainer's *name* for a session is kept.

    Trainers choose names freely, so two keys may choose the same one: the id covers the owner, is short, and is safe in
    any key, header or path (32 hexadecimal digits).
    """
    return SessionId(hashlib.sha256(f"{owner}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()[:32])
