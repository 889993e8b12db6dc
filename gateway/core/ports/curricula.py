"""The seam of curricula: records of tasks, handles that stand for draws, definitions; where all replicas find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.ids import EnvironmentName

MAX_RECORDS = 100_000
"""Tasks of one environment that have a record; beyond it those go that were not seen for longest."""
MAX_OUTCOMES = 1_000
"""In one `CurriculumStore.note`."""
MAX_HANDLES = 1_000_000
"""Of one curriculum."""
MAX_DRAWN_BYTES = 4096
"""What a draw may come to, as JSON: a place, never a task."""
MAX_DEFINITIONS = 256
MAX_DEFINITION_BYTES = 64 * 1024
MAX_STATE_BYTES = 64 * 1024
TOLD_S = 600.0
"""How long an outcome's lease is remembered, so that it is not counted twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPage:
    """Records that changed since a version."""

    version: str
    """Where this page leads to."""
    is_whole: bool
    """These, and those of the pages that follow, are all there are: what was known before is to be forgotten."""
    is_last: bool
    records: Sequence[TaskRecord]
    removed: Sequence[str] = ()
    """Tasks whose record went."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What a handle stands for."""

    number: int
    """Of the draw, from 0 on; each is drawn once in a curriculum's life."""
    place: bytes
    """The task's place as its drawer wrote it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A handle that is to be drawn for: by whoever asks, and who comes first decides."""

    number: int


class CurriculumStore(Protocol):
    """Each method is one atomic step, and raises ``StoreUnavailable`` when the store does not answer."""

    # -- records --------------------------------------------------------------------------------------------------

    async def note(self, outcomes: Sequence[Outcome]) -> int:
        """Bring *outcomes*, at most `MAX_OUTCOMES`, into their tasks' records, at the store's own time.

        One whose lease was noted within `TOLD_S` counts nothing. Returns how many counted.
        """

    async def records(self, environment: EnvironmentName, since: str = "") -> RecordPage:
        """What changed since version *since*, at most some thousand records; empty or unknown: everything."""

    async def forget(self, environment: EnvironmentName, task: str = "") -> int:
        """Remove one record, or all of an environment's; how many there were."""

    # -- draws ----------------------------------------------------------------------------------------------------

    async def join(self, curriculum: str, handle: int, *, member: str, group_size: int, group_s: float) -> Drawn | Turn:
        """Take a place in the group that *handle* stands for.

        *member* names the opening: one that has a place already keeps it, also in a group that is full. A group is
        left behind once *group_size* members have joined it, or *group_s* seconds after its draw: then a new draw is
        due, and `Turn` says which (the same for all that ask before it is made).
        """

    async def propose(self, curriculum: str, handle: int, turn: Turn, place: bytes, *, member: str) -> Drawn | None:
        """Answer *turn* with *place*, and join; who proposed before wins, and its draw is returned and joined.

        None: the turn is over, and its group is full or left behind; ask with `join` again.
        """

    async def leave(self, curriculum: str, handle: int, *, member: str) -> None:
        """Give a place back: the opening came to nothing. Unknown ones are no error."""

    async def numbers(self, curriculum: str, count: int) -> int:
        """Take *count* draw numbers that no handle has and none will have; returns the first of them."""

    # -- state ----------------------------------------------------------------------------------------------------

    async def state(self, curriculum: str) -> tuple[int, bytes]:
        """What a sampler remembers, with its version: 0 and nothing at first."""

    async def set_state(self, curriculum: str, version: int, state: bytes) -> bool:
        """Replace the state of *version*; False, and nothing, if there is another one by now."""

    async def reset(self, curriculum: str) -> None:
        """Forget the draws and the state, not the records; draw numbers begin at 0 again."""

    # -- definitions that came by the API -------------------------------------------------------------------------

    async def define(self, curriculum: str, body: bytes) -> None:
        """Keep a definition, opaque to the store; another one of that name is replaced.

        Raises:
            InvalidRequest: there would be more than `MAX_DEFINITIONS`, or it is too long.
        """

    async def undefine(self, curriculum: str) -> bool:
        """Forget a definition, and its draws and state; False if there is none."""

    async def definitions(self) -> tuple[str, dict[str, bytes]]:
        """All of them, and the version that they are in: another one after each change."""

    async def definitions_version(self) -> str:
        """That version alone."""

    async def aclose(self) -> None:
        """Let go of connections."""
