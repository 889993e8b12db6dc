"""Runs in the sandbox, as `python3 -I -c`: calls a solution once and writes what it answers, as one framed line.

It knows the input of one case and no expected output. So it is no wall and needs to be none: a solution that takes it
over can only say another answer, which is compared outside. What it does is for honest solutions: what they print,
threads that they leave and what they do at exit must not spoil their answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from typing import Any


def result_of(request: dict[str, Any]) -> Any:
    """Load the solution and call its function, or run a test script in its namespace."""
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with contextlib.suppress(SyntaxError):  # the beginning of a function, which the solution says again as a whole
        exec(compile(request.get("prelude", ""), "prelude.py", "exec"), module.__dict__)
    exec(compile(request["source"], "solution.py", "exec"), module.__dict__)
    if "script" in request:
        exec(compile(request["script"], "test.py", "exec"), module.__dict__)
        return None
    function = getattr(module, request["function"], None)
    if function is None:
        raise NameError(f"solution.py does not define {request['function']}")
    return function(*request["arguments"])


def fault_of(error: BaseException) -> str:
    """Describe *error* by its class, its text and the last line of the solution that it came through."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "solution.py":
            line = trace.tb_lineno
        trace = trace.tb_next
    try:
        text = str(error)[:500]
    except BaseException:  # noqa: BLE001 - the solution's own exception class may raise anything when printed
        text = ""
    return f"{type(error).__name__}: {text}" + (f" (solution.py, line {line})" if line else "")


def main() -> None:
    """Answer one request from standard input on standard output, and leave at once."""
    request = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    # Taken before the solution can replace them by accident, with a function of the same name for example.
    dumps, write, leave, encode = json.dumps, os.write, os._exit, str.encode
    try:
        text = '{"answer":' + dumps(result_of(request), allow_nan=False) + "}"
    except BaseException as error:  # noqa: BLE001 - SystemExit is an answer too: a wrong one
        text = dumps({"fault": fault_of(error)})
    frame = memoryview(encode(request["nonce"] + text + "\n"))
    while frame:
        frame = frame[write(answers, frame) :]
    leave(0)  # no atexit, no waiting for threads


main()
