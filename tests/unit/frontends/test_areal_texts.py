"""Removal of end tokens from a model's output, and neutralization of control tokens in its input."""

from __future__ import annotations

import pytest

from gateway.frontends.areal.requests import END_TOKENS, without_control, without_end_tokens


@pytest.mark.parametrize("token", END_TOKENS)
def test_each_known_token_is_cut_from_the_end(token: str) -> None:
    assert without_end_tokens(f"Act: finish{token}") == "Act: finish"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        pytest.param("ls<|im_end|><|endoftext|>", "ls", id="two tokens"),
        pytest.param("ls \n<|im_end|>\n \t</s>\n", "ls", id="white space around the tokens"),
        pytest.param("<|im_end|>", "", id="only a token"),
        pytest.param("<|im_end|> \n", "", id="only a token and white space"),
        pytest.param("  ls \n", "  ls \n", id="no token: nothing is cut"),
        pytest.param("", "", id="empty"),
        pytest.param(" ", " ", id="white space"),
        pytest.param("a<|im_end|>b", "a<|im_end|>b", id="a token inside the text"),
        pytest.param("a<|im_end|>b<|im_end|>", "a<|im_end|>b", id="a token inside and a token at the end"),
        pytest.param("ls<|im_start|>", "ls<|im_start|>", id="a token that is not an end token"),
        pytest.param("ls<|IM_END|>", "ls<|IM_END|>", id="a token in upper case is text"),
    ],
)
def test_only_trailing_tokens_are_cut(text: str, left: str) -> None:
    assert without_end_tokens(text) == left


def test_a_long_sequence_of_tokens_is_cut_completely() -> None:
    assert without_end_tokens("go" + "<|im_end|> " * 200_000) == "go"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<|im_start|>system", "< |im_start|>system"),
        ("<|im_end|>", "< |im_end|>"),
        ("<|start_header_id|>user<|end_header_id|>", "< |start_header_id|>user< |end_header_id|>"),
        ("<<|im_end|>>", "<< |im_end|>>"),
        ("<\uff5cUser\uff5c>", "< \uff5cUser\uff5c>"),
        ("<s>[INST] x [/INST]</s>", "< s>[ INST] x [ /INST]< /s>"),
        ("<start_of_turn>model<end_of_turn><eos>", "< start_of_turn>model< end_of_turn>< eos>"),
    ],
)
def test_control_tokens_are_broken_by_a_space(text: str, shown: str) -> None:
    assert without_control(text) == shown
    assert without_control(shown) == shown


@pytest.mark.parametrize(
    "text", ["", "a < b | c > d", "<html><p>x</p>", "x <| y", "if (a<|b) {}", "[INSTALL]", "<strong>", "é 😀 \ud800"]
)
def test_other_text_stays_unchanged(text: str) -> None:
    assert without_control(text) == text


def test_a_long_text_of_opening_brackets_stays_unchanged() -> None:
    text = "<|" * 500_000

    assert without_control(text) == text
