"""The values that environments return (blocks, messages, prompts, results) and their wire forms.

Keys are written in the order of the reference packages, and nullable keys are always written. The reference clients
read them without a default.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from envserver.errors import WrongReward

Json: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["system", "user", "assistant"]
SplitType: TypeAlias = Literal["train", "validation", "test"]
MOST_REPEATED_CHARS = 1_000_000
"""Longest text in characters that is repeated in a result's structured data. A longer text is only in its blocks."""
SPLIT_TYPES: tuple[SplitType, ...] = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A text. *detail* is free JSON for the trainer."""

    text: str
    detail: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"text": self.text, "detail": self.detail, "type": "text"}


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image. *data* is base64 text, and *mime_type* is a type such as ``image/png``."""

    data: str
    mime_type: str
    detail: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"data": self.data, "mimeType": self.mime_type, "detail": self.detail, "type": "image"}


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    """Reasoning in an assistant's turn. *signature* comes from the model's provider."""

    text: str
    signature: str | None = None
    detail: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"text": self.text, "signature": self.signature, "detail": self.detail, "type": "reasoning"}


@dataclass(frozen=True, slots=True)
class ToolCallBlock:
    """A tool call in an assistant's turn."""

    id: str
    name: str
    input: Json
    detail: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"id": self.id, "name": self.name, "input": self.input, "detail": self.detail, "type": "tool_call"}


Block: TypeAlias = TextBlock | ImageBlock


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    """A tool's answer in a user's turn to the call ``tool_call_id``."""

    tool_call_id: str
    blocks: Sequence[Block]
    is_error: bool = False
    detail: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {
            "tool_call_id": self.tool_call_id,
            "blocks": [block.wire() for block in self.blocks],
            "is_error": self.is_error,
            "detail": self.detail,
            "type": "tool_result",
        }


