"""The one deadline of all waits in tests.

A test waits for the event that it means. The deadline ends a wait that would otherwise never end, and an expired one
means that something hangs, never that the machine is slow.
"""

from __future__ import annotations

from typing import Final

HANG_S: Final = 240
"""Seconds after which a wait counts as a hang: several times the longest wait of a run beside four busy processes on
two cores. It is shorter than the 300 s after which an idle session expires: a session that is left open must fail the
test that waits for its end. ``timeout`` in pyproject.toml, the limit of a whole test, is longer, so that the wait
itself reports."""
COMMAND_S: Final = 2700
"""Seconds after which a program that a test runs to its end counts as a hang. It may install packages, build images or
train a model."""
