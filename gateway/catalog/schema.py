"""Defines the tables of an ``environment.toml``: their keys, and the allowed values of each key.

`gateway.catalog.toml` checks combinations of keys when it reads the file.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gateway.core.environment import (
    ActionType,
    Isolation,
    ObservationType,
    SeedRule,
    ServerProtocol,
    StepLogging,
    TaskView,
    Unexpected,
)

Gpus = Annotated[int, Field(ge=0, le=1024)]
GpuId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9:._/-]{0,127}$")]
"""A GPU's UUID or index, as ``nvidia-smi -L`` shows it."""


class Table(BaseModel):
    """Base of all tables. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


class PoolTable(Table):
    """``[pool]``: the number of workers and of sessions per worker."""

    slots: Annotated[int, Field(ge=1, le=100_000)] | Literal["learn"] | None = None
    min_workers: int = Field(default=0, ge=0)
    max_workers: int = Field(default=4, ge=1)
    warm: int = Field(default=0, ge=0)
    idle_worker_s: float = Field(default=60.0, ge=0)
    pause_idle_s: float = Field(default=0.0, ge=0)
    max_uses: int = Field(default=0, ge=0)
    tenants: Literal["shared", "separate"] = "shared"


class LimitsTable(Table):
    """``[limits]``: the resources of one worker."""

    memory_mib: int = Field(default=512, ge=16)
    cpus: float = Field(default=1.0, gt=0)
    pids: int = Field(default=256, ge=8)
    tmp_mib: int = Field(default=64, ge=1)
    gpus: Gpus | Literal["all"] = 0
    gpu_ids: tuple[GpuId, ...] = ()


class SplitTable(Table):
    """``[splits.NAME]``: resources of a split that differ from its environment; None: the environment's value."""

    cpus: float | None = Field(default=None, gt=0)
    memory_mib: int | None = Field(default=None, ge=16)
    pids: int | None = Field(default=None, ge=8)
    tmp_mib: int | None = Field(default=None, ge=1)
    gpus: Gpus | Literal["all"] | None = None
    gpu_ids: tuple[GpuId, ...] | None = None
    min_workers: int = Field(default=0, ge=0)
    max_workers: int | None = Field(default=None, ge=1)
    warm: int = Field(default=0, ge=0)


class TimeoutsTable(Table):
    """``[timeouts]``: time limits in seconds."""

    idle_s: float = Field(default=300.0, gt=0)
    start_s: float = Field(default=60.0, gt=0)
    open_s: float = Field(default=60.0, gt=0)
    setup_s: float = Field(default=60.0, gt=0)
    call_s: float = Field(default=3600.0, gt=0)
    close_s: float = Field(default=30.0, gt=0)
    judge_s: float = Field(default=0.0, ge=0)
    together_s: float = Field(default=10.0, ge=0)


