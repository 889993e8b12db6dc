"""The command lines of the package's own small interpreters, which import none of the server's modules."""

import os
import sys

# Create the packages by hand, because their __init__ modules import the whole server.
_BOOT = """
import importlib, sys, types
for name, path in (("envserver", sys.argv[1]), ("envserver.sandbox", sys.argv[2])):
    package = types.ModuleType(name)
    package.__path__ = [path]
    sys.modules[name] = package
importlib.import_module("envserver.sandbox." + sys.argv[3]).main(*map(int, sys.argv[4:]))
"""


def command(module: str, *arguments: int) -> list[str]:
    """Return the command line that runs the function ``main`` of *module* with *arguments*."""
    here = os.path.dirname(os.path.abspath(__file__))
    names = [os.path.dirname(here), here, module, *map(str, arguments)]
    return [sys.executable, "-I", "-S", "-c", _BOOT, *names]
