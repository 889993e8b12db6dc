"""The seccomp profile of workers that open sandboxes.

The engine's default refuses namespaces and mounts to whoever is not root with CAP_SYS_ADMIN. This one is an allow-list
too, shorter than the default but for what a sandbox is made with; agents get a stricter filter of their own inside.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files


@cache
def sandbox_profile() -> str:
    """Give the profile's text as the engine's API takes it: JSON on one line, ASCII only."""
    text = files("gateway.backends.docker").joinpath("sandbox-seccomp.json").read_text(encoding="utf-8")
    return json.dumps(json.loads(text), separators=(",", ":"))
