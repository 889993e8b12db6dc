"""Runs in the sandbox, as `python3 -I -c`: calls a solution once and writes its answer as one framed line.

It knows the input of one case and no expected output. So it need not be protected: a solution that takes it over can
only give another answer, which the server compares. It protects honest solutions: their output, remaining threads and
exit handlers must not spoil their answer.
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
    with contextlib.suppress(SyntaxError):  # the start of a function, which the solution repeats as a whole
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
    """Describe *error* by its class, its text and the last line of the solution that it passed through."""
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
    """Answer one request from standard input on standard output, and exit immediately."""
    request = json.loads(sys.stdin.buffer.read())
    answers = os.dup(1)
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    # Taken before the solution can replace them by accident, for example with a function of the same name.
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
