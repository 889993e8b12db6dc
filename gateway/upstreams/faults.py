"""Faults of servers of other people's: they tell no traceback, and that they failed only in their protocol's words."""

from __future__ import annotations

from gateway.core.errors import AuthorFault
from gateway.core.faults import Fault, FaultKind


def author_fault(message: str, place: str) -> AuthorFault:
    """The error for what a server's own code failed at in *place*; *message* is all that it says."""
    return AuthorFault(message, faults=faults(message, place))


def faults(message: str, place: str) -> tuple[Fault, ...]:
    """What operators are told of it."""
    return (Fault(FaultKind.AUTHOR, place, message),)
