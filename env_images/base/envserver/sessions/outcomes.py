"""What calls ended with, kept for those who ask again; bounded by time and by memory.

Results are kept as bytes inside plain tuples, which the garbage collector does not walk: a minute of results as
objects costs the reference servers stalls of hundreds of milliseconds.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from envserver.errors import Refused
from envserver.http.json_text import encode

KEPT_S = 60.0
"""As long as the reference servers keep a result (``LINGER_SECONDS``)."""
KEYS_FOR_LIFE = 8
"""The last so many keyed outcomes of a session stay as long as it lives."""
KEYS_MAX = 1024
"""Keys that a session may have; beyond it the oldest is forgotten even within the minute."""
OVERHEAD_BYTES = 400
"""What keeping an outcome costs beside its payload, roughly."""

Ending: TypeAlias = Literal["result", "tool_failed", "author_fault", "session_failed"]
"""The last two give no reward: the environment's author is at fault, or the infrastructure is."""
Outcome: TypeAlias = tuple[Ending, bytes]
"""How a call ended, and its payload: a result's JSON, or the text of a failure."""
Turn: TypeAlias = int
"""Which of its session's turns a call was: the first is 1. 0: none, or none yet."""
_Kept: TypeAlias = tuple[int, float, Ending, bytes, str | None, Turn]


class Keyed(NamedTuple):
    """What is known of an idempotency key."""

    digest: int
    """Of the call's body."""
    task_id: str
    ended_at: float | None
    """None: the call has not ended."""
    outcome: Outcome | None
    """None: not ended, or given up for lack of memory."""
    turn: Turn


class Outcomes:
    """The results of a server's calls. An owner is a session's serial number; nobody reads another owner's."""

    def __init__(self, *, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._by_id: OrderedDict[str, _Kept] = OrderedDict()  # the oldest first
        self._keys: dict[int, OrderedDict[str, Keyed]] = {}
        self._held: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Outcomes {len(self._by_id)} kept, {len(self._held)} held, {self._bytes} bytes>"

    @property
    def total_bytes(self) -> int:
        return self._bytes

    # -- by task id

    def keep(self, owner: int, task_id: str, outcome: Outcome, *, key: str | None = None) -> None:
        """Keep the outcome of a call that ended now."""
        self._by_id[task_id] = (owner, self._clock(), *outcome, key, 0)
        self._bytes += len(outcome[1]) + OVERHEAD_BYTES
        self.sweep()

    def find(self, owner: int, task_id: str) -> tuple[Outcome, Turn] | None:
        """Give the outcome and its turn, or None where it is unknown, too old or another owner's."""
        kept = self._by_id.get(task_id)
        if kept is None or kept[0] != owner or self._clock() - kept[1] > KEPT_S:
            return None
        return (kept[2], kept[3]), kept[5]

    # -- by idempotency key

    def claim(self, owner: int, key: str, digest: int, task_id: str) -> Keyed | None:
        """Take *key* for a new call, or tell the call that has it.

        Raises:
            Refused: 409, the key stands for another body, or its outcome was given up.
        """
        self._forget_old_keys(owner)
        keys = self._keys.setdefault(owner, OrderedDict())
        known = keys.get(key)
        if known is None:
            keys[key] = Keyed(digest, task_id, None, None, 0)
            return None
        if known.digest != digest:
            raise Refused(409, "Idempotency-Key was used with another body")
        if known.ended_at is not None and known.outcome is None:
            raise Refused(409, "the outcome of this Idempotency-Key is no longer kept")
        return known

    def abandon(self, owner: int, key: str) -> None:
        """Forget a key whose call never ran."""
        self._keys[owner].pop(key, None)

    def hold(self, owner: int, key: str, outcome: Outcome) -> None:
        """Keep the outcome of a keyed call that ended now; nothing where the owner is gone."""
        keys = self._keys.get(owner)
        if keys is None or key not in keys:
            return
        keys[key] = keys[key]._replace(ended_at=self._clock(), outcome=outcome)
        keys.move_to_end(key)
        size = len(outcome[1]) + OVERHEAD_BYTES
        self._held[owner, key] = size
        self._bytes += size
        self._forget_old_keys(owner)
        self.sweep()

    def number(self, owner: int, task_id: str, key: str | None, turn: Turn) -> None:
        """Keep with an outcome which turn it was."""
        kept = self._by_id.get(task_id)
        if kept is not None and kept[0] == owner:
            key = kept[4]  # whoever repeated a call without its key does not know it
            self._by_id[task_id] = (*kept[:5], turn)
        keys = self._keys.get(owner)
        if keys is not None and key is not None and (known := keys.get(key)) is not None and known.task_id == task_id:
            keys[key] = known._replace(turn=turn)

    def forget(self, owner: int) -> None:
        """Forget an owner's keys; what is known by task id runs out by itself."""
        for key in self._keys.pop(owner, ()):
            self._release(owner, key)

    # -- bounds

    def sweep(self) -> None:
        """Drop what is too old, and the oldest of the rest while there is too much."""
        now = self._clock()
        while self._by_id:
            oldest = next(iter(self._by_id.values()))
            if now - oldest[1] <= KEPT_S and self._bytes <= self._max_bytes:
                break
            self._by_id.popitem(last=False)
            self._bytes -= len(oldest[3]) + OVERHEAD_BYTES
        while self._held and self._bytes > self._max_bytes:
            (owner, key), size = self._held.popitem(last=False)
            self._bytes -= size
            # The key stays: a second run would be worse than a refusal.
            self._keys[owner][key] = self._keys[owner][key]._replace(outcome=None)

    def _forget_old_keys(self, owner: int) -> None:
        keys = self._keys.get(owner, OrderedDict())
        horizon = self._clock() - KEPT_S
        while len(keys) > KEYS_FOR_LIFE:
            key, oldest = next(iter(keys.items()))
            if oldest.ended_at is None or (oldest.ended_at > horizon and len(keys) <= KEYS_MAX):
                return
            del keys[key]
            self._release(owner, key)

    def _release(self, owner: int, key: str) -> None:
        self._bytes -= self._held.pop((owner, key), 0)


def refusal(reason: str, text: str) -> Outcome:
    """Write what the agent reads where no tool ran; the reasons are the protocol's."""
    return "result", encode({"ok": False, "error": text, "reason": reason})


def failed(text: str, *, ending: Ending = "tool_failed") -> Outcome:
    """Write what becomes an ``error`` event."""
    return ending, text.encode(errors="replace")
