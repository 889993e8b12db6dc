"""Train a small policy on `math` or `game` through the gateway, with one curriculum after the other, and compare.

    python examples/curriculum.py --environment math --seeds 5 --out math.svg --json math.json

Each run has a gateway of its own, since a curriculum is drawn by the records of all that was played there. With --url
it is one run on a gateway that is there already: name one sampler. `examples/README.md` says what is learnt, and how.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # so that it runs as a file, like `demo.py`

from examples.learner.client import Gateway
from examples.learner.lessons import LESSONS
from examples.learner.report import as_json, plot, show
from examples.learner.serving import a_gateway
from examples.learner.training import Plan, Run, train


def main() -> None:
    """Parse the command line, train, and report."""
    options = parsed()
    lesson = LESSONS[options.environment]
    title = f"{options.environment}: score on the held-out split"
    about = {
        "environment": options.environment,
        "tags": list(lesson.tags),
        "episodes": options.episodes,
        "group_size": lesson.group_size,
    }
    runs: list[Run] = []
    for plan in plans(options):
        began_at = time.monotonic()
        runs.append(trained(plan, options))
        line = " ".join(f"{score:.2f}" for _, score in runs[-1].curve)
        told = f"{plan.sampler} seed {plan.seed}: {line} ({time.monotonic() - began_at:.0f} s)"
        print(told, file=sys.stderr, flush=True)
        if options.json is not None:  # after each run, so that a failure of a later run loses nothing
            options.json.write_text(as_json(runs, about=about))
    show(runs, title=title)
    if options.out is not None and not plot(runs, options.out, title=title):
        print("there is no matplotlib (pip install 'env-gateway[bench]'): no plot was drawn", file=sys.stderr)


def parsed() -> argparse.Namespace:
    """Return the checked command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", choices=sorted(LESSONS), default="math")
    parser.add_argument("--samplers", default="uniform,target_success,learning_progress,staged", help="comma-separated")
    parser.add_argument("--seeds", type=_positive, default=5, help="how many, from 0 on")
    parser.add_argument("--episodes", type=_positive, help="of training in each run; default: the environment's own")
    parser.add_argument("--checkpoints", type=_positive, default=10, help="scores on the held-out split in each run")
    parser.add_argument("--rate", type=float, help="of learning, for all samplers; default: the environment's own")
    parser.add_argument("--out", type=Path, help="the plot, an SVG")
    parser.add_argument("--json", type=Path, help="all curves and what they come to")
    parser.add_argument("--url", help="of a gateway that is there already; default: one is started for each run")
    parser.add_argument("--key", default=os.environ.get("GATEWAY_KEY", ""), help="a trainer's key, if --url wants one")
    parser.add_argument("--admin-key", default="", help="an operator's key, if --url wants one")
    options = parser.parse_args()
    lesson = LESSONS[options.environment]
    options.samplers = options.samplers.split(",")
    if unknown := [name for name in options.samplers if name not in lesson.samplers]:
        parser.error(f"--samplers: {unknown[0]!r} is not one of {', '.join(lesson.samplers)}")
    if options.url and len(options.samplers) * options.seeds > 1:
        parser.error("--url: one sampler and one seed, since runs on one gateway would draw by each other's records")
    options.episodes = options.episodes or lesson.episodes
    if options.episodes < options.checkpoints * lesson.group_size:
        parser.error(f"--episodes: {options.checkpoints} checkpoints need {options.checkpoints * lesson.group_size}")
    return options


def plans(options: argparse.Namespace) -> Iterator[Plan]:
    """Yield the plans, seed by seed, so that an aborted run still allows a comparison."""
    lesson = LESSONS[options.environment]
    for seed in range(options.seeds):
        for sampler in options.samplers:
            yield Plan(
                lesson=lesson,
                sampler=sampler,
                seed=seed,
                episodes=options.episodes,
                rate=options.rate or lesson.rates[sampler],
                checkpoints=options.checkpoints,
            )


def trained(plan: Plan, options: argparse.Namespace) -> Run:
    """Run one plan, on an existing gateway or on a new one."""
    if options.url:
        return train(Gateway(options.url, key=options.key, admin_key=options.admin_key), plan)
    with a_gateway(plan.lesson.environment) as url:
        return train(Gateway(url), plan)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be a whole number of at least 1")
    return number


if __name__ == "__main__":
    main()
