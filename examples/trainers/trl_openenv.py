"""TRL over OpenEnv: GRPO with an environment class of your own, which plays through OpenEnv's official client.

    pip install trl openenv jmespath
    python examples/trainers/trl_openenv.py http://127.0.0.1:8080 math --model Qwen/Qwen3-0.6B

TRL calls `reset` with the row of the dataset, offers the public methods to the model as tools, and takes the reward
from `get_reward`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


class Episode:
    """One slot of TRL's batch. It has one WebSocket; each `reset` begins an episode on it."""

    url = ""
    environment = ""

    def __init__(self) -> None:
        from openenv.core import GenericEnvClient  # type: ignore[import-not-found]

        self._client = GenericEnvClient(base_url=f"{self.url}/openenv/{self.environment}").sync()
        self._reward: float | None = None
        self._is_finished = False

    def reset(self, *, split: str, index: int, **row: Any) -> str:
        """Begin an episode. TRL appends the returned text to the prompt."""
        self._reward, self._is_finished = None, False
        return str(self._client.reset(split=split, index=index).observation["text"])

    def get_reward(self) -> float | None:
        """Return the last reward; None for an episode without one, which TRL leaves out of the group."""
        return self._reward

    def _act(self, action: dict[str, Any]) -> str:
        if self._is_finished:  # TRL goes on until its limit of calls
            return "The episode is finished."
        result = self._client.step(action)
        self._is_finished = result.done
        if result.reward is not None:
            self._reward = result.reward
        return str(result.observation["text"])

    def _close(self) -> None:
        self._client.close()


class MathEpisode(Episode):
    """An episode of `math`."""

    environment = "math"

    def submit(self, answer: str) -> str:
        """Submit the final answer.

        Args:
            answer: The answer alone.
        """
        return self._act({"answer": answer})


class GameEpisode(Episode):
    """An episode of `game`."""

    environment = "game"

    def act(self, message: str) -> str:
        """Make one move.

        Args:
            message: The move in square brackets, such as [5].
        """
        return self._act({"message": message})


EPISODES: dict[str, type[Episode]] = {"math": MathEpisode, "game": GameEpisode}


def train(
    url: str, environment: str, *, model: Any, tokenizer: Any = None, indices: Sequence[int], **config: Any
) -> list[dict[str, Any]]:
    """Train *model* on tasks of the split `train`, and return TRL's log. *config* has fields of ``GRPOConfig``."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompt = [{"role": "user", "content": ""}]
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": prompt, "split": "train", "index": index} for index in indices]),
        environment_factory=type("Episode", (EPISODES[environment],), {"url": url}),
        args=GRPOConfig(logging_steps=1, **config),
    )
    try:
        trainer.train()
    finally:  # TRL closes no episode of its last batch; the gateway would end them after 300 s
        for episode in trainer.environments or ():
            episode._close()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8080; with a key: http://HOST:8080/k/KEY")
    parser.add_argument("environment", choices=sorted(EPISODES))
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    log = train(
        given.url,
        given.environment,
        model=given.model,
        indices=range(64),
        output_dir="out",
        max_steps=given.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=1024,
        max_tool_calling_iterations=16,
    )
    print("mean rewards:", [round(entry["reward"], 3) for entry in log])


if __name__ == "__main__":
    main()
