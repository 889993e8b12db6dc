"""The fork server: a process that has imported reasoning-gym once and forks a child for each job.

    python3 puzzle_child.py FD

FD is a Unix socket of the type SOCK_SEQPACKET. Each message on it carries one stream socket: a child reads its job from
there, answers with a line of JSON, and exits. The fork server only forks, waits and kills:

* A child that ends otherwise is reported on its socket by a line `{"died": "SIGXCPU"}`.
* A child whose client closes its socket is killed.
* At the end of FD all children are killed and the fork server exits.

A child has limits: CPU time and memory from its job, and no files to write.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import json
import os
import pickle
import random
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from reasoning_families import MODULES

LENGTH = struct.Struct("!Q")
"""The length of a job in bytes, which precedes it."""
NOT_SETTABLE = frozenset({"seed", "size", "data_file", "static_font"})
"""Fields of configurations that are no parameters: the task has its own seed, each puzzle is a data set of one, and the
last two name files."""
MOST_SEEDS = 20
"""The seeds that are tried for a puzzle whose reference answer earns 1, beginning with the task's."""
MAX_PUZZLE_BYTES = 4 * 2**20
"""The largest puzzle, with what its scorer needs."""


class Refused(Exception):
    """The job cannot be done, and its author can correct it. The text states the value and the remedy."""


