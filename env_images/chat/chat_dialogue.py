"""A conversation: the messages so far, the agent's replies, and the scripted user's answers.

The user never improvises. After a reply, the user says the first unused follow-up whose condition the reply meets. If
no follow-up fits, or in the last turn, the reply was the final reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from envserver.generic import RewardCall, parse_reward

MAX_MESSAGES = 100
MAX_FOLLOW_UPS = 50
MAX_TURNS = 50
MAX_CHARS = 100_000
"""The maximum characters of a task's message or an agent's reply; a longer reply counts as empty."""

ROLES = ("system", "user", "assistant")


class InvalidChat(ValueError):
    """The task's conversation is invalid or cannot be judged; the message names the place and the reason."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message."""

    role: str
    """A role of `ROLES`."""
    content: str

    def wire(self) -> dict[str, str]:
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A message that the user says once, after a fitting reply."""

    say: str
    when: RewardCall | None
    """Judges the agent's last reply; None fits every reply."""

    def fits(self, reply: str) -> bool:
        """Return True if the condition holds.

        Raises:
            RewardError: The function broke.
        """
        return self.when is None or self.when(reply) >= 0.5


class Dialogue:
    """One conversation in progress."""

    def __init__(self, instruction: str, config: Mapping[str, Any]) -> None:
        """Start the conversation of a task.

        Args:
            instruction: The user's last message before the agent's first reply; may be empty if `config.messages` ends
                with a message of the user.
            config: `messages`, the earlier messages; `follow_ups`; `max_turns`, the maximum number of replies.

        Raises:
            InvalidChat: A value has a wrong form or is out of bounds, or the last message is not the user's.
        """
        known = ("messages", "follow_ups", "max_turns")
        if unknown := sorted(set(config) - set(known)):
            raise InvalidChat(f"config.{unknown[0]}: unknown key; there are {', '.join(known)}")
        self.said = _conversation(config.get("messages", []))
        if instruction.strip():
            self.said.append(Said("user", instruction.strip()))
        if not self.said or self.said[-1].role != "user":
            raise InvalidChat("instruction: the conversation must end with what the user says")
        self._follow_ups = _follow_ups(config.get("follow_ups", []))
        self.max_turns = config.get("max_turns", len(self._follow_ups) + 1)
        if (
            not isinstance(self.max_turns, int)
            or isinstance(self.max_turns, bool)
            or not 1 <= self.max_turns <= MAX_TURNS
        ):
            raise InvalidChat(f"config.max_turns: must be a whole number from 1 to {MAX_TURNS}")
        self.turns = 0
        """The number of replies so far."""

    def answer(self, reply: str) -> str | None:
        """Add the agent's reply and return the user's answer, or None if the conversation is over.

        Raises:
            RewardError: A condition broke.
        """
        self.turns += 1
        self.said.append(Said("assistant", reply))
        if self.turns >= self.max_turns:
            return None
        for follow_up in self._follow_ups:
            if follow_up.fits(reply):
                self._follow_ups.remove(follow_up)
                self.said.append(Said("user", follow_up.say))
                return follow_up.say
        return None


def _conversation(data: object) -> list[Said]:
    if not isinstance(data, list) or len(data) > MAX_MESSAGES:
        raise InvalidChat(f"config.messages: must be a list of at most {MAX_MESSAGES} messages")
    messages = []
    for place, message in enumerate(data):
        where = f"config.messages[{place}]"
        if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
            raise InvalidChat(f"{where}: must be an object with role and content")
        if message["role"] not in ROLES:
            raise InvalidChat(f"{where}.role: must be one of {', '.join(ROLES)}")
        messages.append(Said(message["role"], _text(message["content"], f"{where}.content")))
    return messages


def _follow_ups(data: object) -> list[FollowUp]:
    if not isinstance(data, list) or len(data) > MAX_FOLLOW_UPS:
        raise InvalidChat(f"config.follow_ups: must be a list of at most {MAX_FOLLOW_UPS} entries")
    return [_follow_up(entry, f"config.follow_ups[{place}]") for place, entry in enumerate(data)]


def _follow_up(entry: object, where: str) -> FollowUp:
    if isinstance(entry, str):
        return FollowUp(_text(entry, where), None)
    if not isinstance(entry, Mapping) or "say" not in entry or set(entry) - {"when", "say"}:
        raise InvalidChat(f"{where}: must be a text, or an object with say and perhaps when")
    if entry.get("when") is None:
        return FollowUp(_text(entry["say"], f"{where}.say"), None)
    try:
        when = parse_reward(entry["when"])
        when.check()
    except ValueError as error:
        raise InvalidChat(f"{where}.when: {error}") from error
    return FollowUp(_text(entry["say"], f"{where}.say"), when)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_CHARS:
        raise InvalidChat(f"{where}: must be a text of 1 to {MAX_CHARS} characters")
    return value
