"""Programs that print more or less than the answer, in the library's sandboxes.

The attacks of coding_attacks.py run through a gateway, in wire/test_coding_tampering.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.envs.coding_world import opened
from tests.envs.complaints import complaints

pytestmark = pytest.mark.sandbox

PROGRAMS = {
    "prints the answer of one case": ("print('one')", 0.5),
    "prints all answers": ("print('one')\nprint('two')", 0.0),
    "prints the right answer and fails": ("import sys\nprint({'1': 'one', '2': 'two'}[input()])\nsys.exit(3)", 0.0),
    "prints before it is killed": ("import os\nprint('one', flush=True)\nos.kill(os.getpid(), 9)", 0.0),
    "leaves a child that prints more": (
        "import os\nprint({'1': 'one', '2': 'two'}[input()], flush=True)\n"
        "if os.fork() == 0:\n    print('more', flush=True)\nelse:\n    os.wait()",
        0.0,
    ),
    "closes its output": ("import os\nos.close(1)", 0.0),
    "prints bytes that are no text": ("import os\nos.write(1, b'\\xff\\xfe\\0')", 0.0),
    "honest": ("print({'1': 'one', '2': 'two'}[input()])", 1.0),
    "honest, with blanks around": ("print({'1': 'one', '2': 'two'}[input()], '  \\n\\n')", 1.0),
}


async def test_a_program_earns_only_its_honest_score(tmp_path: Path) -> None:
    task = {"test_cases": [{"input": "1\n", "output": "one\n"}, {"input": "2\n", "output": "two\n"}]}
    async with opened("library", tmp_path) as world:

        async def earns_its_worth(program: tuple[str, float]) -> None:
            source, worth = program
            assert (await world.judge(task, source)).score == worth

        assert await complaints(earns_its_worth, PROGRAMS) == {}
