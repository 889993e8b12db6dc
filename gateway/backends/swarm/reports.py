"""Reading what a node reports of itself: JSON from another machine, checked field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import NodeId, NodeReport

MAX_REPORT_BYTES: Final = 4 * 2**20
"""Some 100 bytes a worker and 200 an image: far beyond what one machine has."""
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", re.ASCII)


def read_report(body: bytes) -> NodeReport:
    """Read the answer to ``GET /env-gateway/node``.

    Raises:
        ValueError: it is no report; with the field that is wrong.
    """
    found = json.loads(body)
    if not isinstance(found, dict):
        raise ValueError("a node's report is no object")
    id = _text(found, "id")
    if not _NODE_ID.fullmatch(id):
        raise ValueError(f"id: {id!r} is no id of a node")
    return NodeReport(
        id=NodeId(id),
        name=_text(found, "name"),
        cpus=_number(found, "cpus"),
        memory_bytes=int(_number(found, "memory_bytes")),
        available_bytes=int(_number(found, "available_bytes")),
        max_containers=int(_number(found, "max_containers")),
        containers=int(_number(found, "containers")),
        is_draining=found.get("is_draining") is True,
        images={name: str(image) for name, image in _object(found, "images").items()},
        built_at={name: float(at) for name, at in _object(found, "built_at").items()},
        workers={WorkerId(one): EnvironmentName(str(name)) for one, name in _object(found, "workers").items()},
    )


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}: a text is wanted, and not {value!r:.80}")
    return value


def _number(found: Mapping[str, Any], name: str) -> float:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**63:
        raise ValueError(f"{name}: a number from 0 on is wanted, and not {value!r:.80}")
    return value


def _object(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = found.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name}: an object is wanted, and not {value!r:.80}")
    return value
