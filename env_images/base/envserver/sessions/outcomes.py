"""Outcomes of calls, kept for repeated requests, within limits of time and memory.

Results are kept as bytes in plain tuples, which the garbage collector does not scan. A minute of results as objects
stalls the reference servers for hundreds of milliseconds.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from envserver.errors import Refused
from envserver.http.json_text import encode

KEPT_S = 60.0
"""Seconds that an outcome is kept, like the reference servers' ``LINGER_SECONDS``."""
KEYS_FOR_LIFE = 8
"""Number of a session's latest keyed outcomes that are kept for the session's whole life."""
KEYS_MAX = 1024
"""Maximum number of a session's keys. Beyond it the oldest key is forgotten, even within the minute."""
OVERHEAD_BYTES = 400
"""Approximate bytes that an outcome takes besides its payload."""

Ending: TypeAlias = Literal["result", "tool_failed", "author_fault", "session_failed"]
"""How a call ended. The last two give no reward: the environment's author or the infrastructure is at fault."""
Outcome: TypeAlias = tuple[Ending, bytes]
"""How a call ended, and its payload: a result's JSON, or the text of a failure."""
Turn: TypeAlias = int
"""Number of a call among its session's turns, starting at 1. 0: the call is not a turn, or has not ended."""
_Kept: TypeAlias = tuple[int, float, Ending, bytes, Turn]


class Keyed(NamedTuple):
    """The state of an idempotency key."""

    digest: int
    """Digest of the call's body."""
    task_id: str
    ended_at: float | None
    """Time when the call ended. None: the call has not ended."""
    outcome: Outcome | None
    """Outcome of the call. None: the call has not ended, or the outcome was dropped for lack of memory."""
    turn: Turn


class Outcomes:
    """The results of a server's calls. An owner is a session's serial number. No session reads another's results."""

    def __init__(self, *, max_bytes: int, clock: Callable[[], float]) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._by_id: OrderedDict[str, _Kept] = OrderedDict()  # the oldest first
        self._keys: dict[int, OrderedDict[str, Keyed]] = {}
        self._held: OrderedDict[tuple[int, str], int] = OrderedDict()
        self._bytes = 0

    @property
    def total_bytes(self) -> int:
        return self._bytes

    # -- by task id

    def keep(self, owner: int, task_id: str, outcome: Outcome, turn: Turn = 0) -> None:
        """Keep the outcome of a call that has just ended."""
        self._by_id[task_id] = (owner, self._clock(), *outcome, turn)
        self._bytes += len(outcome[1]) + OVERHEAD_BYTES
        self.sweep()

    def find(self, owner: int, task_id: str) -> tuple[Outcome, Turn] | None:
        """Return the outcome and its turn, or None if it is unknown, too old or another owner's."""
        kept = self._by_id.get(task_id)
        if kept is None or kept[0] != owner or self._clock() - kept[1] > KEPT_S:
            return None
        return (kept[2], kept[3]), kept[4]

    # -- by idempotency key

    def claim(self, owner: int, key: str, digest: int, task_id: str) -> Keyed | None:
        """Assign *key* to a new call and return None, or return the state of the call that already has it.

        Raises:
            Refused: 409: The key belongs to another body, or its outcome was dropped.
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

    def hold(self, owner: int, key: str, outcome: Outcome, turn: Turn = 0) -> None:
        """Keep the outcome of a keyed call that has just ended. Do nothing if the owner is gone."""
        keys = self._keys.get(owner)
        if keys is None or key not in keys:
            return
        keys[key] = keys[key]._replace(ended_at=self._clock(), outcome=outcome, turn=turn)
        keys.move_to_end(key)
        size = len(outcome[1]) + OVERHEAD_BYTES
        self._held[owner, key] = size
        self._bytes += size
        self._forget_old_keys(owner)
        self.sweep()

    def forget(self, owner: int) -> None:
        """Forget an owner's keys. Outcomes kept by task id expire on their own."""
        for key in self._keys.pop(owner, ()):
            self._release(owner, key)

    # -- bounds

    def sweep(self) -> None:
        """Drop expired outcomes, then the oldest outcomes until the memory limit holds."""
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
    """Return the text that the agent reads if no tool ran. The protocol defines the reasons."""
    return "result", encode({"ok": False, "error": text, "reason": reason})


def failed(text: str, *, ending: Ending = "tool_failed") -> Outcome:
    """Return the outcome that becomes an ``error`` event."""
    return ending, text.encode(errors="replace")
