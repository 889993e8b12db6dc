"""The package's version; a test holds it and ``pyproject.toml`` together."""

VERSION = "0.2.0"
