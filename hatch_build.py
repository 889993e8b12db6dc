"""Puts the environments, their tasks, ``envserver`` and the client package into the wheel, for ``serve`` and ``run``.

Not into an editable install: that serves those of the checkout, and imports ``envserver`` from there.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BundledEnvironments(BuildHookInterface):
    """Adds what lies beside the package; what a build's folder does not have is left out (the gateway's image)."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files for a wheel that is no editable install's."""
        if version == "editable":
            return
        root = Path(self.root)
        environments = {path.parent for path in root.glob("env_images/*/environment.toml")}
        paths = {path: f"gateway/bundled/{path.relative_to(root)}" for path in environments}
        paths[root / "tasks"] = "gateway/bundled/tasks"
        paths[root / "constraints.txt"] = "gateway/bundled/constraints.txt"
        paths[root / "env_images" / "base" / "envserver"] = "envserver"
        paths[root / "clients" / "python" / "env_gateway_client"] = "gateway/bundled/clients/env_gateway_client"
        build_data["force_include"].update({str(path): place for path, place in paths.items() if path.exists()})
