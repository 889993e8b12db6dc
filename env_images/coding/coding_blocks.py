"""Picks the solution out of a model's text, which may have several blocks of code: drafts, examples and outputs."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coding_judge import MAX_SOURCE_BYTES, with_prelude
from coding_tasks import Call, Tests
from envserver.answers import tagged_answer, without_reasoning
from markdown_it import MarkdownIt

MAX_TEXT_CHARS = MAX_SOURCE_BYTES + 64 * 1024
"""Read characters of a text, from its end."""

MAX_BLOCKS = 64
"""Read blocks of a text, from its end. With both bounds the worst text takes about half a second."""

PYTHON = ("", "python", "python3", "py", "py3")
"""How blocks of Python are marked."""

INPUTS = frozenset(("input", "stdin", "sys", "fileinput", "os", "open"))
"""Names by which a program reads its input."""

# Models write fences after list marks, tags and headings. Only fences count here, so nothing else may contain one.
_FENCES = MarkdownIt("commonmark").disable(
    ["blockquote", "heading", "hr", "html_block", "lheading", "list", "reference", "inline"]
)
_INDENTED_FENCES = MarkdownIt("commonmark").disable(
    ["blockquote", "code", "heading", "hr", "html_block", "lheading", "list", "reference", "inline"]
)
_TAG = re.compile(r"^ *<\w+> *(?=```|~~~)", re.MULTILINE)
_LIST_MARK = re.compile(r"^ *(?:[-*+]|[0-9]{1,9}[.)]) +(?=```|~~~)", re.MULTILINE)
_AFTER_FENCE = re.compile(r"^([ \t]*(?:```+|~~~+))(?=<[|/])", re.MULTILINE)
"""A closing fence with an end token or a closing tag on its line, which would keep the block open."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    language: str
    """The first word behind the opening fence, in small letters."""
    code: str


def solution_in(text: str, tests: Tests) -> str:
    """Return the solution in *text*: the last block that defines what *tests* ask for, or else the longest.

    A program from standard input to standard output defines what is asked for if it reads its input. Without a block,
    the whole text is the solution, without reasoning and the tags around an answer.
    """
    text = text[-MAX_TEXT_CHARS:]
    is_solution = _test_of(tests)
    answer = without_reasoning(text)
    longest = ""
    for blocks in _readings(answer, text):
        fitting = [block.code for block in blocks if is_solution(block.code)]
        if fitting:
            return fitting[-1]
        python = [block.code for block in blocks if block.language in PYTHON]
        longest = longest or max(python or [block.code for block in blocks], key=len, default="")
    return longest or tagged_answer(answer)


def submitted(code: str, tests: Tests) -> str:
    """Return the solution that an agent submitted as *code*, which should have no fences, but may have them."""
    return code if _symbols(_completed(code, tests)) is not None else solution_in(code, tests)


def _readings(answer: str, text: str) -> Iterator[list[Block]]:
    """Yield the blocks of *answer* in ever looser readings, and then those of the whole *text*."""
    first = _blocks(answer, _FENCES)
    yield first
    yield _blocks(answer, _INDENTED_FENCES)
    yield [inner for block in first for inner in _blocks(block.code, _FENCES)]  # a fence in a line of prose opened it
    yield _blocks(text, _FENCES)


def _blocks(text: str, markdown: MarkdownIt) -> list[Block]:
    text = _TAG.sub("", _AFTER_FENCE.sub("\\1\n", text))
    text = _LIST_MARK.sub(lambda mark: " " * len(mark[0]), text)
    fences = [token for token in markdown.parse(text) if token.type == "fence"]
    return [
        Block(language=(fence.info.split() or [""])[0].strip("{.}").lower(), code=fence.content)
        for fence in fences[-MAX_BLOCKS:]
    ]


def _test_of(tests: Tests) -> Callable[[str], bool]:
    """Return a predicate: does a code define what *tests* ask for?"""
    wanted = _names_wanted(tests)

    def is_solution(code: str) -> bool:
        found = _symbols(_completed(code, tests))
        if found is None:
            return False
        defined, used = found
        return not wanted.isdisjoint(defined) if wanted else not INPUTS.isdisjoint(used)

    return is_solution


def _completed(code: str, tests: Tests) -> str:
    return with_prelude(tests.prelude, code.removeprefix("\ufeff"))["source"]


def _names_wanted(tests: Tests) -> set[str]:
    """Return the names of which a solution must define at least one; none for a program."""
    if tests.function is not None:
        return {tests.function}
    texts = [test.call if isinstance(test, Call) else test for test in tests.hidden if isinstance(test, Call | str)]
    used, given = set[str](), set[str](dir(builtins))
    for text in (*texts, tests.prelude, tests.setup):
        try:
            nodes = list(ast.walk(ast.parse(text)))
        except SyntaxError:  # a prelude may end in the middle of a function
            continue
        for node in nodes:
            match node:
                case ast.Name(id=name, ctx=ast.Load()) if text in texts:
                    used.add(name)
                case ast.Name(id=name) | ast.arg(arg=name) | ast.alias(name=name):
                    given.add(name)
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    given.add(name)
    return used - given


def _symbols(code: str) -> tuple[set[str], set[str]] | None:
    """Return the names that *code* defines at its top level, and all that it uses; None if it is no Python.

    `symtable` compiles nothing, and refuses code that is nested too deeply.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            top = symtable.symtable(code, "solution.py", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        return None
    defined = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    used, scopes = set[str](), [top]
    while scopes:
        scope = scopes.pop()
        used.update(scope.get_identifiers())
        scopes += scope.get_children()
    return defined, used
