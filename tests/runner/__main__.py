"""Run the tests: prepare their needs, run them in stages, and record where the time goes.

    python -m tests.runner [--seed NUMBER] [--load PROCESSES] [--hunt ROUNDS] [PYTEST ARGUMENT…]

scripts/test calls this with any Python of the machine. The runner installs the packages first, while it prepares the
other needs. Without arguments for pytest all tests run in parallel. Tests with the mark ``cluster`` run one by one,
concurrently with the others. With arguments, pytest selects the tests, and the runner prepares only their needs.

    --seed NUMBER      runs the tests in another order, and tries other generated input; NUMBER determines both
    --load PROCESSES   runs that many busy processes beside the tests
    --hunt ROUNDS      repeats the run, each round with another seed and by default under a load of ten busy processes
                       for each CPU, until a test fails or all rounds were green

The records of the run are in build/tests:

    stages.json        seconds of each stage and of each preparing script
    durations.json     seconds of each test file, in the form of tests/durations.json
    LANE.jsonl         every phase of every test: outcome, seconds, failure, logs
    order-PROCESS.txt  the tests of a process with a failure, in the order of the run
    preparation.log    output of the preparing scripts
    hangs/             stacks of all processes of tests that did not end
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.runner import stacks
from tests.runner.lanes import (
    BY_DURATION,
    GIVEN,
    LANE_VARIABLE,
    ORDER_VARIABLE,
    PLAYED,
    READY_VARIABLE,
    RUN_VARIABLE,
    reproduce,
)
from tests.runner.preparation import PROJECT, STEPS, Preparation

RUN = PROJECT / "build" / "tests"
PYTHON = PROJECT / ".venv" / "bin" / "python"
IS_CI = os.environ.get("CI") == "true"
LANE_S = 4_500.0
"""Maximum seconds of one pytest process. A longer run hangs. Each busy process for each core adds as much."""
PLUGINS = ("-p", "tests.runner.needs", "-p", "tests.runner.plugin")
LOOK_S = 0.2
END_S = 60.0
"""Seconds that lanes have for their fixtures' cleanup when the run is interrupted."""
MOST_FAILURES = 20
NOTHING_COLLECTED = 5
FEW = 20
"""Maximum number of tests that one process runs in less time than several processes take to start."""
CORES = os.cpu_count() or 1
SLOWEST = 10
"""Number of files that the end of a run lists."""
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"
"""A process that uses as much CPU as it gets, until its parent, whose process id is its argument, ends."""


