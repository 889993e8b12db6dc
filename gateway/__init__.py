"""A self-hosted gateway between RL trainers and environments."""

from pathlib import Path
from typing import Final

__version__ = "0.2.0"

BUNDLED: Final = Path(__file__).resolve().parent / "bundled"
"""Folder of an installed wheel (hatch_build.py) with environments, their tasks, the client package and the
tested versions of dependencies."""
