"""The chat environment: a conversation with a scripted user; named reward functions score the agent's last reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

from chat_dialogue import MAX_CHARS, Dialogue
from chat_scoring import Evaluation
from envserver import Environment, Message, Prompt, SessionFailed, StepResult, Task, TextBlock, ToolCall, serve, tool
from envserver.content import Role
from envserver.generic import RewardError, parse_task

HOW_TO_ANSWER = "Answer with the tool `reply`: your message and nothing beside it. If you cannot call tools, write it."


class Chat(Environment):
    """A session is one conversation; it ends when the user has nothing more to say, or with the last turn."""

    name = "chat"
    env_types: ClassVar[tuple[str, ...]] = ("chat_env",)
    default_tool = "reply"

    _dialogue: Dialogue
    _evaluation: Evaluation

    def reset(self, task: Task, *, seed: int) -> Prompt:
        """Read the task's conversation; *seed* is unused, because the task determines everything.

        Raises:
            ValueError: The task's conversation is invalid or cannot be judged; no session starts.
        """
        given = parse_task(task)
        self._dialogue = Dialogue(given.instruction, given.config)
        self._evaluation = Evaluation.read(given.evaluation)
        said = self._dialogue.said
        shown = said[0].content if len(said) == 1 else "\n\n".join(f"[{one.role}]\n{one.content}" for one in said)
        return [TextBlock(f"{shown}\n\n{HOW_TO_ANSWER}", {"observation": self._observation()})]

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a conversation that is invalid or cannot be judged."""
        given = parse_task(task)
        Dialogue(given.instruction, given.config)
        Evaluation.read(given.evaluation)

    def messages(self) -> Sequence[Message]:
        """Return the conversation before the agent's first reply."""
        return [Message(cast(Role, one.role), [TextBlock(one.content)]) for one in self._dialogue.said]

    @tool
    def reply(self, message: str) -> StepResult:
        """Say something to the user. Your last message is what is judged."""
        message = message if len(message) <= MAX_CHARS else ""
        try:
            heard = self._dialogue.answer(message)
            if heard is not None:
                return StepResult(heard, data=self._observation())
            score = self._evaluation.score(message)
        except RewardError as error:
            raise SessionFailed(f"the reply could not be judged: {error}") from error
        return StepResult(
            "The conversation is over.",
            reward=score.reward,
            finished=True,
            metadata={"turns": self._dialogue.turns, "scores": list(score.parts)},
            data=self._observation(),
        )

    def parse_text(self, text: str) -> ToolCall:
        """Treat the whole text as the reply."""
        return ToolCall("reply", {"message": text})

    def _observation(self) -> dict[str, Any]:
        return {"messages": [one.wire() for one in self._dialogue.said]}


if __name__ == "__main__":
    serve(Chat)