@dataclass
class Run:
    """One run: its environment, the times of its stages, and the statuses of its pytest processes."""

    environ: Mapping[str, str]
    lane_s: float = LANE_S
    stages: dict[str, float] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    lanes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measure a stage. The time of concurrent stages counts for each of them."""
        began = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            yield
        finally:
            self.stages[name] = round(time.monotonic() - began, 1)
            print(f"== {name}: {self.stages[name]:.0f} s", flush=True)

    def install(self, preparation: Preparation) -> bool:
        """Wait for the packages that pytest and the tests import. Return True if they are installed."""
        with self.stage("install"):
            is_installed = preparation.wait("packages")
        if not is_installed:
            self.statuses["install"] = 1
        return is_installed

    def start(self, lane: str, *arguments: str, stdout: int | None = None) -> subprocess.Popen[bytes]:
        """Start pytest on *lane*."""
        command = [str(PYTHON), "-m", "pytest", *PLUGINS, "-qq", "--no-header", "--no-summary"]
        if (order := self.environ[ORDER_VARIABLE]).isdecimal():
            command.append(f"--hypothesis-seed={order}")
        environ = {**self.environ, LANE_VARIABLE: lane}
        process = subprocess.Popen(
            [*command, *arguments], cwd=PROJECT, env=environ, stdin=subprocess.DEVNULL, stdout=stdout
        )
        self.lanes.append(process)
        return process

    def collected(self, collecting: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        """Wait for a collection. Return the needs, lanes and number of the tests, or None if a file has an error."""
        output, _ = collecting.communicate(timeout=self.lane_s)
        if collecting.returncode:
            print(output.decode(), flush=True)
            self.statuses["collect"] = collecting.returncode
            return None
        found: dict[str, Any] = json.loads((RUN / "collected.json").read_text())
        return found

    def end(self) -> None:
        """End the lanes that still run after an interrupt, at first as Ctrl-C does, so that their fixtures clean up.

        Then kill the processes that the run left.
        """
        for process in self.lanes:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
        for process in self.lanes:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                stacks.kill([process.pid, *stacks.descendants(process.pid)])
        # A test process that is interrupted or crashes leaves its gateways, which would start workers for ever.
        stacks.kill(stacks.with_variable(RUN_VARIABLE, str(RUN)))

    def wait(self, lanes: Mapping[str, subprocess.Popen[bytes]]) -> None:
        """Wait for concurrent lanes. Print the stacks of a lane that hangs, and kill it."""
        began = time.monotonic()
        print(f"== {', '.join(lanes)}", flush=True)
        left = dict(lanes)
        while left:
            for lane, process in list(left.items()):
                seconds = time.monotonic() - began
                if process.poll() is None and seconds > self.lane_s:
                    found = [process.pid, *stacks.descendants(process.pid)]
                    late = f"scripts/test: {lane} did not end within {self.lane_s:.0f} s"
                    print(f"{late}\n{stacks.report(found)}", flush=True)
                    stacks.kill(found)
                    process.wait()
                if (status := process.poll()) is not None:
                    del left[lane]
                    self.statuses[lane], self.stages[lane] = status, round(seconds, 1)
                    print(f"== {lane}: {seconds:.0f} s", flush=True)
            time.sleep(LOOK_S)


def main(arguments: Sequence[str]) -> int:
    options, chosen = parsed(arguments)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, _interrupt)  # a shell ignores SIGINT for a background process
    with busy(options.load):
        if options.hunt:
            return hunt(options.hunt, lambda seed: run_once(chosen, seed, load=options.load))
        return run_once(chosen, options.seed, load=options.load)


def hunt(rounds: int, run: Callable[[str], int]) -> int:
    """Call *run* with a seed for each round, until it returns another status than 0, and return its last status."""
    for number in range(1, rounds + 1):
        print(f"== round {number} of {rounds}", flush=True)
        if status := run(str(number)):
            return status
    return 0


def parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the runner's options, and the arguments for pytest. Files of arguments are read: a run removes its own."""
    parser = argparse.ArgumentParser(prog="scripts/test", add_help=False, allow_abbrev=False)
    parser.add_argument("--hunt", type=int, default=0)
    parser.add_argument("--load", type=int)
    parser.add_argument("--seed", type=int)
    options, rest = parser.parse_known_args(arguments)
    if options.load is None:
        options.load = 10 * CORES if options.hunt else 0
    options.seed = BY_DURATION if options.seed is None else str(options.seed)
    chosen: list[str] = []
    for argument in rest:
        if argument.startswith("@"):
            options.seed = GIVEN
            chosen += (PROJECT / argument[1:]).read_text().splitlines()
        else:
            chosen.append(argument)
    return options, chosen


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run that many busy processes."""
    command = [sys.executable, "-c", BUSY, str(os.getpid())]
    load = [subprocess.Popen(command, stdin=subprocess.DEVNULL) for _ in range(processes)]
    try:
        yield
    finally:
        for process in load:
            process.kill()
            process.wait()


def run_once(chosen: Sequence[str], order: str, *, load: int) -> int:
    """Run the tests in *order* once, beside *load* busy processes, and return the exit status."""
    os.environ[ORDER_VARIABLE] = order  # also for the commands in the last lines
    shutil.rmtree(RUN, ignore_errors=True)
    (RUN / "ready").mkdir(parents=True)
    run = Run(
        {
            **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
            RUN_VARIABLE: str(RUN),
            READY_VARIABLE: str(RUN / "ready"),
        },
        lane_s=LANE_S * (1 + load / CORES),
    )
    began = time.monotonic()
    try:
        run_all(run) if not chosen else run_some(run, chosen)
    finally:
        run.end()
    run.stages["all"] = round(time.monotonic() - began, 1)
    return report(run)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def run_all(run: Run) -> None:
    """Run the checks (in CI), and then all tests. Stop after a failed check, or a file that cannot be imported."""
    preparation = prepare(list(STEPS))
    try:
        if not run.install(preparation):
            return
        # Import and compile every file once before several processes need it, so that errors show within a minute.
        collecting = run.start("collect", "--collect-only", stdout=subprocess.PIPE)
        if IS_CI:
            with run.stage("checks"):
                run.statuses["checks"] = subprocess.run(["scripts/check"], cwd=PROJECT).returncode
        if run.collected(collecting) is None or run.statuses.get("checks"):
            return
        # This lane starts and kills machines and mostly waits for their detection, so it starts first.
        cluster = run.start("cluster", *files_with_clusters())
        main = run.start("main", f"-n{workers()}", *BY_FILE, f"--maxfail={MOST_FAILURES}")
        run.wait({"cluster": cluster, "main": main})
    finally:
        preparation.stop()
        run.stages |= {f"preparation: {name}": seconds for name, seconds in preparation.seconds.items()}


def run_some(run: Run, arguments: Sequence[str]) -> None:
    """Run the tests that *arguments* select, and prepare only their needs. A repeated order needs one process."""
    if not run.install(prepare(["packages"])):
        return
    found = run.collected(run.start("collect", "--collect-only", *arguments, stdout=subprocess.PIPE))
    if found is None:
        return
    prepare(found["needs"]).wait()
    is_parallel = found["tests"] > FEW and run.environ[ORDER_VARIABLE] != GIVEN
    for lane in found["lanes"]:
        parallel = (f"-n{workers()}", *BY_FILE) if lane == "main" and is_parallel else ()
        run.wait({lane: run.start(lane, *parallel, *arguments)})


BY_FILE = ("--dist=loadfile", "--no-loadscope-reorder")
"""Options that give each process whole files, because a module's fixtures are real servers, started once for it.
The plugin decides the order of files."""


def workers() -> int:
    """Return the number of concurrent test processes: by default two for each core, because many tests wait.

    With more, the programs of tests take turns more often. On a virtual machine each turn costs CPU time: among twelve
    busy processes, the start of Python took up to ten times as much of it.
    """
    return int(os.environ.get("PYTEST_WORKERS", 2 * CORES))


def files_with_clusters() -> list[str]:
    """Return the files with tests of the cluster lane, because the collection of all files takes half a minute."""
    files = [*PROJECT.glob("tests/docker/test_*.py"), *PROJECT.glob("bench/tests/test_*.py")]
    return [str(file) for file in sorted(files) if "mark.cluster" in file.read_text()]


def prepare(needs: Sequence[str]) -> Preparation:
    preparation = Preparation(needs, ready=RUN / "ready", log=RUN / "preparation.log")
    preparation.start()
    return preparation


def report(run: Run) -> int:
    """Write the records and print the summary; return the exit status."""
    outcomes: Counter[str] = Counter()
    seconds: defaultdict[str, float] = defaultdict(float)
    failed: dict[str, None] = {}
    skipped: Counter[str] = Counter()
    played: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for records in RUN.glob("*.jsonl"):
        for row in map(json.loads, records.read_text().splitlines()):
            seconds[row["test"].partition("::")[0]] += row["seconds"]
            if row["outcome"] == "failed":
                failed[row["test"]] = None
            elif row["outcome"] == "skipped":
                skipped[row.get("reason", "")] += 1
            elif row["when"] == "call":
                outcomes["passed"] += 1
            if plays := row.get(PLAYED):
                played[plays["environment"], plays["where"]] += Counter(won=plays["won"], lost=plays["lost"])
    outcomes["failed"] = len(failed)
    files = {file: round(taken, 1) for file, taken in sorted(seconds.items())}
    (RUN / "durations.json").write_text(json.dumps({"stages": run.stages, "files": files}, indent=1) + "\n")
    (RUN / "stages.json").write_text(json.dumps(run.stages, indent=1) + "\n")
    print("\nseconds by stage:", *(f"  {taken:7.1f}  {name}" for name, taken in run.stages.items()), sep="\n")
    print("slowest files:", *(f"  {taken:7.1f}  {name}" for name, taken in slowest(files)), sep="\n")
    for (environment, where), sums in sorted(played.items()):
        told = f"{sums['won']} won by their reference, {sums['lost']} lost by a wrong play"
        print(f"played {environment} ({where}): {told}, of {number_of_tasks(environment)} tasks")
    for reason, count in skipped.most_common():
        print(f"skipped {count}: {reason}")
    for test in failed:
        print(f"failed: {test}\n  reproduce: {reproduce(test)}")
    for stage, status in run.statuses.items():
        if status and not (status == 1 and failed and stage != "checks"):
            print(f"failed: stage {stage} ended with {status}")
    skips = sum(skipped.values())
    print(f"{outcomes['passed']} passed, {outcomes['failed']} failed" + (f", {skips} skipped" if skips else ""))
    if skips and IS_CI:
        print("scripts/test: nothing may be skipped where CI=true")
        return 1
    return next((status for status in run.statuses.values() if status), 0 if run.statuses else NOTHING_COLLECTED)


def slowest(files: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the `SLOWEST` files with their seconds, the slowest first."""
    return sorted(files.items(), key=lambda pair: -pair[1])[:SLOWEST]


def number_of_tasks(environment: str) -> int:
    """Count the tasks that come with *environment*."""
    return sum(file.read_bytes().count(b"\n") for file in (PROJECT / "tasks" / environment).glob("*.jsonl"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
