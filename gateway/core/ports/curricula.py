"""The interface of the curriculum store, which shares task records, draws of handles and definitions among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.ids import EnvironmentName
from gateway.core.session import GroupMembership

MAX_RECORDS = 100_000
"""Maximum number of task records of one environment; beyond it the least recently seen are removed."""
MAX_OUTCOMES = 1_000
"""Maximum number of outcomes in one `CurriculumStore.note`."""
MAX_HANDLES = 1_000_000
"""Maximum number of handles of one curriculum."""
MAX_DRAWN_BYTES = 4096
"""Maximum size of a draw as JSON: a place, never a task."""
MAX_DEFINITIONS = 256
MAX_DEFINITION_BYTES = 64 * 1024
MAX_STATE_BYTES = 64 * 1024
TOLD_S = 600.0
"""Seconds for which an outcome's lease is remembered, so that the outcome is not counted twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordPage:
    """Records that changed since a version."""

    version: str
    """The version that this page leads to."""
    is_whole: bool
    """True if this page and the following pages contain all records, so that earlier records must be discarded."""
    is_last: bool
    records: Sequence[TaskRecord]
    removed: Sequence[str] = ()
    """Tasks whose record was removed."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The draw that a handle represents."""

    number: int
    """Number of the draw, from 0 on; each number is drawn once in a curriculum's life."""
    place: bytes
    """The task's place, as the proposer wrote it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A draw that is due for a handle. Any caller may propose it, and the first proposal wins."""

    number: int


class CurriculumStore(Protocol):
    """Shared state of curricula. Each method is atomic and raises ``StoreUnavailable`` if the store does not answer."""

    # -- records --------------------------------------------------------------------------------------------------

    async def note(self, outcomes: Sequence[Outcome]) -> int:
        """Add *outcomes*, at most `MAX_OUTCOMES`, to their tasks' records, at the store's own time.

        An outcome whose lease was noted within `TOLD_S` does not count.

        Returns:
            The number of outcomes that counted.
        """

    async def records(self, environment: EnvironmentName, since: str = "") -> RecordPage:
        """Return the changes since version *since*, at most some thousand records.

        An empty or unknown version returns everything.
        """

    async def forget(self, environment: EnvironmentName, task: str = "") -> int:
        """Remove one record, or all records of an environment; return their number."""

    # -- draws ----------------------------------------------------------------------------------------------------

    async def join(self, curriculum: str, handle: int, *, member: str, group_size: int, group_s: float) -> Drawn | Turn:
        """Take a place in the group that *handle* represents.

        *member* names the opening. An opening that already has a place keeps it, even in a full group. A group is
        closed once *group_size* members have joined it, or *group_s* seconds after its draw. Then a new draw is due,
        and `Turn` contains its number, which is the same for all callers before the draw.
        """

    async def propose(self, curriculum: str, handle: int, turn: Turn, place: bytes, *, member: str) -> Drawn | None:
        """Propose *place* as the draw of *turn*, and join. If an earlier proposal won, its draw is joined and returned.

        Returns:
            The draw; None if the turn is over and its group is full or closed: the caller must `join` again.
        """

    async def leave(self, curriculum: str, handle: int, *, member: str) -> None:
        """Release a place, because the opening failed. An unknown member is not an error."""

    async def numbers(self, curriculum: str, count: int) -> int:
        """Reserve *count* draw numbers that no handle has or will have; return the first number."""

    # -- state ----------------------------------------------------------------------------------------------------

    async def state(self, curriculum: str) -> tuple[int, bytes]:
        """Return the version and content of a sampler's state; 0 and empty bytes at first."""

    async def set_state(self, curriculum: str, version: int, state: bytes) -> bool:
        """Replace the state of *version*; return False, and change nothing, if the state has another version now."""

    async def reset(self, curriculum: str) -> None:
        """Delete the draws and the state, but not the records; draw numbers restart at 0."""

    # -- definitions from the API ---------------------------------------------------------------------------------

    async def define(self, curriculum: str, body: bytes) -> None:
        """Store a definition, which is opaque to the store; it replaces a definition of the same name.

        Raises:
            InvalidRequest: There would be more than `MAX_DEFINITIONS`, or the definition is too long.
        """

    async def undefine(self, curriculum: str) -> bool:
        """Delete a definition with its draws and state; return False if there is no such definition."""

    async def definitions(self) -> tuple[str, dict[str, bytes]]:
        """Return the version of the definitions, which is new after each change, and all definitions by name."""

    async def definitions_version(self) -> str:
        """Return only the version of `definitions`."""

    async def aclose(self) -> None:
        """Close the connections."""


class DrawnTickets(Protocol):
    """Releases unused places in groups of drawn tasks; implemented by `gateway.tasks.curricula.service.Curricula`."""

    def unused(self, ticket: GroupMembership | None) -> None:
        """Release the place of *ticket*, with which nothing was opened. Returns immediately."""
