"""The scorer's version: one SHA-256 of the files, packages and task modules that judge episodes.

The server computes it from what it runs, once at its start. So it names the judge of each reward, wherever the server's
files came from. A rebuilt image with the same files has the same version.
"""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module

from envserver.errors import ConfigError

# The module behind ``hashlib.sha256``. Importing hashlib itself costs a bare server 0.6 MiB.
_SHA256 = import_module("_sha2" if sys.version_info >= (3, 12) else "_sha256")
_PACKAGE = os.path.dirname(os.path.abspath(__file__))
OWN = f"{os.path.basename(_PACKAGE)}/"
"""Beginning of a pattern that names files of this package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerSettings:
    """The parts of the server that judge episodes, as ``[scorer]`` of an ``environment.toml`` names them."""

    files: tuple[str, ...] = ()
    """Patterns of paths, relative to the server's folder, or ``envserver/…``. Empty: the modules that the server has
    loaded from its folder, and this package."""
    packages: tuple[str, ...] = ()
    """Names of installed packages with which they judge."""


def scorer_version(settings: ScorerSettings, *, folder: str, modules: str) -> str:
    """Return the version, 64 hexadecimal digits.

    Args:
        folder: The server's folder.
        modules: The folder of task modules, of which all loaded ones count.

    Raises:
        ConfigError: A pattern matches no file, or a package is not installed.
    """
    if settings.files:
        found = {name: path for pattern in settings.files for name, path in _matches(pattern, folder)}
    else:
        found = {**dict(_loaded(folder)), **dict(_matches(f"{OWN}**/*.py", folder))}
    found |= {f"modules/{name}": path for name, path in _loaded(modules)}
    lines = [*_digests(found), *_versions(settings.packages)]
    return _sha256("".join(lines).encode("utf-8", "surrogateescape"))


def server_folder() -> str:
    """Return the folder of the program that this process runs, which contains the environment's own modules."""
    program = getattr(sys.modules["__main__"], "__file__", None)
    return os.path.dirname(os.path.abspath(program)) if program else os.getcwd()


def _matches(pattern: str, folder: str) -> Iterator[tuple[str, str]]:
    from glob import glob

    root = os.path.dirname(_PACKAGE) if pattern.startswith(OWN) else folder
    is_empty = True
    for name in glob(pattern, root_dir=root, recursive=True):
        path = os.path.join(root, name)
        if os.path.isfile(path):
            is_empty = False
            yield name, path
    if is_empty:
        raise ConfigError(f"[scorer] files: {pattern!r} matches no file in {root}: correct the pattern")


def _loaded(folder: str) -> Iterator[tuple[str, str]]:
    """Yield the source files of modules that were loaded from *folder*."""
    below = os.path.join(os.path.abspath(folder), "")
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.startswith(below) and os.path.isfile(path):
            name = path[len(below) :]
            if not name.startswith(OWN) and "site-packages" not in name and "dist-packages" not in name:
                yield name, path


def _digests(files: Mapping[str, str]) -> Iterator[str]:
    for name, path in sorted(files.items()):
        try:
            with open(path, "rb") as file:
                yield f"{name} {_sha256(file.read())}\n"
        except OSError as error:
            raise ConfigError(f"[scorer] files: cannot read {path}: {error.strerror}") from None


def _versions(packages: Iterable[str]) -> Iterator[str]:
    if not packages:
        return
    from importlib.metadata import PackageNotFoundError, version  # 1.6 MiB, so only if a package is named

    for name in sorted(packages):
        try:
            yield f"{name}=={version(name)}\n"
        except PackageNotFoundError:
            raise ConfigError(f"[scorer] packages: {name!r} is not installed: correct its name") from None


def _sha256(content: bytes) -> str:
    digest: str = _SHA256.sha256(content).hexdigest()
    return digest
