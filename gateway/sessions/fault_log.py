"""The log lines that tell operators what an environment author's code raised.

One line for each fault, with the traceback as one of its keys. Values are written as Python literals: on one line, and
in characters that every terminal and file takes, whatever an exception's text holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from gateway.core.faults import Fault, FaultKind
from gateway.core.session import Session

logger = logging.getLogger(__name__)


def log_faults(session: Session, faults: Iterable[Fault]) -> None:
    """Tell operators of *faults* in *session*."""
    for fault in faults:
        told = (session.environment, session.task, session.id, fault.place, fault.error, fault.traceback)
        if fault.kind is FaultKind.AUTHOR:
            logger.error("author_fault environment=%s task=%r session=%s place=%r error=%r traceback=%r", *told)
        else:
            logger.warning(
                "infrastructure_fault environment=%s task=%r session=%s place=%r error=%r traceback=%r", *told
            )
