"""Sandboxes for environments whose agents run code. Import it where it is used: a bare server does not need it."""

from .errors import SandboxError
from .layers import Layer
from .missing import TELLING, lacks_program, missing_programs
from .sandbox import Sandbox
from .sandboxes import Sandboxes
from .terminal import Terminal
from .values import Box, Completed, Judged, Limits

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
