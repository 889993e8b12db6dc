"""TRL through the client package: GRPO with an environment factory that lists the tools by itself.

    pip install trl jmespath ./clients/python
    python examples/trainers/trl_client.py http://127.0.0.1:8080 math --model Qwen/Qwen3-0.6B

In contrast to the other two ways, the factory can be pickled, which TRL's async GRPO needs. It passes on images, ends
an episode as soon as its environment finished it, and an episode that failed has no reward (None).
"""

from __future__ import annotations

import argparse
from typing import Any

from env_gateway_client.trl import EnvironmentFactory


def train(
    url: str,
    environment: str,
    *,
    key: str = "",
    model: Any,
    tokenizer: Any = None,
    split: str = "train",
    stop: int | None = None,
    **config: Any,
) -> list[dict[str, Any]]:
    """Train *model* on the first *stop* tasks (None: all) of a split, and return TRL's log.

    Args:
        model: A name of the model hub, or a model, which needs its *tokenizer*.
        config: Fields of ``GRPOConfig``.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    factory = EnvironmentFactory(url, environment, key)
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(factory.rows(split, 0, stop)),
        environment_factory=factory,
        args=GRPOConfig(logging_steps=1, **config),
    )
    try:
        trainer.train()
    finally:  # episodes that their environment did not end
        for episode in trainer.environments or ():
            episode._close()
    return [entry for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("environment", help="such as math")
    parser.add_argument("--key", default="", help="a trainer's key")
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
    parser.add_argument("--split", default="train", help="train:NAME draws from the curriculum NAME")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    log = train(
        given.url,
        given.environment,
        key=given.key,
        model=given.model,
        split=given.split,
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
