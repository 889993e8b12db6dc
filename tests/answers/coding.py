"""The groups of `coding`: tasks whose answers are yes or no, and the others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, Final

from tests.answers import sources
from tests.answers.forks import Processes
from tests.answers.groups import WRONG_AT_MOST, Group, Item, bundled, module
from tests.envs.bundled import PROBLEMS

TIME_LIMIT_S: Final = 1.0
"""CPU time of a case, so that a mutation that loops ends soon. The references take a tenth of it."""
PASSED_SOME: Final = 0.99
"""The documented reward of a solution that fails some hidden tests: the fraction that it passes."""
EVERY: Final = 20
EQUAL: Final[Mapping[tuple[str, str], str]] = {
    ("train-evaluate_postfix", "a bound moved"): "a quotient of 0 has no sign",
    ("train-rows_of_triangle", "arguments swapped"): "a sum of two neighbours has no order",
    ("train-life_step", "another arithmetic operator"): "a cell has the same neighbours on both sides",
    ("train-cheapest_route", "a bound moved"): "a route of the same price is as good",
    ("train-max_rectangle", "a bound moved"): "of two equal bars the later one has the whole width",
    ("train-tiling_ways", "a bound moved"): "a tile beyond the edge leaves a bit that no full board has",
    ("test-lru_log", "a constant one less"): "a list of one value has its first value last",
}
"""Tasks and mutations that no hidden test finds, with the reason."""


def coding_groups() -> dict[str, Group]:
    """Return the tasks of `coding`, of which each hidden case runs in a process of its own, without a sandbox."""
    tasks, texts = module("coding", "coding_tasks"), module("coding", "coding_texts")
    groups: dict[str, list[Item]] = {"yes or no": [], "other answers": []}
    for task in bundled("coding"):
        tests = replace(tasks.read_evaluation(task), time_limit_s=TIME_LIMIT_S)
        reference = PROBLEMS[task["id"]].reference
        prompt = texts.opening(task["instruction"], tests, files=[])
        is_yes_or_no = all(isinstance(case.output, bool) for case in tests.hidden)
        item = Item(task["id"], prompt, reference, _judged(tests))
        groups["yes or no" if is_yes_or_no else "other answers"].append(item)
    return {name: _group(name, items) for name, items in groups.items()}


def _group(name: str, items: list[Item]) -> Group:
    is_yes_or_no = name == "yes or no"
    return Group(
        name,
        items,
        (sources.NOTATIONS, sources.IN_TEXT),
        (),
        mutations={name: partial(sources.mutants, mutation=mutation) for name, mutation in sources.MUTATIONS.items()},
        equal=EQUAL,
        partial=WRONG_AT_MOST if is_yes_or_no else PASSED_SOME,
        constants=sources.CONSTANTS,
        every=1 if is_yes_or_no else EVERY,
    )


def _judged(tests: Any) -> Callable[[Any], float]:
    """Return the judge of a text, from which the server takes the solution in two ways; the lower reward counts."""
    blocks, judges = module("coding", "coding_blocks"), module("coding", "coding_judge")

    @cache
    def reward(source: str) -> float:
        async def judge() -> float:
            verdict = await judges.Judge(sandboxes=Processes(judges.DRIVER), error=OSError).judge(tests, source)
            return float(verdict.score)

        return asyncio.run(judge())

    return lambda text: min(reward(blocks.solution_in(text, tests)), reward(blocks.submitted(text, tests)))
