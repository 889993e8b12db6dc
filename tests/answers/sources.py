"""Named operators on source code: a solution in other forms, within a model's text, mutated, and constant."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from tests.answers.operators import Operator


def _same_tree(change: Operator) -> Operator:
    """Return *change* where the code means the same afterwards."""

    def changed(source: str) -> str | None:
        made = change(source)
        return made if made != source and made and ast.dump(ast.parse(made)) == ast.dump(ast.parse(source)) else None

    return changed


def _functions(source: str) -> list[ast.FunctionDef]:
    return [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]


def _without_hints(source: str) -> str | None:
    class Plain(ast.NodeTransformer):
        def visit_arg(self, node: ast.arg) -> ast.arg:
            return ast.arg(node.arg)

        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            node.returns = None
            return self.generic_visit(node)

        def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
            return ast.Assign([node.target], node.value) if node.value else None

    return ast.unparse(ast.fix_missing_locations(Plain().visit(ast.parse(source)))) if _functions(source) else None


def _with_docstrings(source: str) -> str | None:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.body.insert(0, ast.Expr(ast.Constant("Do it.\n\n    >>> 1 + 1\n    2\n")))
    return ast.unparse(ast.fix_missing_locations(tree)) if _functions(source) else None


def _in_a_class(source: str) -> str | None:
    """Put a program's only function into a class, as some sites ask for it, with its own name beside the class."""
    match _functions(source):
        case [one] if source.count(one.name) == 1 and source.startswith(f"def {one.name}("):
            indented = textwrap.indent(source, "    ")
            return f"class Solution:\n    @staticmethod\n{indented}\n\n{one.name} = Solution.{one.name}\n"
    return None


def _with_a_guard(source: str) -> str:
    guard = 'if __name__ == "__main__":\n    '
    if isinstance(ast.parse(source).body[-1], ast.FunctionDef):
        return f"{source}\n\n{guard}print(1)\n"
    return f"def main():\n{textwrap.indent(source, '    ')}\n\n{guard}main()\n"