def serve_forks(control: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Fork a child that does *work* for each socket that *control* brings; return at its end."""
    woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll, children = select.poll(), dict[int, socket.socket]()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready == control.fileno():
                message, handles, *_ = socket.recv_fds(control, 1, 1)
                if not message:
                    for pid in children:
                        os.kill(pid, signal.SIGKILL)
                    return
                client = socket.socket(fileno=handles[0])
                pid = os.fork()
                if pid == 0:
                    for other in (control, *children.values()):  # an open copy would hide the end of the other's answer
                        other.close()
                    _child(client, work)
                children[pid] = client
                poll.register(client, select.POLLRDHUP)
            elif ready == woken:
                with contextlib.suppress(BlockingIOError):
                    os.read(woken, 4096)
                _reap(children, poll)
            else:
                for pid, client in children.items():
                    if client.fileno() == ready:
                        poll.unregister(client)
                        os.kill(pid, signal.SIGKILL)  # not yet waited for, so the number is still this child's
                        break


def _reap(children: dict[int, socket.socket], poll: select.poll) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        client = children.pop(pid)
        with contextlib.suppress(KeyError):
            poll.unregister(client)
        if status:
            how = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an error"
            with contextlib.suppress(OSError):  # the client has closed its end
                client.send(b'\n{"died": "%s"}\n' % how.encode(), socket.MSG_DONTWAIT)
        client.close()


def _child(client: socket.socket, work: Callable[[socket.socket], None]) -> None:
    """Do *work* and end this process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        work(client)
        status = 0
    except BaseException:  # noqa: BLE001 - whatever happened, this copy of the fork server must not go on
        traceback.print_exc()
    finally:
        os._exit(status)


# -- a job


def do_job(client: socket.socket) -> None:
    """Read a job from *client*, and answer it with the puzzle, a score, or the reason why there is none."""
    (length,) = LENGTH.unpack(_exactly(client, LENGTH.size))
    job = json.loads(_exactly(client, length))
    _limit(cpu_s=job["cpu_s"], memory_bytes=job["memory_bytes"])
    try:
        answer = _made(job) if job["do"] == "make" else _scored(job)
    except Refused as refusal:
        answer = {"refused": str(refusal)}
    client.sendall(json.dumps(answer).encode() + b"\n")


def _exactly(client: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = client.recv(min(length - len(parts), 2**20))
        if not part:
            raise EOFError("the client closed its socket within a job")
        parts += part
    return bytes(parts)


def _limit(*, cpu_s: int, memory_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, mapped + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _made(job: Mapping[str, Any]) -> dict[str, Any]:
    """Make the puzzle of the first seed, from the job's on, whose reference answer earns 1."""
    failed = ""
    for seed in range(job["seed"], job["seed"] + MOST_SEEDS):
        # Some families draw from the shared generators of Python and numpy.
        random.seed(seed)
        importlib.import_module("numpy").random.seed(seed)
        data = _data_set(job["family"], job["parameters"], seed=seed)
        try:
            entry = data[0]
            kept = base64.b64encode(pickle.dumps(entry)).decode()
            question, reference = entry["question"], entry["answer"]
            if not isinstance(question, str) or not isinstance(reference, str):
                raise TypeError("the question or its reference answer is no text")
            reward = data.score_answer(reference, entry)
        except Exception as error:  # noqa: BLE001 - any fault of the library is this job's answer
            failed = f"{type(error).__name__}: {error}"[:500]
            continue
        if len(kept) > MAX_PUZZLE_BYTES:
            raise Refused(f"parameters: the puzzle takes more than {MAX_PUZZLE_BYTES} bytes: choose smaller ones")
        if reward == 1.0 and reference.strip():
            return {"question": question, "reference": reference, "entry": kept}
        failed = f"its reference answer {reference[:100]!r} earns {reward}"
    return {"failed": failed}


def _scored(job: Mapping[str, Any]) -> dict[str, Any]:
    entry = pickle.loads(base64.b64decode(job["entry"]))  # written by `_made` in another child
    try:
        return {"score": float(_data_set(job["family"], job["parameters"], seed=0).score_answer(job["answer"], entry))}
    except Exception as error:  # noqa: BLE001 - scorers raise whatever an odd answer leads to
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _data_set(family: str, parameters: Mapping[str, Any], *, seed: int) -> Any:
    """Return the data set of one puzzle of *family*.

    Raises:
        Refused: A parameter is unknown, of a wrong type, or not allowed by the family's own check.
    """
    kind, config_kind = importlib.import_module("reasoning_gym.factory").DATASETS[family]
    known = parameters_of(config_kind)
    settable = ", ".join(f"{name}={_shown(default)}" for name, default in known.items()) or "none"
    given = {}
    for name, value in parameters.items():
        if name not in known:
            raise Refused(f"parameters.{name}: {family} has no such parameter; known, with defaults: {settable}")
        given[name] = read_value(name, value, known[name])
    try:
        config = config_kind(seed=seed, size=1, **given)
        if hasattr(config, "validate"):
            config.validate()
        return kind(config)
    except Exception as error:
        if not given:
            raise
        text = f"{error}" or type(error).__name__
        raise Refused(
            f"parameters: {family} refuses {_shown(parameters)}: {text[:300]}; known, with defaults: {settable}"
        ) from error


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def parameters_of(config_kind: Any) -> dict[str, Any]:
    """Return the parameters that a task can set, with their defaults: the fields that JSON can express."""
    found = {}
    for field in dataclasses.fields(config_kind):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if field.name not in NOT_SETTABLE and _is_plain(default):
            found[field.name] = default
    return found


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_plain(one) for one in value)
    return type(value) in (bool, int, float, str, type(None))


def read_value(name: str, value: object, default: object) -> object:
    """Return *value* as the family's configuration wants it.

    Raises:
        Refused: Its type is not the type of *default*.
    """
    fits: bool
    match default:
        case None:
            fits = _is_plain(value)
        case bool():
            fits = isinstance(value, bool)
        case int():
            fits = isinstance(value, int) and not isinstance(value, bool)
        case float():
            fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        case str():
            fits = isinstance(value, str)
        case list() | tuple():
            kinds = {type(one) for one in default}
            fits = isinstance(value, list) and (not kinds or all(type(one) in kinds for one in value))
            if fits and isinstance(value, list):
                return type(default)(value)
        case _:
            fits = False
    if not fits:
        wanted = {"NoneType": "a plain value", "tuple": "list"}.get(type(default).__name__, type(default).__name__)
        raise Refused(
            f"parameters.{name}: {_shown(value)} is not of the type {wanted}; the default is {_shown(default)}"
        )
    return value


def import_families() -> None:
    """Import the modules of the offered families, and no others.

    The library's packages import all their families, and with these a plotting library and more. So the packages become
    bare parents, whose `__init__` never runs.

    Raises:
        ImportError: A module is not in its place, or a requirement is not installed.
    """
    sys.modules["pycosat"] = _sat_solver()
    for module in ("", *MODULES.values()):
        parts = f"reasoning_gym.{module}".rstrip(".").split(".")
        for depth in range(1, len(parts) + (not module)):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                spec = importlib.util.find_spec(name)
                if spec is None:
                    raise ModuleNotFoundError(f"no package {name}", name=name)
                sys.modules[name] = importlib.util.module_from_spec(spec)
        if module:
            importlib.import_module(f"reasoning_gym.{module}")


def _sat_solver() -> ModuleType:
    """Return a module `pycosat` that solves with python-sat, which need not be compiled. The puzzles are the same."""
    solvers: Any = importlib.import_module("pysat.solvers")

    def itersolve(clauses: list[tuple[int, ...]]) -> Iterator[list[int]]:
        with solvers.Solver("minisat22", bootstrap_with=clauses) as solver:
            yield from solver.enum_models()

    module: Any = ModuleType("pycosat")
    module.itersolve = itersolve
    return module  # type: ignore[no-any-return]


def main(arguments: list[str]) -> None:
    """Import the library, say so on the control socket, and serve until its end."""
    control = socket.socket(fileno=int(arguments[0]))
    import_families()
    gc.collect()
    gc.freeze()  # a collection in a child would copy the parent's pages
    control.send(b"ready")
    serve_forks(control, do_job)


if __name__ == "__main__":
    main(sys.argv[1:])
