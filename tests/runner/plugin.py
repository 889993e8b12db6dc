"""Pytest plugin of the runner: the order of tests, immediate reports of failures and hangs, and test records."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import json
import os
import random
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Set
from pathlib import Path
from typing import Any

import pytest

from tests.runner import logs, stacks
from tests.runner.lanes import CERTIFIED, GIVEN, LANE_VARIABLE, ORDER_VARIABLE, PLAYED, RUN_VARIABLE, reproduce, seed
from tests.runner.needs import needs_of
from tests.runner.shared import end_of_scope

PROJECT = Path(__file__).resolve().parents[2]
DURATIONS = PROJECT / "tests/durations.json"
"""File with the seconds that each test file took in a measured run. It determines the order of tests."""
NEW_FILE_S = 5.0
"""Seconds of a test file that has no record."""
PROGRESS_S = 30.0
WATCH_S = 0.5
"""Seconds between two looks for a test that takes too long."""
CLEANUP_S = 60.0
"""Seconds that a timed-out test has for its fixtures' cleanup before its processes are killed."""
SHOWN = 6_000
"""Maximum characters of a failure, and of each of its logs, that are printed immediately. The record has all."""
ROUNDS = 20
"""Rounds of the command that hunts a failure."""


# -- selection and order of tests ----------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Keep the tests of this lane, and spread each folder evenly over the run, its longest files first.

    Some folders need the CPU and others wait most of their time, so together they use the machine best. A long file
    that starts last keeps one process busy and leaves the others idle. The order within a file stays, except with a
    seed: then files and their tests have a random order.
    """
    random_order = None if (number := seed()) is None else random.Random(number)
    if random_order is not None:
        random_order.shuffle(items)  # before pytest groups the tests of each file by their fixtures
        items.sort(key=lambda item: _file(item.nodeid))
    yield
    lane = os.environ.get(LANE_VARIABLE)
    if lane in ("main", "cluster"):
        others = [item for item in items if (item.get_closest_marker("cluster") is not None) != (lane == "cluster")]
        if others:
            config.hook.pytest_deselected(items=others)
            items[:] = [item for item in items if item not in set(others)]
    if os.environ.get(ORDER_VARIABLE) == GIVEN:
        return
    places = _places({_file(item.nodeid) for item in items}, random_order)
    items.sort(key=lambda item: places[_file(item.nodeid)])


def _places(files: Set[str], random_order: random.Random | None) -> dict[str, tuple[float, str, str]]:
    """Return where each file belongs in the order of tests: after which part of its folder, by recorded seconds."""
    if random_order is not None:
        drawn = {scope: random_order.random() for scope in sorted({_scope(file) for file in files})}
        return {file: (drawn[_scope(file)], _scope(file), "") for file in files}
    durations: dict[str, float] = json.loads(DURATIONS.read_text())["files"] if DURATIONS.exists() else {}
    scopes: defaultdict[str, float] = defaultdict(float)
    for file in sorted(files):
        scopes[_scope(file)] += durations.get(file, NEW_FILE_S)
    sums: defaultdict[str, float] = defaultdict(float)
    for scope, seconds in scopes.items():
        sums[_folder(scope)] += seconds
    begun: defaultdict[str, float] = defaultdict(float)
    places: dict[str, float] = {}
    for scope, seconds in sorted(scopes.items(), key=lambda pair: (-pair[1], pair[0])):
        folder = _folder(scope)
        places[scope] = begun[folder] / sums[folder]
        begun[folder] += seconds
    return {file: (places[_scope(file)], _scope(file), file) for file in files}


def _folder(scope: str) -> str:
    return "/".join(scope.split("/")[:2])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each process whole files, and give all files with the same shared servers to one process.

    Gateways, official servers and their workers cost each process that starts them half a minute of CPU time.
    """
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    class Scheduling(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return _scope(super()._split_scope(nodeid))

    return Scheduling(config, log)


_OF_SHARED = ("target: Target", "place: Place", "@on(", "with_clients(", "bundled: ", "math: Gateway")
"""Texts in files whose tests use the shared servers of their folder."""


@functools.cache
def _scope(file: str) -> str:
    """Return what one process runs as a whole: *file*, or the folder of tests with whose servers it works."""
    path = PROJECT / file
    if not file.startswith(("tests/wire/", "tests/clients/")) or not path.exists():
        return file
    text = path.read_text()
    return path.parent.relative_to(PROJECT).as_posix() if any(word in text for word in _OF_SHARED) else file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """End the shared servers of a scope after its last test."""
    result = yield
    if nextitem is not None and _scope(_file(item.nodeid)) != _scope(_file(nextitem.nodeid)):
        end_of_scope()
    return result


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


# Python 3.11.2 fails to parse a source (SystemError) if a garbage collection meanwhile parses one, too: an object whose
# destructor fails shows a traceback, which parses sources. pytest, to show a failure, and some tests parse sources.
ast.parse = _without_collections()(ast.parse)


def pytest_collection(session: pytest.Session) -> None:
    """Disable garbage collection while pytest imports the test modules: they stay."""
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude the collected tests from garbage collection. In the runner's collection, also write the tests' needs."""
    gc.freeze()
    gc.enable()
    if os.environ.get(LANE_VARIABLE) == "collect":
        lanes = {"cluster" if item.get_closest_marker("cluster") else "main" for item in session.items}
        needs = sorted({need for item in session.items for need in needs_of(item)})
        found = {"needs": needs, "lanes": sorted(lanes), "tests": len(session.items)}
        (_run_folder() / "collected.json").write_text(json.dumps(found))


# -- hangs ----------------------------------------------------------------------------------------------------------


class _Watchdog:
    """Calls a function of the running test at a deadline, from one thread for all tests: threads cost time to start."""

    def __init__(self) -> None:
        self._deadlines: list[tuple[float, Callable[[], None]]] = []
        self._thread: threading.Thread | None = None

    def watch(self, *deadlines: tuple[float, Callable[[], None]]) -> None:
        """Call each function once, after its number of seconds, until the next call of `watch`."""
        now = time.monotonic()
        self._deadlines = [(now + seconds, act) for seconds, act in deadlines]
        if self._thread is None and deadlines:
            self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(WATCH_S)
            now = time.monotonic()
            for deadline in self._deadlines[:]:
                if deadline[0] <= now and deadline in self._deadlines:
                    self._deadlines.remove(deadline)
                    deadline[1]()


_watchdog = _Watchdog()


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Fail a test that exceeds its timeout, with the stacks of all processes. Kill the processes that it left."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    report: list[str] = []

    def expire() -> None:
        found = stacks.descendants(os.getpid())
        report.append(f"{stacks.own_threads()}\n{stacks.report(found)}")
        _note_hang(item.nodeid, report[0])
        signal.pthread_kill(main_thread, signal.SIGALRM)

    def give_up() -> None:  # the main thread does not run its signal handler
        stacks.kill(stacks.descendants(os.getpid()))
        os._exit(70)

    def fail(signum: int, frame: object) -> None:
        pytest.fail(f"the test did not end within {settings.timeout:.0f} s\n{report[0]}", pytrace=False)

    within_s = settings.timeout
    before = signal.signal(signal.SIGALRM, fail)
    _watchdog.watch((within_s, expire), (within_s + CLEANUP_S, give_up))

    def cancel() -> None:
        _watchdog.watch()
        signal.signal(signal.SIGALRM, before)
        if report:
            stacks.kill(stacks.started_since(stacks.descendants(os.getpid()), began))

    item.cancel_timeout = cancel  # type: ignore[attr-defined]  # called by pytest-timeout
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(crashitem: str, report: pytest.TestReport) -> None:
    """Show the stacks of a test whose process was killed."""
    hang = _hang_file(crashitem)
    if hang.exists():
        report.longrepr = f"{report.longrepr}\n{hang.read_text()}"


def _note_hang(nodeid: str, text: str) -> None:
    if RUN_VARIABLE in os.environ:
        file = _hang_file(nodeid)
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)


def _hang_file(nodeid: str) -> Path:
    return _run_folder() / "hangs" / ("".join(c if c.isalnum() else "-" for c in nodeid)[-150:] + ".txt")


# -- reports --------------------------------------------------------------------------------------------------------


_cpu_before = 0.0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note where the logs of servers end before the test."""
    logs.begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the CPU seconds since the previous report, including those of ended child processes, and a failure's logs."""
    global _cpu_before
    report = yield
    if report.failed:
        report.sections += [(f"log of {name}", text) for name, text in logs.of_test()]
    times = os.times()
    now = times.user + times.system + times.children_user + times.children_system
    vars(report)["cpu_s"], _cpu_before = round(now - _cpu_before, 3), now  # xdist passes all attributes on
    return report


class Reporter:
    """Records every test, prints failures immediately, and prints the lane's progress every half minute."""

    def __init__(self, config: pytest.Config, lane: str) -> None:
        self._lane = lane
        self._terminal = config.get_terminal_writer()
        self._records = (_run_folder() / f"{lane}.jsonl").open("a")
        self._began = self._said = time.monotonic()
        self._ended = 0
        self._failed = 0
        self._begun: defaultdict[str, list[str]] = defaultdict(list)
        """The tests of each process, in the order of the run."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        process = getattr(report, "worker_id", self._lane)
        if report.when == "setup":
            self._begun[process].append(report.nodeid)
        row = {
            "test": report.nodeid,
            "when": report.when,
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            "cpu_s": getattr(report, "cpu_s", None),
            "process": process,
        }
        if report.when == "call":
            row |= {name: value for name, value in report.user_properties if name in (PLAYED, CERTIFIED)}
        if report.outcome == "skipped":
            row["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if report.failed:
            self._failed += 1
            text = report.longreprtext
            row |= {"failure": text, "sections": dict(report.sections)}
            captured = "\n".join(f"-- {name}\n{content[-SHOWN:]}" for name, content in report.sections)
            shown = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}\n[…]\n{text[-SHOWN // 2 :]}"
            self._say(f"FAILED {report.nodeid} ({report.when}, {report.duration:.1f} s)\n{shown}\n{captured}".rstrip())
            self._say(self._repeat(report.nodeid, process))
        self._records.write(json.dumps(row) + "\n")
        self._records.flush()
        if report.when == "teardown":
            self._ended += 1
            self._progress()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed += 1
            row = {"test": report.nodeid, "when": "collect", "outcome": "failed", "seconds": 0.0}
            self._records.write(json.dumps(row | {"failure": report.longreprtext}) + "\n")
            self._records.flush()
            self._say(
                f"FAILED {report.nodeid} (collection)\n{report.longreprtext}\nreproduce: {reproduce(report.nodeid)}\n"
            )

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str]:
        """Print no dots: thousands of dots hide the lines that matter."""
        is_told = report.when == "call" or report.outcome != "passed"
        return (report.outcome if is_told else "", "", "")

    def _repeat(self, nodeid: str, process: str) -> str:
        """Return how to repeat a failure: alone, after the same tests, and until it happens again."""
        begun = self._begun[process]
        file = _run_folder() / f"order-{process}.txt"
        file.write_text("\n".join(begun) + "\n")
        order = f"{file.relative_to(PROJECT)}" if file.is_relative_to(PROJECT) else f"{file}"
        return (
            f"reproduce: {reproduce(nodeid)}\n"
            f"after the same {len(begun) - 1} tests as in this run: make test ARGS=@{order}\n"
            f"under load, until it fails again: {reproduce(nodeid, hunt=ROUNDS)}\n"
        )

    def _say(self, text: str) -> None:
        self._terminal.write(f"{text}\n", flush=True)

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._said >= PROGRESS_S:
            self._said = now
            minutes, seconds = divmod(int(now - self._began), 60)
            self._say(f"{self._lane}: {self._ended} tests ended, {self._failed} failed, {minutes}:{seconds:02}")


@pytest.hookimpl(trylast=True)  # after pytest has registered the terminal's reporter
def pytest_configure(config: pytest.Config) -> None:
    lane = os.environ.get(LANE_VARIABLE)
    if lane and lane != "collect" and not hasattr(config, "workerinput"):  # not in a worker process of xdist
        config.pluginmanager.register(Reporter(config, lane), "runner-reporter")


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _run_folder() -> Path:
    return Path(os.environ[RUN_VARIABLE])
