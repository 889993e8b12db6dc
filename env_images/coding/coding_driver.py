"""Runs in the sandbox, as `python3 -I -c`: calls a solution once and writes its answer as one framed line.

It knows the input of one case and no expected output. So it need not be protected: a solution that takes it over can
only give another answer, which the server compares. It protects honest solutions: their output, remaining threads and
exit handlers must not spoil their answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import reprlib
import sys
import types
from collections.abc import Set
from typing import Any

SHORT = reprlib.Repr()
SHORT.maxlist = SHORT.maxtuple = SHORT.maxset = SHORT.maxfrozenset = SHORT.maxdict = 50
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 500


def encoded(value: Any) -> Any:
    """Return a value of Python's own types as JSON that keeps its type; a value of another type is `["other"]`.

    An object of a subclass becomes one of Python's type, which it equals. `coding_checks` reads this form.
    """
    if value is None or value is True or value is False or isinstance(value, str):
        return value
    if isinstance(value, int):
        return ["int", hex(value)]  # decimal digits are limited in number
    if isinstance(value, float):
        return ["float", float.hex(value)]
    if isinstance(value, complex):
        return ["complex", float.hex(value.real), float.hex(value.imag)]
    if isinstance(value, bytes | bytearray):
        return ["bytes", value.hex()]
    if isinstance(value, list | tuple):
        return ["list" if isinstance(value, list) else "tuple", [encoded(item) for item in value]]
    if isinstance(value, Set):  # also the keys of a dict
        return ["set", [encoded(item) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encoded(key), encoded(item)] for key, item in value.items()]]
    if type(value).__name__ in ("Fraction", "Decimal"):
        with contextlib.suppress(ValueError, OverflowError):  # Decimal's NaN and infinities
            kind = "ratio" if type(value).__name__ == "Fraction" else "decimal"  # which no float can be subtracted from
            return [kind, *map(hex, value.as_integer_ratio())]
    return ["other"]


def compiled(source: str, name: str, *, mode: str = "exec") -> types.CodeType:
    """Compile *source* as its own file would be: without this file's ``__future__`` import, which turns annotations
    into texts."""
    return compile(source, name, mode, dont_inherit=True)


def with_text_keys(value: Any) -> Any:
    """Return *value*, whose dictionaries have keys of type str. JSON would turn other keys into texts.

    Raises:
        TypeError: A key has another type.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the answer has a key of type {type(key).__name__}; keys are texts here")
            with_text_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            with_text_keys(item)
    return value


def result_of(request: dict[str, Any]) -> tuple[Any, str]:
    """Load the solution and call its function, evaluate a call, or run a test script in its namespace.

    Return the answer, and a call's value as a text for the agent.
    """
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    with contextlib.suppress(SyntaxError):  # the start of a function, which the solution repeats as a whole
        exec(compiled(request.get("prelude", ""), "prelude.py"), module.__dict__)
    exec(compiled(request["source"], "solution.py"), module.__dict__)
    if "script" in request:
        exec(compiled(request["script"], "test.py"), module.__dict__)
        return None, ""
    if "call" in request:
        exec(compiled(request["setup"], "setup.py"), module.__dict__)
        value = eval(compiled(request["call"], "test.py", mode="eval"), module.__dict__)
        return (bool(value) if request["is_truth"] else encoded(value)), SHORT.repr(value)
    function = getattr(module, request["function"], None)
    if function is None:
        raise NameError(f"solution.py does not define {request['function']}")
    return with_text_keys(function(*request["arguments"])), ""


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
        answer, said = result_of(request)
        text = '{"answer":' + dumps(answer, allow_nan=False) + (',"shown":' + dumps(said) if said else "") + "}"
    except BaseException as error:  # noqa: BLE001 - SystemExit is an answer too: a wrong one
        text = dumps({"fault": fault_of(error)})
    frame = memoryview(encode(request["nonce"] + text + "\n"))
    while frame:
        frame = frame[write(answers, frame) :]
    leave(0)  # no atexit, no waiting for threads


if __name__ == "__main__":
    main()
