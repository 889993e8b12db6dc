"""The browser environment's image in a container. A session opens as in a new container of the gateway."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import docker

from tests.envs.container_worker import Change, ContainerWorker, container_worker
from tests.envs.workers import Session

BrowserWorker = ContainerWorker


def browser_worker(engine: docker.APIClient, *, change: Change | None = None) -> AbstractContextManager[BrowserWorker]:
    """Start a container of the image and remove it at the end."""
    return container_worker(engine, "browser", change=change)


def observation(session: Session) -> dict[str, Any]:
    """Return the session's first observation."""
    answer = session.get("/browser/prompt")
    assert answer.status_code == 200, answer.text
    return dict(answer.json()[0]["detail"]["observation"])
