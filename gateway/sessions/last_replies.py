"""Keeps the end of an episode: the reply that ended it, and the result that its environment gave.

Over AReaL and NeMo Gym the reply to the last request has the reward, and the episode ends with it. If this reply is
lost on its way, the trainer sends the request again, perhaps to another replica, and gets the same reply. The store
keeps one reply for each session id, until the next session of that id.

An episode that its environment has ended keeps its result if its worker dies before the trainer ends the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from gateway.core.episode import Summary, summary_to_json
from gateway.core.errors import CallConflict, GatewayError, SessionClosed, SessionNotFound, StoreUnavailable
from gateway.core.ids import SessionId
from gateway.core.outcomes import is_without_reward
from gateway.core.ports.calls import OUTCOME_BYTES
from gateway.core.ports.store import SessionStore
from gateway.core.retry import STORE_PATIENCE_S, patiently
from gateway.core.session import CloseReason, Session, SessionState

LastReply = Callable[[Summary | None], bytes]
"""Returns the last reply of an episode from its summary, in the form of `LastRequest.written`."""
_DIGITS = 64
RESULT_WAIT_S = 0.5
"""Seconds that an answer which ends an episode waits until the store has the result."""


@dataclass(frozen=True, slots=True)
class LastRequest:
    """A request that may end an episode, in the form by which its repeats are recognized."""

    key: str
    """What repeats have in common. Empty: no repeat is recognized."""
    body: bytes

    def written(self, reply: bytes) -> bytes:
        """Return *reply* as the store keeps it; empty if there is no key or no reply."""
        return self._digests() + reply if self.key and reply else b""

    def read(self, kept: bytes) -> bytes | None:
        """Return the reply in *kept* if this request repeats the one that got it.

        Raises:
            CallConflict: The key is the same, and the body differs.
        """
        digests = self._digests()
        if not self.key or kept[:_DIGITS] != digests[:_DIGITS]:
            return None
        if kept[: 2 * _DIGITS] != digests:
            raise CallConflict("this request ended the episode with another body, and cannot be repeated with this one")
        return kept[2 * _DIGITS :]

    def _digests(self) -> bytes:
        parts = (self.key.encode("utf-8", "surrogatepass"), self.body)
        return b"".join(hashlib.sha256(part).hexdigest().encode() for part in parts)


class LastReplies:
    """The last replies of ended episodes, in the store."""

    def __init__(self, store: SessionStore, *, patience_s: float = STORE_PATIENCE_S) -> None:
        """*patience_s*: seconds for which a store that does not answer is retried."""
        self._store = store
        self._patience_s = patience_s

    async def keep(self, id: SessionId, written: bytes, *, missed: Callable[[], None] | None = None) -> None:
        """Keep a written reply, unless it is empty or larger than `OUTCOME_BYTES`. The end of an episode goes on if the
        store does not answer; a repeat then finds no reply."""
        if 0 < len(written) <= OUTCOME_BYTES:
            with contextlib.suppress(StoreUnavailable):
                await patiently(lambda: self._store.keep_reply(id, written), for_s=self._patience_s, missed=missed)

    async def kept(self, id: SessionId) -> bytes | None:
        """Return the written reply of the session's last episode, or None. Raises ``StoreUnavailable``."""
        return await patiently(lambda: self._store.kept_reply(id), for_s=self._patience_s)

    async def ending(self, id: SessionId) -> Session | None:
        """Return the session if its trainer ended it and it still has its slot. Raises ``StoreUnavailable``."""
        try:
            session = await patiently(lambda: self._store.find(id), for_s=self._patience_s)
        except (SessionNotFound, SessionClosed):
            return None
        is_ending = session.state is SessionState.CLOSING and session.reason is CloseReason.DELETED
        return session if is_ending else None


class KeptResults:
    """The results of episodes that their environments have ended, in the store; see ``EpisodeResults``."""

    def __init__(self, store: SessionStore, *, patience_s: float = STORE_PATIENCE_S) -> None:
        """*patience_s*: seconds for which a store that does not answer is retried."""
        self._store = store
        self._patience_s = patience_s
        self._writing: set[asyncio.Task[None]] = set()

    async def keep(self, session: Session, summary: Summary) -> None:
        """Write the *summary* of a finished episode. After `RESULT_WAIT_S` this goes on in the background.

        A third-party server does not say whether it judges groups, so an episode without a reward is left to its end.
        """
        if not summary.finished or is_without_reward(summary):
            return
        result = summary_to_json(summary).decode()
        task = asyncio.create_task(self._write(session, result))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        await asyncio.wait({task}, timeout=RESULT_WAIT_S)

    async def _write(self, session: Session, result: str) -> None:
        with contextlib.suppress(GatewayError):  # the worker still has it
            await patiently(lambda: self._store.note_result(session.id, session.lease, result), for_s=self._patience_s)
