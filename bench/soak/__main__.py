"""``python -m bench.soak``: see `bench.soak.run`."""

import typer

from bench.soak.run import main

typer.run(main)
