"""The os environment's texts: the Think/Act form row by row, and the output as a model sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.os_sandboxes import os_module

text = os_module("os_text")
Act = text.Act

BLOCK = "```bash\nls -l\n```"


@pytest.mark.parametrize(
    ("written", "act"),
    [
        pytest.param(f"Think: I look.\nAct: bash\n{BLOCK}", Act("bash", "ls -l", "I look."), id="bash"),
        pytest.param(
            f"Think: I look.\n\nAct: bash\n\n{BLOCK}", Act("bash", "ls -l", "I look."), id="empty lines in between"
        ),
        pytest.param(f"Think: use ls. Act: bash\n{BLOCK}", Act("bash", "ls -l", "use ls. Act: bash"), id="one line"),
        pytest.param("Think: so.\nAct: finish", Act("finish", "", "so."), id="finish"),
        pytest.param("Think: so.\nAct: answer(31)", Act("answer", "31", "so."), id="answer"),
        pytest.param("Act: answer(31)", Act("answer", "31", ""), id="no thought"),
        pytest.param("Think: a\nThink: b\nAct: finish", Act("finish", "", "a\nb"), id="several thoughts"),
        pytest.param("think: a\nAct: finish", Act("finish", "", ""), id="the label of a thought is case-sensitive"),
        pytest.param("act: finish", None, id="the label of an act is case-sensitive"),
        pytest.param("Act: FINISH now", Act("finish", "", ""), id="the value of an act is not case-sensitive"),
        pytest.param("Act: Answer(x)", Act("answer", "x", ""), id="answer is not case-sensitive"),
        pytest.param("Act:\nanswer(7)", Act("answer", "7", ""), id="the value on the next line"),
        pytest.param(f"Act: answer(1)\nAct: bash\n{BLOCK}", Act("bash", "ls -l", ""), id="the last act counts"),
        pytest.param(f"Act: bash\n{BLOCK}\nAct: answer(1)", Act("answer", "1", ""), id="the last act, an answer"),
        pytest.param("Act: answer(1)\nAct: dance", Act("answer", "1", ""), id="the last valid act"),
        pytest.param(
            "Act: answer(1)\nAct: answer 5", Act("answer", "1", ""), id="an answer without brackets is skipped"
        ),
        pytest.param("Act: answer 5", None, id="only an answer without brackets"),
        pytest.param("Act: answer)5(", None, id="brackets in the wrong order"),
        pytest.param("Act: answer()", Act("answer", "", ""), id="an empty answer"),
        pytest.param("Act: answer(f(x) (y))", Act("answer", "f(x) (y)", ""), id="inner brackets survive"),
        pytest.param("Act: answer(a) or (b)", Act("answer", "a) or (b", ""), id="first to last bracket"),
        pytest.param("Act: answer(a\nb)", None, id="an answer over two lines"),
        pytest.param(f"Act: bash\n{BLOCK}\nand\n{BLOCK}", Act("bash", "ls -l\n\nls -l", ""), id="blocks are joined"),
        pytest.param(f"{BLOCK}\nAct: bash", Act("bash", "ls -l", ""), id="a block before the act"),
        pytest.param("Act: bash\n```bash\na\n\nb\n```", Act("bash", "a\n\nb", ""), id="an empty line in a block"),
        pytest.param("Act: bash", None, id="bash without a block"),
        pytest.param("Act: bash\n```sh\nls\n```", None, id="another fence"),
        pytest.param("Act: bash\n```bash\nls", None, id="a block that is never closed"),
        pytest.param("Act: bash\n```bash\n```", None, id="an empty block"),
        pytest.param(f"Act: bash\r\n{BLOCK}".replace("\n", "\r\n"), Act("bash", "ls -l", ""), id="CRLF"),
        pytest.param("I will list the files.", None, id="no act"),
        pytest.param("", None, id="nothing"),
        pytest.param("Think: x\nAct: answer(3)<|im_end|>", Act("answer", "3", "x"), id="a special token"),
        pytest.param("Act: finish</s>\n<|eot_id|> <|endoftext|>\n", Act("finish", "", ""), id="several special tokens"),
        pytest.param(f"Act: bash\n{BLOCK}<|im_end|>\n", Act("bash", "ls -l", ""), id="a special token on the fence"),
    ],
)
def test_a_text_is_parsed_in_the_think_act_form(written: str, act: object) -> None:
    assert text.parse(written) == act


def test_a_text_of_nothing_but_opening_fences_is_read_in_one_pass() -> None:
    assert text.parse("Act: bash\n" + "```bash\n" * 200_000) is None


@given(st.text(alphabet=st.sampled_from("Act: bashnwer()\n`Thikf<|>"), max_size=200))
def test_any_text_is_parsed_as_an_act_or_as_none(written: str) -> None:
    act = text.parse(written)

    assert act is None or act.kind in ("bash", "answer", "finish")


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        pytest.param(b"a\r\nb\r\n", "a\nb\n", id="CRLF"),
        pytest.param(b"10%\r20%\r\n", "10%\n20%\n", id="a lone CR"),
        pytest.param(b"\x1b[1;31mred\x1b[0m", "red", id="colours"),
        pytest.param(b"\x1b]0;title\x07x\x1b]0;t\x1b\\y", "xy", id="titles"),
        pytest.param(b"a\x1b]no end\r\nb\r\n\x1bPnor here\r\nc", "a\nb\n\nc", id="strings that are not terminated"),
        pytest.param(b"\x1b[?2004hx\x1b[?2004l", "x", id="bracketed paste"),
        pytest.param(b"\x1b(Bx\x1b=", "x", id="character sets"),
        pytest.param(b"a\x00b\x07c\x08", "abc", id="NUL and other control characters"),
        pytest.param(b"a\tb", "a\tb", id="tabs stay"),
        pytest.param("größe ✓".encode(), "größe ✓", id="UTF-8"),
        pytest.param(b"\xff\xfeA", "\ufffd\ufffdA", id="not UTF-8"),
    ],
)
def test_an_output_becomes_plain_text(output: bytes, shown: str) -> None:
    assert text.plain(output) == shown


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        pytest.param("31\n", "The output of the OS:\n31", id="the last newline is left out"),
        pytest.param("a\n\n", "The output of the OS:\na\n", id="but only one"),
        pytest.param("", "The output of the OS is empty.", id="empty"),
        pytest.param("\n", "The output of the OS is empty.", id="only a newline"),
        pytest.param("x" * 800, f"The output of the OS:\n{'x' * 800}", id="800 characters"),
        pytest.param(
            "x" * 801,
            f"The output of the OS:\n{'x' * 780}\n[truncated because the output is too long]",
            id="801 characters",
        ),
        pytest.param("ä" * 800, f"The output of the OS:\n{'ä' * 800}", id="800 characters of two bytes"),
    ],
)
def test_an_observation_shows_the_output_up_to_800_characters(output: str, shown: str) -> None:
    assert text.observation(output) == shown


def test_an_observation_in_agentbenchs_own_form_has_an_empty_line() -> None:
    assert text.observation("31\n", newlines=2) == "The output of the OS:\n\n31"


def test_a_notice_follows_the_output_and_is_never_cut() -> None:
    shown = text.observation("x" * 5_000, notice="[stopped]")

    assert shown.endswith("too long]\n[stopped]")
    assert text.observation("", notice="[stopped]") == "The output of the OS is empty.\n[stopped]"


def test_the_reminder_names_all_three_acts() -> None:
    assert text.REMINDER.startswith("Error:")
    assert all(word in text.REMINDER for word in ("Think:", "Act: bash", "```bash", "Act: answer(", "Act: finish"))
