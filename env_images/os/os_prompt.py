"""A model's first prompt: the rules, one worked dialogue, and the problem."""

from __future__ import annotations

_RULES = """\
You are a person at the shell of a Linux computer, as root, and you are given one problem to solve on it. You have \
{turns} turns. In each turn think first, then do exactly one of three things:

- bash: run a script in the shell and read what it prints. The shell stays the same from turn to turn, with its \
directory and its variables.
- answer: give the answer, where the problem asks for one. Give the bare value, without a unit or a sentence.
- finish: say that you are done, where the problem asks you to change something and not for an answer.

An output that is too long is cut, and it is up to you to ask for less. No command may wait for input: there is nobody \
to type it. A command is stopped after 30 seconds.

If you have tools, call one of them each turn: bash_action, answer_action or finish_action. If you write text, write \
it in this form:

Think: what you think, on one line
Act: bash
```bash
the script
```

or, in place of the last four lines, `Act: answer(the value)` or `Act: finish`."""

_DIALOGUE = """\
Here is one problem, solved: "How many entries does the directory /etc hold, hidden ones not counted?"

Think: First I look at the directory.
Act: bash
```bash
ls /etc
```

The output of the OS:
adduser.conf
alternatives
apt
bash.bashrc
bindresvport.blacklist
[truncated because the output is too long]

Think: The list is cut, so I let the shell do the counting.
Act: bash
```bash
ls /etc | wc -l
```

The output of the OS:
220

Think: There are 220 entries.
Act: answer(220)"""


def instructions(problem: str, *, max_turns: int) -> str:
    """Return the first prompt; *problem* is last, so that all prompts share their beginning."""
    return f"{_RULES.format(turns=max_turns)}\n\n{_DIALOGUE}\n\nNow your problem: {problem}"
