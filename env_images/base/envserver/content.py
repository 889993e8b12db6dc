"""What environments say: blocks, messages, prompts, results; and how each is written on the wire.

Keys are written in the order of the reference packages, nullable ones explicitly: their clients look them up without
a default.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Json: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["system", "user", "assistant"]
SplitType: TypeAlias = Literal["train", "validation", "test"]
MOST_REPEATED_CHARS = 1_000_000
"""A longer text stands in a result's blocks alone, and not in its structured data too."""
SPLIT_TYPES: tuple[SplitType, ...] = ("train", "validation", "test")


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A piece of text; *detail* is free JSON for the trainer."""

    text: str
    detail: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"text": self.text, "detail": self.detail, "type": "text"}


@dataclass(frozen=True, slots=True)
class ImageBlock:
    """An image: *data* is base64 text, *mime_type* such as ``image/png``."""

    data: str
    mime_type: str
    detail: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"data": self.data, "mimeType": self.mime_type, "detail": self.detail, "type": "image"}


@dataclass(frozen=True, slots=True)
class ReasoningBlock:
    """Reasoning in an assistant's turn; *signature* is a provider's own."""

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
    """A tool's answer in a user's turn, to the call with that id."""

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
        ValueError: reasoning and tool calls belong to assistants' turns, tool results to users'.
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
"""What ``reset`` returns: a text, or blocks."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a tool returns.

    Args:
        content: what the agent sees: a text, a block or blocks.
        reward: None says "no reward here", which is not the same as 0.0.
        finished: True ends the episode; no later call runs.
        metadata: free JSON for the trainer.
        data: a structured observation for clients that read one; written only where it is not None. Such clients
            see nothing else, so an object without a key ``text`` gets the texts of *content* there.
    """

    content: Prompt = ""
    reward: float | None = None
    finished: bool = False
    metadata: Json | None = None
    data: Any = None

    def wire(self) -> dict[str, Any]:
        """Write the four ORS keys, always all of them, and ``data`` where there is some."""
        blocks = blocks_of(self.content)
        output: dict[str, Any] = {
            "blocks": [block.wire() for block in blocks],
            "metadata": self.metadata,
            "reward": None if self.reward is None else float(self.reward),
            "finished": bool(self.finished),
        }
        if self.data is not None:
            output["data"] = with_text(self.data, blocks)
        return output


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool and its input, as ``parse_text`` understood them."""

    name: str
    input: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Split:
    """A named, ordered set of tasks; *type* says what it is for."""

    name: str
    type: SplitType = "validation"

    def wire(self) -> dict[str, str]:
        return {"name": self.name, "type": self.type}

    @classmethod
    def of(cls, split: "str | Split") -> "Split":
        """Give a plain name its type: a standard one its own, any other ``validation`` (as the reference does)."""
        if isinstance(split, Split):
            return split
        for kind in SPLIT_TYPES:
            if split == kind:
                return cls(split, kind)
        return cls(split)


@dataclass(frozen=True, slots=True)
class GroupCandidate:
    """One rollout of a group that is scored together."""

    messages: Sequence[Message]
    metadata: Json | None = None


@dataclass(frozen=True, slots=True)
class GroupScore:
    """The score of one candidate."""

    reward: float
    metadata: Json | None = None

    def wire(self) -> dict[str, Any]:
        return {"reward": float(self.reward), "metadata": self.metadata}


def blocks_of(content: object) -> list[Block]:
    """Bring a prompt into the form of blocks.

    Raises:
        TypeError: *content* is no ``Prompt``.
    """
    if isinstance(content, str):
        return [TextBlock(content)]
    if isinstance(content, TextBlock | ImageBlock):
        return [content]
    if isinstance(content, Sequence) and all(isinstance(block, TextBlock | ImageBlock) for block in content):
        return list(content)
    raise TypeError(f"expected a text, a block or a list of blocks, not {type(content).__name__}")


def written_prompt(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Write a prompt's blocks; a structured observation among their details gets the texts, as a result's does."""
    written = [block.wire() for block in blocks]
    for block in written:
        if (detail := block["detail"]) and "observation" in detail:
            block["detail"] = {**detail, "observation": with_text(detail["observation"], blocks)}
    return written


def with_text(observation: Any, blocks: Sequence[Block]) -> Any:
    """Give a structured *observation* with the texts of *blocks*, if it is an object without ``text``."""
    if not isinstance(observation, Mapping) or "text" in observation:
        return observation
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    if not any(texts) or sum(map(len, texts)) > MOST_REPEATED_CHARS:
        return observation
    text = "\n".join(texts)
    return {"text": text, **observation}


def prompt_of(messages: Sequence[Message]) -> list[Block]:
    """Flatten a conversation for clients that know only prompts.

    One user message of texts and images is passed on as it is; anything else becomes blocks headed by their roles.
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
