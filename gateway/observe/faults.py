"""The log lines that tell operators what an environment author's code raised.

One line for each fault, with the traceback as one of its keys. Values are written as Python literals: on one line, and
in characters that every terminal and file takes, whatever an exception's text holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from gateway.core.faults import Fault, FaultKind
from gateway.core.model import Session

logger = logging.getLogger(__name__)

_EVENTS: Final = {
    FaultKind.AUTHOR: (logging.ERROR, "author_fault"),
    FaultKind.INFRASTRUCTURE: (logging.WARNING, "infrastructure_fault"),
}


def log_faults(session: Session, faults: Iterable[Fault]) -> None:
    """Tell operators of *faults* in *session*."""
    for fault in faults:
        level, event = _EVENTS[fault.kind]
        logger.log(
            level,
            "%s environment=%s task=%r session=%s place=%r error=%r traceback=%r",
            event,
            session.environment,
            session.task,
            session.id,
            fault.place,
            fault.error,
            fault.traceback,
        )
