"""Starts the command ``gateway``, also as ``python -m gateway.cli``."""

from __future__ import annotations

import gc


def main() -> None:
    """Run the command.

    The garbage collector is off while modules load, because it would scan their objects, which all stay, several times.
    """
    gc.disable()
    from gateway.cli.main import main as run

    gc.freeze()
    gc.enable()
    run()


if __name__ == "__main__":
    main()
