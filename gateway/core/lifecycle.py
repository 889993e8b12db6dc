"""How far a gateway process is on its way out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Lifecycle:
    """What frontends have to know of the end of their process."""

    is_draining: bool = False
    """A load balancer is to send requests to other replicas; this one still serves what comes."""
    is_closing: bool = False
    """The server has ended: no new episode begins, also on sockets that are open."""
