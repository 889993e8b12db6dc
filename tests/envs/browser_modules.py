"""Imports the modules of the browser environment that need no browser by their plain names, as its image does."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

HOME = Path(__file__).resolve().parents[2] / "env_images" / "browser"


def browser_module(name: str) -> Any:
    """Import a module of the environment's folder."""
    if str(HOME) not in sys.path:
        sys.path.append(str(HOME))
    return importlib.import_module(name)
