"""``make trainers``: run all training runs, or some of them, and record their results.

    python -m tests.trainers [--only NAME …] [--record]

It prints a line for each run, and ends with status 1 if a run fails. ``--record`` writes docs/trainers.json and the
plot docs/trainers.svg, and puts the table of results into docs/trainers.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime

from tests.trainers.page import RESULTS, record, shown
from tests.trainers.runs import RUNS, Result, Run


async def run_all(runs: Sequence[Run]) -> list[Result]:
    """Run each of *runs*, and return the results of the runs that passed."""
    results = []
    for number, run in enumerate(runs, start=1):
        print(f"[{number}/{len(runs)}] {run.name}: ", end="", flush=True)
        try:
            result = await run.result()
        except Exception:  # noqa: BLE001  # the other runs go on
            print("failed", flush=True)
            traceback.print_exc()
            continue
        print(
            f"{shown(result.curve)}, {result.opened} sessions, {result.failed} failed, {result.seconds:.0f} s",
            flush=True,
        )
        results.append(result)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.trainers", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[run.name for run in RUNS], help="runs by name")
    parser.add_argument("--record", action="store_true", help=f"write {RESULTS.name}, the plot and the page's table")
    given = parser.parse_args()
    if given.record and given.only:
        parser.error("--record needs all runs: leave --only out")
    wanted = [run for run in RUNS if given.only is None or run.name in given.only]
    results = asyncio.run(run_all(wanted))
    if len(results) < len(wanted):
        print(f"{len(wanted) - len(results)} of {len(wanted)} runs failed", file=sys.stderr)
        return 1
    if given.record:
        date = datetime.now(UTC).date().isoformat()
        RESULTS.write_text(json.dumps({"date": date, "runs": [asdict(one) for one in results]}, indent=1) + "\n")
        record()
    return 0


if __name__ == "__main__":
    sys.exit(main())
