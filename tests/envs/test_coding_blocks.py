"""Which code of a text the coding environment judges."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.coding_world import tasks

blocks: Any = importlib.import_module("coding_blocks")

SOLUTION = "def f(x):\n    return x\n"
FENCED = f"```python\n{SOLUTION}```\n"
PROGRAM = "n = int(input())\nprint(n + 1)\n"

FUNCTION = tasks.read_evaluation({"evaluation": {"function": "f", "test_cases": [{"arguments": [1], "output": 1}]}})
STDIN = tasks.read_evaluation({"evaluation": {"test_cases": [{"input": "1\n", "output": "2\n"}]}})
SCRIPTS = tasks.read_evaluation(
    {"evaluation": {"test_scripts": [{"code": "values = [f(x) for x in [1]]\nassert values == [1]"}]}}
)
CALLS = tasks.read_evaluation({"evaluation": {"test_cases": [{"call": "f(1)", "test": "answer == 1"}]}})
COMPLETION = tasks.read_evaluation(
    {
        "evaluation": {
            "function": "f",
            "prelude": 'def f(x):\n    """Return x."""\n',
            "test_cases": [{"arguments": [1], "output": 1}],
        }
    }
)


def indented(text: str, by: int) -> str:
    return "".join(" " * by + line for line in text.splitlines(keepends=True))


TEXTS = {
    "the text alone": SOLUTION,
    "one block": FENCED,
    "a draft before": f"```python\ndef f(x):\n    return 0\n```\nBetter:\n{FENCED}",
    "a call after": f"{FENCED}\nUsage:\n\n```python\nprint(f(1))\n```\n",
    "a long example after": f"{FENCED}\n```python\n{'print(f(1))' * 1}\n{'# more' * 99}\n```\n",
    "an output after": f"{FENCED}\nOutput:\n\n```\n1\n```\n",
    "JSON after": FENCED + '```json\n{"f": 1}\n```\n',
    "a shell command after": f"{FENCED}\n```bash\npython solution.py\n```\n",
    "another language after": f"{FENCED}\n```cpp\nint f(int x) {{ return x; }}\n```\n",
    "a draft in the reasoning": f"<think>Perhaps\n```python\ndef f(x):\n    return 0\n```\n</think>\n{FENCED}",
    "a fence within a line of the reasoning": f"<think>Maybe ```python\nx = 1\n``` would do.</think>\n\n{FENCED}",
    "a fence within a line, without tags": f"Maybe ```python\nx = 1\n``` would do.\n\n{FENCED}",
    "in a list": f"1. The code:\n\n{indented(FENCED, 3)}",
    "on the line of a list's mark": "- " + indented(FENCED, 2).lstrip(),
    "in a nested list": f"- a\n  - b\n\n{indented(FENCED, 4)}",
    "far to the right": indented(FENCED, 8),
    "tildes": f"~~~python\n{SOLUTION}~~~\n",
    "four backticks": f"````\n{SOLUTION}````\n",
    "not closed": f"The code:\n```python\n{SOLUTION}",
    "closed by an end token": f"```python\n{SOLUTION}```<|im_end|>",
    "in tags": f"<answer>\n{FENCED}</answer>",
    "in tags on the fence's line": f"<answer>```python\n{SOLUTION}```</answer>",
    "in tags without a fence": f"So: <answer>\n{SOLUTION}</answer>",
    "after reasoning without a fence": f"<think>f(x)?</think>\n{SOLUTION}",
    "attributes of the block": f'```{{.python title="f"}}\n{SOLUTION}```\n',
    "carriage returns": FENCED.replace("\n", "\r\n"),
    "a byte order mark": f"```python\n\ufeff{SOLUTION}```\n",
    "a quote of the reasoning's tag in the code": f"```python\nEND = '</think>'\n{SOLUTION}```\n",
    "a box in the code": f"```python\nBOX = r'\\boxed{{1}}'\n{SOLUTION}```\n",
    "a docstring with a fence": f'```python\ndef f(x):\n    """{indented(FENCED, 4)}"""\n    return x\n```\n',
}


def result_of(code: str, expression: str = "f(1)") -> object:
    space: dict[str, Any] = {}
    exec(code.removeprefix("\ufeff"), space)
    return eval(expression, space)


@pytest.mark.parametrize("tests", [FUNCTION, SCRIPTS, CALLS], ids=["function", "scripts", "calls"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_the_block_that_defines_what_the_task_asks_for_is_judged(text: str, tests: Any) -> None:
    assert result_of(blocks.solution_in(text, tests)) == 1


@pytest.mark.parametrize("text", TEXTS.values(), ids=list(TEXTS))
def test_a_fenced_text_can_be_submitted(text: str) -> None:
    assert result_of(blocks.submitted(text, FUNCTION)) == 1


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f"```python\n{PROGRAM}```\nInput:\n```\n41\n```\nOutput:\n```\n42\n```\n", id="an example after"),
        pytest.param(f"```python\n{PROGRAM}```\n```python\nprint(42)\n```\n", id="code that reads no input after"),
        pytest.param(f"```python\nn = input()\nprint(n)\n```\n```python\n{PROGRAM}```\n", id="a draft before"),
        pytest.param(f"```sh\necho 41 | python3 solution.py\n```\n```\n{PROGRAM}```\n", id="a command before"),
    ],
)
def test_the_program_that_reads_its_input_is_judged(text: str) -> None:
    assert blocks.solution_in(text, STDIN) == PROGRAM


def test_the_longest_python_is_judged_if_no_block_defines_what_is_asked_for() -> None:
    text = "```\n1 2 3 4 5 6 7 8 9\n```\n```python\nx = 1\n```\n```json\n[1, 2, 3, 4, 5]\n```\n"

    assert blocks.solution_in(text, STDIN) == "1 2 3 4 5 6 7 8 9\n"
    assert blocks.solution_in(text.replace("```\n1", "```text\n1", 1), STDIN) == "x = 1\n"


def test_a_body_completes_the_function_of_the_prelude() -> None:
    text = "The body:\n```python\n    return x\n```\nFor example:\n```python\nprint(f(1))\n```\n"

    assert blocks.solution_in(text, COMPLETION) == "    return x\n"


def test_code_that_is_python_is_submitted_as_it_is() -> None:
    code = f'TEXT = """\n{FENCED}"""\ndef f(x):\n    return 2\n'

    assert blocks.submitted(code, FUNCTION) == code


@given(text=st.text() | st.text(alphabet="`~ \n\t>-*1.#<>/abcdef():=\ufeff\x00\ud800"))
def test_every_text_has_a_solution_or_none(text: str) -> None:
    for tests in (FUNCTION, STDIN, SCRIPTS):
        assert isinstance(blocks.solution_in(text, tests), str)
        assert isinstance(blocks.submitted(text, tests), str)


@pytest.mark.parametrize(
    "unit",
    [
        "- a\n",
        "1. \n",
        "> " * 99 + "x\n",
        "```\n",
        "```python\nf = 1\n```\n",
        "`",
        "(",
        "-",
        "a.",
        "f(",
        "[1,",
        "\t",
        "if 1:\n",
    ],
    ids=repr,
)
def test_a_long_and_hostile_text_has_a_solution_or_none(unit: str) -> None:
    text = unit * (1_000_000 // len(unit))

    assert isinstance(blocks.solution_in(text, FUNCTION), str)
