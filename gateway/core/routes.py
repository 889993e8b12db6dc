"""Maps path segments to frontends, and is the only module that does. No environment may have one of these names."""

from __future__ import annotations

from typing import Final

ORS_ROUTES: Final = frozenset(
    (
        "health",
        "version",
        "ping",
        "list_environments",
        "create",
        "delete",
        "create_session",
        "delete_session",
        "docs",
        "redoc",
    )
)
"""First path segments of ORS itself."""
ORS_OPERATIONS: Final = frozenset(
    (
        "tools",
        "splits",
        "tasks",
        "num_tasks",
        "task",
        "task_range",
        "prompt",
        "task_tools",
        "call",
        "messages",
        "score_group",
    )
)
"""ORS operations, which follow an environment's name in a path, or are the whole path."""
ADMIN_SEGMENTS: Final = frozenset(("healthz", "readyz", "openapi.json", "metrics", "admin"))
"""First path segments of the operators' frontend."""
AREAL_SEGMENTS: Final = frozenset(("areal", "api"))
"""First path segments of AReaL's frontend."""
OPENENV_SEGMENT: Final = "openenv"
NEMO_SEGMENT: Final = "nemo"
"""First path segment of NeMo Gym's resources servers."""
ROLLOUT_SEGMENT: Final = "v1"
"""First path segment of the model's side of episodes, as the ``openreward`` client sends it."""
DASHBOARD_SEGMENT: Final = "dashboard"
"""First path segment of the pages for people."""
REPLICA_SEGMENT: Final = "peers"
"""First path segment of requests between replicas."""
KEY_SEGMENT: Final = "k"
"""``/k/{key}/…``: the key of a client that cannot send headers."""
GATEWAY_SEGMENTS: Final = (
    ADMIN_SEGMENTS
    | AREAL_SEGMENTS
    | {OPENENV_SEGMENT, NEMO_SEGMENT, ROLLOUT_SEGMENT, DASHBOARD_SEGMENT, REPLICA_SEGMENT, KEY_SEGMENT}
)
"""First path segments that are not ORS'."""
RESERVED: Final = ORS_ROUTES | ORS_OPERATIONS | GATEWAY_SEGMENTS

OPERATOR_SEGMENTS: Final = frozenset(("admin", "metrics"))
"""First path segments that need an operator's key."""
OPEN_PATHS: Final = frozenset(("/healthz", "/readyz", "/health", "/openapi.json"))
"""Paths that need no key: their answers reveal only that the gateway is alive, and its version."""