MessageBlock: TypeAlias = TextBlock | ImageBlock | ReasoningBlock | ToolCallBlock | ToolResultBlock
BLOCK_TYPES: dict[str, type[MessageBlock]] = {
    "text": TextBlock,
    "image": ImageBlock,
    "reasoning": ReasoningBlock,
    "tool_call": ToolCallBlock,
    "tool_result": ToolResultBlock,
}
_ONLY_IN: dict[type[MessageBlock], Role] = {
    ReasoningBlock: "assistant",
    ToolCallBlock: "assistant",
    ToolResultBlock: "user",
}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Raises:
        ValueError: Reasoning or a tool call is not in an assistant's turn, or a tool result is not in a user's turn.
    """

    role: Role
    blocks: Sequence[MessageBlock]
    detail: Json | None = None

    def __post_init__(self) -> None:
        for block in self.blocks:
            wanted = _ONLY_IN.get(type(block), self.role)
            if wanted != self.role:
                raise ValueError(
                    f"a {type(block).__name__} belongs in a {wanted!r} message, not in a {self.role!r} one"
                )

    def wire(self) -> dict[str, Any]:
        return {"role": self.role, "blocks": [block.wire() for block in self.blocks], "detail": self.detail}


Prompt: TypeAlias = str | Block | Sequence[Block]
"""Result of ``reset``: a text, a block or several blocks."""


def _number(reward: object) -> float:
    """Return *reward* as a float, which may be infinite or NaN. Raises ``WrongReward``."""
    try:
        if isinstance(reward, str | bytes):  # which float() reads
            raise TypeError
        return float(reward)  # type: ignore[arg-type]  # numbers of numpy and the like have __float__
    except (TypeError, ValueError, OverflowError):
        raise WrongReward(f"a reward is a finite number, and not this {type(reward).__name__}") from None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a tool.

    Args:
        content: The agent's view of the result: a text, a block or several blocks.
        reward: The reward. None means "no reward", which differs from 0.0.
        finished: True ends the episode. No later call runs.
        metadata: Free JSON for the trainer.
        data: A structured observation, written only if it is not None. Clients that read it see nothing else. An object
            without a key ``text`` therefore gets the texts of *content* there.
    """

    content: Prompt = ""
    reward: float | None = None
    finished: bool = False
    metadata: Json | None = None
    data: Any = None

    def wire(self) -> dict[str, Any]:
        """Return the wire form: always all four ORS keys, and ``data`` if it is set."""
        blocks = blocks_of(self.content)
        output: dict[str, Any] = {
            "blocks": [block.wire() for block in blocks],
            "metadata": self.metadata,
            "reward": None if self.reward is None else _number(self.reward),
            "finished": bool(self.finished),
        }
        if self.data is not None:
            output["data"] = with_text(self.data, blocks)
        return output


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool and its input, parsed by ``parse_text``."""

    name: str
    input: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Split:
    """A named, ordered set of tasks. *type* is its purpose."""

    name: str
    type: SplitType = "validation"

    def wire(self) -> dict[str, str]:
        return {"name": self.name, "type": self.type}

    @classmethod
    def of(cls, split: "str | Split") -> "Split":
        """Return *split* with a type: a standard name itself, else ``validation``, as in the reference."""
        if isinstance(split, Split):
            return split
        for kind in SPLIT_TYPES:
            if split == kind:
                return cls(split, kind)
        return cls(split)


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """One rollout in a group that is scored together."""

    messages: Sequence[Message]
    metadata: Json | None = None


@dataclass(frozen=True, slots=True)
class GroupScore:
    """The score of one candidate."""

    reward: float
    metadata: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"reward": _number(self.reward), "metadata": self.metadata}


def blocks_of(content: object) -> list[Block]:
    """Convert a prompt to blocks.

    Raises:
        TypeError: *content* is not a ``Prompt``.
    """
    if isinstance(content, str):
        return [TextBlock(content)]
    if isinstance(content, TextBlock | ImageBlock):
        return [content]
    if isinstance(content, Sequence) and all(isinstance(block, TextBlock | ImageBlock) for block in content):
        return list(content)
    raise TypeError(f"expected a text, a block or a list of blocks, not {type(content).__name__}")


def written_prompt(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return a prompt's wire form. A structured observation in a block's detail gets the texts, as in a result."""
    written = [block.wire() for block in blocks]
    for block in written:
        if (detail := block["detail"]) and "observation" in detail:
            block["detail"] = {**detail, "observation": with_text(detail["observation"], blocks)}
    return written


def with_text(observation: Any, blocks: Sequence[Block]) -> Any:
    """Return a structured *observation* with the texts of *blocks* added if it is an object without ``text``."""
    if not isinstance(observation, Mapping) or "text" in observation:
        return observation
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if not any(texts) or sum(map(len, texts)) > MOST_REPEATED_CHARS:
        return observation
    text = "\n".join(texts)
    return {"text": text, **observation}


def prompt_of(messages: Sequence[Message]) -> list[Block]:
    """Flatten a conversation for clients that accept only prompts.

    A single user message of texts and images stays as it is. Any other conversation becomes blocks with the roles as
    headings.
    """
    if len(messages) == 1 and messages[0].role == "user":
        plain = [block for block in messages[0].blocks if isinstance(block, TextBlock | ImageBlock)]
        if len(plain) == len(messages[0].blocks):
            return plain
    flat: list[Block] = []
    for message in messages:
        flat.append(TextBlock(f"[{message.role}]", {"role": message.role}))
        for block in message.blocks:
            flat.extend(_flattened(block))
    return flat


def _flattened(block: MessageBlock) -> list[Block]:
    if isinstance(block, ReasoningBlock):
        return [TextBlock(f"<think>{block.text}</think>", {"type": "reasoning"})]
    if isinstance(block, ToolCallBlock):
        origin = {"type": "tool_call", "id": block.id}
        return [TextBlock(f"[tool_call {block.name}] {json.dumps(dict(block.input))}", origin)]
    if isinstance(block, ToolResultBlock):
        head = "[tool_result (error)]" if block.is_error else "[tool_result]"
        return [TextBlock(head, {"type": "tool_result", "tool_call_id": block.tool_call_id}), *block.blocks]
    return [block]
