"""Sandboxes for environments whose agents run code. Import this package only where needed, not in a bare server."""

from envserver.sandbox.missing import TELLING, lacks_program, missing_programs
from envserver.sandbox.sandbox import Sandbox
from envserver.sandbox.sandboxes import Layer, Sandboxes
from envserver.sandbox.streams import Terminal
from envserver.sandbox.values import Box, Completed, Judged, Limits, SandboxError

__all__ = [
    "TELLING",
    "Box",
    "Completed",
    "Judged",
    "Layer",
    "Limits",
    "Sandbox",
    "SandboxError",
    "Sandboxes",
    "Terminal",
    "lacks_program",
    "missing_programs",
]
