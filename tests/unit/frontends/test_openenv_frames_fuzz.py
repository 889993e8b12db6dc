"""No frame of an OpenEnv client raises anything but `FrameError`, whose reply can be written.

``FRAMES_FUZZ_EXAMPLES=100000`` runs longer.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.frontends.openenv.frames import FrameError, ListTools, ResetRequest, ToolCall, validated
from gateway.frontends.openenv.replies import error_frame
from gateway.frontends.openenv.websocket import read_frame

EXAMPLES = int(os.environ.get("FRAMES_FUZZ_EXAMPLES", "300"))
run = settings(
    max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), derandomize=os.environ.get("CI") == "true"
)

keys = st.sampled_from(
    ["type", "data", "task", "index", "seed", "split", "episode_id", "tool_name", "arguments", "id", ""]
) | st.text(max_size=5)
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from([10**4000, -(10**300), 2**63, 1e308, "\ud800", "\x00", "x" * 300, "2026-01-01", "1", "true"])
    | st.sampled_from(["reset", "step", "state", "close", "mcp", "call_tool", "list_tools"])
    | st.text(max_size=10)
)
values = st.recursive(atoms, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4))
frames = st.fixed_dictionaries(
    {"type": st.sampled_from(["reset", "step", "state", "close", "mcp"]) | values},
    optional={"data": st.dictionaries(keys, values, max_size=6) | values, "more": values},
)


def served(text: str | None) -> None:
    """Read a frame as the socket does: its text, then its data as a request of each kind."""
    try:
        _, data = read_frame(text)
    except FrameError as refused:
        reply = json.loads(error_frame(refused))
    else:
        reply = {"type": "error"}
        for model in (ResetRequest, ToolCall, ListTools):
            with contextlib.suppress(FrameError):
                validated(model, data, "data")
    assert reply["type"] == "error"


@run
@given(frame=frames | values)
def test_no_json_raises_anything_but_a_frame_error(frame: Any) -> None:
    served(json.dumps(frame))
    served(json.dumps(frame, ensure_ascii=False))


@run
@given(frame=frames, at=st.integers(0, 200), cut=st.integers(0, 3), put=st.text(max_size=3))
def test_no_damaged_json_raises_anything_but_a_frame_error(frame: Any, at: int, cut: int, put: str) -> None:
    text = json.dumps(frame)
    served(text[:at] + put + text[at + cut :])


@pytest.mark.parametrize("depth", [100, 300, 900, 990, 2000, 100_000])
@pytest.mark.parametrize(
    "frame", ['{"type":%s}', '{"type":"reset","data":{"task":%s}}', '{"type":"step","data":%s}', "%s"]
)
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}")])
def test_no_nesting_raises_anything_but_a_frame_error(frame: str, depth: int, begin: str, end: str) -> None:
    served(frame % (begin * depth + "1" + end * depth))


def test_a_binary_frame_is_a_frame_error() -> None:
    served(None)
