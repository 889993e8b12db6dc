"""Reads the secrets that the operator gives to the sessions of an environment: ``[secrets]`` of environment.toml."""

from __future__ import annotations

import os
from pathlib import Path

from gateway.core.environment import Environment
from gateway.core.errors import EnvironmentUnavailable
from gateway.core.session import SECRET_CHARS


class SessionSecrets:
    """The operator's secrets. Each is read again for each session, so that a replaced file takes effect."""

    def __init__(self, folder: Path | None = None) -> None:
        """Create the reader. Files that have no absolute path are in *folder* (``GATEWAY_SECRETS_DIR``)."""
        self._folder = folder

    def of(self, environment: Environment) -> dict[str, str]:
        """Return the secrets for sessions of *environment*, by name.

        Raises:
            EnvironmentUnavailable: A secret cannot be read, or is shorter than `SECRET_CHARS`.
        """
        return {name: self._read(environment, name, source) for name, source in environment.secrets.items()}

    def _read(self, environment: Environment, name: str, source: str) -> str:
        kind, _, place = source.partition(":")
        try:
            value = (os.environ[place] if kind == "env" else self._path(place).read_text()).strip()
        except KeyError:
            reason = f"the gateway has no variable {place}"
        except (OSError, UnicodeDecodeError, ValueError) as error:
            reason = str(error)
        else:
            if len(value) >= SECRET_CHARS:
                return value
            reason = f"it has {len(value)} characters, and a secret needs at least {SECRET_CHARS} to be masked in logs"
        raise EnvironmentUnavailable(f"secrets.{name} = {source!r} of environment {environment.name}: {reason}")

    def _path(self, place: str) -> Path:
        if not Path(place).is_absolute() and self._folder is None:
            raise ValueError("set GATEWAY_SECRETS_DIR, or write the file's absolute path")
        return (self._folder or Path("/")) / place