class LoosenedTable(Table):
    """``[loosened]``: privileges beyond the hardened default."""

    user: str = Field(default="10001:10001", pattern=r"^\d+:\d+$")
    writable_root: bool = False
    network: str = Field(default="none", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$")
    capabilities: tuple[str, ...] = ()


class SandboxTable(Table):
    """``[sandbox]``: limits of one session's sandbox; None: the environment server's default."""

    memory_mib: int | None = Field(default=None, ge=16)
    pids: int | None = Field(default=None, ge=8)
    disk_mib: int | None = Field(default=None, ge=1)
    cpu_s: int | None = Field(default=None, ge=1)


def _is_format(text: str) -> str:
    """Return *text* if it names samples by their numbers. Raises ``ValueError``."""
    try:
        differs = not text or text.format(0) != text.format(1)
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{text!r} is not a format of a number: {error}") from None
    if not differs:
        raise ValueError(f"{text!r} gives each sample the same name; write {{}} or {{:05d}} where its number stands")
    return text


class ArealTable(Table):
    """``[areal]``: options of AReaL's task server API."""

    name: str = ""
    description: str = ""
    split: str = Field(default="train", min_length=1)
    max_turns: int | None = Field(default=None, ge=1)
    sample_ids: Annotated[str, AfterValidator(_is_format)] | tuple[str, ...] = "{}"
    observation_type: ObservationType = ObservationType.TEXT
    action_type: ActionType = ActionType.TEXT
    start_s: float = Field(default=50.0, gt=0)
    step_s: float = Field(default=50.0, gt=0)


class OpenEnvTable(Table):
    """``[openenv]``: options for OpenEnv clients."""

    split: str = Field(default="train", min_length=1)
    reset_s: float = Field(default=50.0, gt=0)
    step_s: float = Field(default=50.0, gt=0)
    task_keys: dict[str, Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")]] = Field(default_factory=dict)


class NemoTable(Table):
    """``[nemo]``: options for NeMo Gym's agents."""

    final_text: bool | None = None


class ServerTable(Table):
    """``[server]``: the address of a third-party server."""

    port: int = Field(default=0, ge=0, le=65_535)
    url: str = Field(default="", pattern=r"^$|^https?://[^\s/?#]+(/[^\s?#]*)?$")
    ready: str = Field(default="", pattern=r"^$|^/[^\s]*$")


class ActionsTable(Table):
    """``[actions]``: the tool and field for an action that is plain text."""

    default_tool: str = ""
    text_field: str = ""


class ObservationsTable(Table):
    """``[observations]``: what an agent sees of an OpenEnv server's observations."""

    text: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()


class ResetsTable(Table):
    """``[resets]``: the reset arguments of an OpenEnv server."""

    keys: tuple[str, ...] = ("seed", "episode_id")
    from_task: dict[str, str] = Field(default_factory=dict)
    seeds: int = Field(default=1000, ge=1, le=1_000_000)


class VolumeTable(Table):
    """One entry of ``[[volumes]]``."""

    source: str = Field(pattern=r"^(/[^:]+|[a-zA-Z0-9][a-zA-Z0-9_.-]*)$")
    target: str = Field(pattern=r"^/[^:]+$")
    read_only: bool = True


class TasksTable(Table):
    """``[tasks]``: the folder of task files, and the operator's task modules."""

    directory: str | None = None
    env_types: tuple[str, ...] = ()
    view: TaskView = TaskView.PUBLIC
    seed: SeedRule = SeedRule.TASK
    public: tuple[Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")], ...] = ()
    module: str = Field(default="", pattern=r"^$|^[A-Za-z_][A-Za-z0-9_.]*(,[A-Za-z_][A-Za-z0-9_.]*)*$")
    folder: str = Field(default="", pattern=r"^$|^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")


class ScorerTable(Table):
    """``[scorer]``: the files and packages that judge episodes."""

    files: tuple[Annotated[str, Field(pattern=r"^[^/]", max_length=256)], ...] = ()
    packages: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")], ...] = ()


class ErrorsTable(Table):
    """``[errors]``: what exceptions in tools mean."""

    unexpected: Unexpected = Unexpected.MARK


class StepLogTable(Table):
    """``[step_log]``: what the step log keeps of the environment's episodes."""

    mode: StepLogging = StepLogging.FULL
    share: float = Field(default=0.1, gt=0, le=1)


SecretName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,127}$")]
SecretSource = Annotated[str, Field(pattern=r"^(env:[A-Za-z_][A-Za-z0-9_]*|file:[^\x00]+)$")]
"""Where the gateway reads a secret: ``env:VARIABLE`` or ``file:PATH``."""


class EnvironmentFile(Table):
    """The whole ``environment.toml``."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")
    image: str = ""
    description: str = ""
    protocol: ServerProtocol = ServerProtocol.ORS
    isolation: Isolation = Isolation.SHARED
    command: tuple[str, ...] | None = None
    upstream_name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    variables: dict[str, str] = Field(default_factory=dict)
    secrets: dict[SecretName, SecretSource] = Field(default_factory=dict)
    platform_keys: bool = False
    pool: PoolTable = PoolTable()
    limits: LimitsTable = LimitsTable()
    splits: dict[str, SplitTable] = Field(default_factory=dict)
    timeouts: TimeoutsTable = TimeoutsTable()
    loosened: LoosenedTable = LoosenedTable()
    sandbox: SandboxTable = SandboxTable()
    areal: ArealTable = ArealTable()
    openenv: OpenEnvTable = OpenEnvTable()
    nemo: NemoTable = NemoTable()
    server: ServerTable = ServerTable()
    actions: ActionsTable = ActionsTable()
    resets: ResetsTable = ResetsTable()
    observations: ObservationsTable = ObservationsTable()
    volumes: tuple[VolumeTable, ...] = ()
    tasks: TasksTable = TasksTable()
    scorer: ScorerTable = ScorerTable()
    errors: ErrorsTable = ErrorsTable()
    step_log: StepLogTable = StepLogTable()