NOTATIONS: Final[Mapping[str, Operator]] = {
    "as it is": lambda source: source,
    "tabs": _same_tree(
        lambda source: re.sub("^(?: {4})+", lambda found: "\t" * (len(found[0]) // 4), source, flags=re.M)
    ),
    "two blanks": _same_tree(lambda source: re.sub("^(?: {4})+", lambda found: found[0][::2], source, flags=re.M)),
    "unparsed": _same_tree(lambda source: ast.unparse(ast.parse(source))),
    "comments": _same_tree(lambda source: f"# A solution.\n{source.rstrip()}  # as in ```\n"),
    "carriage returns": _same_tree(lambda source: source.replace("\n", "\r\n")),
    "a byte order mark": lambda source: f"\ufeff{source}",
    "without hints": _without_hints,
    "docstrings": _with_docstrings,
    "in a class": _in_a_class,
    "a guard": _with_a_guard,
    "a future import": lambda source: f"from __future__ import annotations\n\n{source}",
    "imports of typing": lambda source: f"from typing import *\nimport collections, itertools, math\n\n{source}",
}
"""Other forms of a solution."""


def _sketch(source: str) -> str:
    """Return code that defines what *source* defines, or reads what it reads, and is wrong."""
    names = [function.name for function in _functions(source)]
    return "".join(f"def {name}(*_):\n    return ...\n" for name in names) or "print(input() * 2)\n"


def _fenced(source: str, mark: str = "```python") -> str:
    return f"{mark}\n{source}{mark[:3]}\n"


IN_TEXT: Final[Mapping[str, Operator]] = {
    "a fence of python": _fenced,
    "a fence of py": lambda source: _fenced(source, "```py"),
    "a fence of Python3": lambda source: _fenced(source, "``` Python3"),
    "a fence of no language": lambda source: _fenced(source, "```"),
    "tildes": lambda source: _fenced(source, "~~~python"),
    "four marks": lambda source: f"`{_fenced(source).rstrip()}`\n",
    "a fence that is not closed": lambda source: f"The solution:\n```python\n{source}",
    "an end token": lambda source: f"{_fenced(source).rstrip()}<|im_end|>",
    "text around": lambda source: f"This solves it:\n\n{_fenced(source)}\nIt takes `O(n)` steps.",
    "a fence of carriage returns": lambda source: f"Sure!\n\n{_fenced(source)}\nDone.".replace("\n", "\r\n"),
    "in a list": lambda source: f"1. The code:\n\n{textwrap.indent(_fenced(source), '   ')}\n2. Done.",
    "a sketch before": lambda source: f"First:\n{_fenced(_sketch(source))}\nBetter:\n{_fenced(source)}",
    "an example after": lambda source: f"{_fenced(source)}\nTry it:\n{_fenced('print(40 + 2)' + chr(10))}",
    "an output after": lambda source: f"{_fenced(source)}\nIt prints\n\n```\n42\n```\n",
    "a shell after": lambda source: f"{_fenced(source)}\n```bash\npython3 solution.py < input.txt\n```\n",
    "JSON after": lambda source: f'{_fenced(source)}\n```json\n{{"complexity": "O(n)"}}\n```\n',
    "reasoning": lambda source: f"<think>Perhaps\n{_fenced(_sketch(source))}</think>\n{_fenced(source)}",
    "tags": lambda source: f"<answer>\n{_fenced(source)}</answer>",
    "tags on the line of the fence": lambda source: f"<answer>{_fenced(source).rstrip()}</answer>",
    "tags without a fence": lambda source: f"<answer>\n{source}</answer>",
}
"""A solution within a model's text."""


def _constant(value: str, printed: str) -> Operator:
    """Return an operator that makes functions that return *value*, or a program that prints *printed*."""

    def made(source: str) -> str:
        functions = [f"def {function.name}(*given):\n    return {value}\n" for function in _functions(source)]
        return "".join(functions) or f"print({printed})\n"

    return made


CONSTANTS: Final[Mapping[str, Operator]] = {
    "None": _constant("None", "''"),
    "0": _constant("0", "0"),
    "1": _constant("1", "1"),
    "-1": _constant("-1", "-1"),
    "an empty text": _constant("''", "'', end=''"),
    "an empty list": _constant("[]", "[]"),
    "True": _constant("True", "'yes'"),
    "False": _constant("False", "'no'"),
    "the first argument": _constant("given[0]", "input()"),
}
"""The same solution for all tasks."""

Mutation = Callable[[ast.AST], ast.AST | None]
"""Returns a node in place of another, which it may change, or None if it does not apply."""

_NEGATED: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
_BESIDE: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
_OTHER_SIGN: Final[Mapping[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult,
}


def _compared(table: Mapping[type[ast.cmpop], type[ast.cmpop]]) -> Mutation:
    def changed(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.Compare) or type(node.ops[0]) not in table:
            return None
        node.ops[0] = table[type(node.ops[0])]()
        return node

    return changed


def _number(step: int) -> Mutation:
    def changed(node: ast.AST) -> ast.AST | None:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return ast.Constant(node.value + step)
        return None

    return changed


def _other_sign(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BinOp | ast.AugAssign) or type(node.op) not in _OTHER_SIGN:
        return None
    node.op = _OTHER_SIGN[type(node.op)]()
    return node


def _without_value(node: ast.AST) -> ast.AST | None:
    return ast.Return(ast.Constant(None)) if isinstance(node, ast.Return) and node.value is not None else None


def _without_branch(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.If():
            return ast.If(node.test, [ast.Pass()], node.orelse)
        case ast.IfExp():
            return node.orelse
    return None


def _swapped(node: ast.AST) -> ast.AST | None:
    match node:
        case ast.Call(ast.Name("max" | "min" | "gcd")):
            return None
        case ast.Call(args=[first, second, *rest]) if not isinstance(first, ast.Starred):
            node.args = [second, first, *rest]
            return node
        case ast.BinOp(op=ast.Sub() | ast.FloorDiv() | ast.Mod() | ast.Div() | ast.Pow()):
            node.left, node.right = node.right, node.left
            return node
    return None


def _other_junction(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BoolOp):
        return None
    return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _emptied(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.FunctionDef):
        return None
    node.body = [ast.Pass()]
    return node


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "a comparison negated": _compared(_NEGATED),
    "a bound moved": _compared(_BESIDE),
    "a constant one more": _number(1),
    "a constant one less": _number(-1),
    "another arithmetic operator": _other_sign,
    "None returned": _without_value,
    "a branch dropped": _without_branch,
    "arguments swapped": _swapped,
    "and for or": _other_junction,
    "a function emptied": _emptied,
}


def mutants(source: str, mutation: Mutation) -> Iterator[str]:
    """Yield *source* with one place after the other changed by *mutation*, where it applies."""
    places = sum(1 for _ in ast.walk(ast.parse(source)))
    for place in range(places):
        tree = ast.parse(source)
        node = next(node for at, node in enumerate(ast.walk(tree)) if at == place)
        if (made := mutation(copy.copy(node))) is None:
            continue
        for parent in ast.walk(tree):
            for name, value in ast.iter_fields(parent):
                if value is node:
                    setattr(parent, name, made)
                elif isinstance(value, list):
                    value[:] = [made if item is node else item for item in value]
        text = ast.unparse(ast.fix_missing_locations(tree))
        if text != ast.unparse(ast.parse(source)):
            yield text
