"""A language model of 36,000 parameters with random weights, for training runs on a CPU without a model hub.

Its tokenizer has one token for each whole tool call that a run allows, so that a policy is a choice among few calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<|im_end|>"
PADDING = "<|endoftext|>"


@dataclass(frozen=True)
class Tiny:
    """A model with its tokenizer, and the options with which it generates only tool calls."""

    model: Any
    tokenizer: Any
    generation: dict[str, Any]


def tiny(calls: Sequence[tuple[str, Mapping[str, Any]]], *, seed: int) -> Tiny:
    """Return a model that makes one of *calls* (a tool's name and its arguments) in each turn."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    texts = [_tool_call(name, arguments) for name, arguments in calls]
    tokenizer = _tokenizer(texts)
    ids = [tokenizer.convert_tokens_to_ids(text) for text in texts]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    others = [id for id in range(len(tokenizer)) if id not in ids]
    generation = {"suppress_tokens": others, "eos_token_id": [*ids, tokenizer.eos_token_id]}
    return Tiny(Qwen3ForCausalLM(config), tokenizer, generation)


def _tool_call(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _tokenizer(calls: Sequence[str]) -> Any:
    """Return a byte-level tokenizer without merges, with the chat template of Qwen3, whose tool calls TRL can parse."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: id for id, letter in enumerate(letters)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.add_special_tokens([AddedToken(text, special=True) for text in (PADDING, "<|im_start|>", END)])
    bytes_only.add_tokens([AddedToken(text, special=False, normalized=False) for text in calls])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only, eos_token=END, pad_token=PADDING, padding_side="left"
    )
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return tokenizer
