"""Records the engine's events of one instance's containers in order, independently of the gateway."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from typing import Any

import docker

from tests.deadlines import HANG_S
from tests.wire.stack import INSTANCE_LABEL

SERVER_ROLES = ("", "server")
"""Roles of a worker's first container. A container of another role (a forwarder) is the worker's second one."""
PROBE = "probe-"
"""Prefix of the ids of the containers that a gateway creates at its start and never runs."""


@dataclass(frozen=True)
class Event:
    """One event of a container."""

    action: str
    """The engine's name of the event: ``create``, ``start``, ``oom``, ``die``, ``destroy`` …"""
    worker: str
    environment: str
    at: float
    """Unix time in seconds, by the engine's clock."""


class EngineEvents:
    """Follows the events of one instance in a thread, at the engine with this URL."""

    def __init__(self, instance: str, engine: str) -> None:
        self._instance = instance
        self._engine = docker.DockerClient(base_url=engine, version="auto")
        self._stream: Any = None
        self._thread: threading.Thread | None = None
        self._events: list[Event] = []

    @property
    def all(self) -> list[Event]:
        """The events so far."""
        return list(self._events)

    def of(self, action: str, **where: str) -> list[Event]:
        """Return the events of *action*, filtered by ``worker`` or ``environment`` if the caller passes one."""
        return [
            event
            for event in self.all
            if event.action == action and all(getattr(event, name) == value for name, value in where.items())
        ]

    def forget(self) -> None:
        """Drop the events so far."""
        self._events.clear()

    def most_alive(self, environment: str) -> int:
        """Return the largest number of workers of *environment* that existed at one moment."""
        alive: set[str] = set()
        most = 0
        for event in self.all:
            if event.environment == environment and event.action == "create":
                alive.add(event.worker)
            elif event.environment == environment and event.action == "destroy":
                alive.discard(event.worker)
            most = max(most, len(alive))
        return most

    def start(self) -> None:
        self._stream = self._engine.events(
            decode=True, filters={"type": "container", "label": f"{INSTANCE_LABEL}={self._instance}"}
        )
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._stream is not None:
            self._stream.close()
        if self._thread is not None:
            self._thread.join(HANG_S)
        self._engine.close()

    def _follow(self) -> None:
        with contextlib.suppress(Exception):  # a closed stream may end with any error of the library
            for event in self._stream:
                told = event["Actor"]["Attributes"]
                worker, environment = told.get("env-gateway.worker", ""), told.get("env-gateway.environment", "")
                if told.get("env-gateway.role", "") in SERVER_ROLES and not worker.startswith(PROBE):
                    self._events.append(Event(event["Action"], worker, environment, event["timeNano"] / 1e9))
