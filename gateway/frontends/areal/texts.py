"""Text on its way between a model and an environment: special tokens off what it says, and out of what it reads.

A model's output is decoded with its special tokens kept, and an observation goes through the chat template again: a
control token in a command's output would be tokenised as control.
"""

from __future__ import annotations

import re
from typing import Final

END_TOKENS: Final = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")
"""What model outputs of the known clients end in."""

_CONTROL: Final = re.compile(
    r"(?:<(?=[|\uff5c][^|\uff5c<>\n]{1,64}[|\uff5c]>)"  # ChatML, Llama 3, Phi; the full-width bar: DeepSeek
    r"|<(?=/?s>|(?:bos|eos|pad|unk)>|(?:start|end)_of_turn>)"  # Llama 2, Mistral, Gemma
    r"|\[(?=/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS)\]))"  # Mistral
)
"""The first character of a control token of the usual chat templates."""


def without_end_tokens(text: str) -> str:
    """Cut trailing special tokens, repeatedly, with the white space round them; text without any stays as it is."""
    end, kept = len(text), len(text)
    while True:
        while end and text[end - 1].isspace():
            end -= 1
        token = next((token for token in END_TOKENS if text.endswith(token, 0, end)), None)
        if token is None:
            # By index, and one copy at the end: cutting the text itself takes hours for a body of nothing but tokens.
            return text if kept == len(text) else text[:end]
        end -= len(token)
        kept = end


def without_control(text: str) -> str:
    """Put a space behind the first character of each chat control token: ``<|im_start|>`` becomes ``< |im_start|>``.

    Visible on purpose: a model that copies such text sees what it copies, and so does whoever reads the logs. An
    invisible character would do as well for the tokeniser, and would break file names and commands without a trace.
    """
    return _CONTROL.sub(lambda found: found[0] + " ", text)
