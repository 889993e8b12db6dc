"""Tracks the sockets that are attached to OpenEnv sessions in this replica."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.core.environment import Environment
from gateway.core.ids import Owner


@dataclass(slots=True, kw_only=True)
class Attachment:
    """A socket that is attached to a session."""

    owner: Owner
    environment: Environment
    id: str
    outlives: bool = False
    """True if the episode stays open after the socket closes, because the client named an existing session."""
    begins: bool = False
    """True if the first tool call starts an episode, because this socket has no reset."""
    has_begun: bool = False
    """True if an episode was started on the socket, or may have been before it was attached."""


class Attachments:
    """The sessions with a socket in this replica. Each has at most one socket."""

    def __init__(self) -> None:
        self._closing: dict[tuple[Owner, str], bool] = {}

    def add(self, owner: Owner, id: str) -> bool:
        """Attach a socket. Return False if the session already has one."""
        if (owner, id) in self._closing:
            return False
        self._closing[owner, id] = False
        return True

    def close_later(self, owner: Owner, id: str) -> bool:
        """End the session when its socket closes. Return False if it has no socket in this replica."""
        if (owner, id) not in self._closing:
            return False
        self._closing[owner, id] = True
        return True

    def remove(self, owner: Owner, id: str) -> bool:
        """Detach the socket. Return True if the caller must end the session now."""
        return self._closing.pop((owner, id))
