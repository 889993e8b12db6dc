"""``make certify``: play all bundled tasks, and write docs/certified.md from the records of the run.

    python -m tests.answers.certify [PYTEST ARGUMENT…]

With arguments, which select tests, it prints the page. It ends with status 1 if a test failed or was skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from tests.answers.groups import ROOT
from tests.runner.__main__ import RUN, number_of_tasks
from tests.runner.lanes import CERTIFIED, PLAYED

PAGE: Final = ROOT / "docs" / "certified.md"
FILES: Final = (
    "tests/answers",
    *(f"tests/envs/test_{name}.py" for name in ("chat", "coding_tasks", "game_tasks", "math", "os_tasks")),
    "tests/docker/test_browser_tasks.py",
)
"""The tests that play groups, and the tests that play whole episodes of all tasks."""
SHOWN_CHARS: Final = 30
INTRODUCTION: Final = """# Certified rewards

`make certify` plays all bundled tasks and writes this page. It was last written on {date} at commit `{commit}`.

* **notations**: forms in which right answers were written; each earned 1.
* **near misses**: wrong answers made from each reference, and the most that one of them earned. Above 0.05 it is the
  documented reward of an answer that is right in part.
* **constant**: the one answer, or cycle of at most four moves, that earned most in all tasks of the group, and its mean
  reward.
* **nothing**: the most that an empty answer, an echo of the prompt, or no answer earned.

An empty cell means that the group has no such answers, or that its tasks are samples. The rules are in
[tests/answers](../tests/answers/groups.py).
"""


def page(rows: Iterable[Mapping[str, Any]], *, commit: str, date: str) -> str:
    """Return the page for the records of a run."""
    groups, plays = {}, defaultdict[tuple[str, str], Counter[str]](Counter)
    for row in rows:
        if group := row.get(CERTIFIED):
            groups[group["group"]] = group
        if played := row.get(PLAYED):
            plays[played["environment"], played["where"]] += Counter(won=played["won"], lost=played["lost"])
    lines = [
        INTRODUCTION.format(commit=commit, date=date),
        "| group | tasks | notations | near misses | most | constant | mean | nothing |",
        "| --- | --: | --: | --: | --: | --- | --: | --: |",
        *(f"| {' | '.join(_cells(groups[name]))} |" for name in sorted(groups)),
        "\nWhole episodes:\n",
        "| environment | where | tasks | won by the reference | lost by a wrong play |",
        "| --- | --- | --: | --: | --: |",
        *(
            f"| {environment} | {where} | {number_of_tasks(environment)} | {sums['won']} | {sums['lost']} |"
            for (environment, where), sums in sorted(plays.items())
        ),
    ]
    return "\n".join(lines) + "\n"


def _cells(group: Mapping[str, Any]) -> Iterator[str]:
    yield group["group"]
    yield str(group["tasks"])
    yield str(group.get("notations") or "")
    yield str(group.get("near_misses") or "")
    yield f"{group['worst']:.2f}" if group.get("near_misses") else ""
    constant = " ".join(group.get("constant", "").split()).replace("|", "")
    yield f"`{constant[:SHOWN_CHARS]}`" if constant else ""
    yield f"{group['mean']:.2f}" if constant else ""
    yield f"{group['floor']:.2f}" if "floor" in group else ""


def main(arguments: Sequence[str]) -> int:
    """Run the tests; write the page, or print it if *arguments* select tests. Return 1 if a test did not pass."""
    environ = {**os.environ, "BUNDLED_TASKS": "all"}
    done = subprocess.run([ROOT / "scripts" / "test", *FILES, *arguments], env=environ, check=False)
    rows = [json.loads(line) for file in RUN.glob("*.jsonl") for line in file.read_text("utf-8").splitlines()]
    if done.returncode or any(row["outcome"] != "passed" for row in rows):
        print("not certified: a test failed or was skipped", file=sys.stderr)
        return 1
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    text = page(rows, commit=commit, date=f"{datetime.now(UTC):%Y-%m-%d}")
    if arguments:
        print(text)
    else:
        PAGE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
