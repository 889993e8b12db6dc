"""SkyRL: GRPO with an environment class of SkyRL-Gym, which plays through the gateway's blocking client.

    pip install "skyrl[fsdp]" ./clients/python
    python examples/trainers/skyrl_env.py http://127.0.0.1:8080 math trainer.policy.model.path=Qwen/Qwen3-0.6B \
        generator.max_turns=16 generator.max_input_length=16384 trainer.logger=console

On a gateway with keys, set GATEWAY_KEY to a trainer's key.

SkyRL takes a number as the reward of each step, and an episode that failed has none. So `step` raises `EpisodeFailed`,
and SkyRL's generator plays the whole episode again, three times at most. The third failure ends the training run.

Checked against skyrl 0.4.0 and skyrl-gym 0.4.0, whose generator ran on a CPU with scripted texts. The training itself
needs GPUs and was not run.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from env_gateway_client import EpisodeFailed, Gateway, StepResult, text_of
from env_gateway_client.agent import options_of, replayed, system_text, tool_calls
from env_gateway_client.content import failed_call
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register

KEY = os.environ.get("GATEWAY_KEY", "")  # Ray's processes have the variables of this one


@functools.cache
def gateway_of(url: str) -> Gateway:
    """Return this process's client of a gateway."""
    return Gateway(url, KEY)


class GatewayTextEnv(BaseTextEnv):
    """One episode. *extras* are a row without its prompt, and SkyRL's ``max_turns``."""

    def __init__(self, *, url: str, environment: str, extras: Mapping[str, Any], env_config: Any = None) -> None:
        super().__init__()
        self.max_turns = extras.get("max_turns", 16)
        self._open = functools.partial(gateway_of(url).open, environment, keep_alive=True, **options_of(extras))
        self._episode: Any = None

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """Open the episode, and append its tools and its task to *prompt*."""
        self._episode = self._open()
        task = f"{system_text(self._episode)}\n\n{text_of(self._episode.prompt)}"
        return [*prompt, {"role": "user", "content": task}], {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Run the tool calls of the model's text. Raises ``EpisodeFailed``: the episode has no reward."""
        self.turns += 1
        results: list[StepResult] = []
        try:
            for call in tool_calls(action):  # a string is the text of a mistake, for the model
                mistake = failed_call(call, "input_validation") if isinstance(call, str) else None
                results.append(mistake or self._episode.step(*call))
                if results[-1].finished:
                    break
            if is_over := not results or results[-1].finished:
                self._episode.final_reward()  # raises if the environment ended the episode without a reward
        except EpisodeFailed:
            self.close()  # SkyRL closes an environment only after its last step
            raise
        done = is_over or self.turns >= self.max_turns
        seen = "\n".join(f"<tool_response>\n{result.text}\n</tool_response>" for result in results)
        return BaseTextEnvStepOutput(
            observations=[] if done else [{"role": "user", "content": seen}],
            reward=sum(result.reward or 0.0 for result in results),
            done=done,
            metadata={"finished": self._episode.finished},
        )

    def close(self) -> None:
        """End the episode."""
        if self._episode is not None:
            self._episode.close()


def play(env: GatewayTextEnv, generate: Callable[[list[dict[str, str]]], str]) -> float:
    """Play one episode as SkyRL does, with any function that writes the next text, and return its reward."""
    messages, _ = env.init([])
    reward, done = 0.0, False
    try:
        while not done:
            text = generate(messages)
            output = env.step(text)
            messages += [{"role": "assistant", "content": text}, *output["observations"]]
            reward, done = reward + output["reward"], output["done"]
    finally:
        env.close()
    return reward


def train(url: str, environment: str, overrides: Sequence[str]) -> None:
    """Train on the split `train` with SkyRL's defaults and *overrides*."""
    import ray
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.entrypoints.main_base import BasePPOExp
    from skyrl.train.utils import initialize_ray, validate_cfg

    class Experiment(BasePPOExp):
        def get_generator(self, *args: Any, **kwargs: Any) -> Any:
            generator = super().get_generator(*args, **kwargs)
            loop = generator.agent_loop
            generator.agent_loop = lambda *args, **kwargs: replayed(lambda: loop(*args, **kwargs))
            return generator

    def run(cfg: Any) -> None:  # in a process of its own, which imports this file
        register("gateway", "skyrl_env:GatewayTextEnv", {"url": url, "environment": environment})
        Experiment(cfg).run()

    row = {"prompt": [{"role": "system", "content": "You solve tasks with tools."}], "env_class": "gateway"}
    indices = range(gateway_of(url).task_count(environment, "train"))
    file = Path("tasks.jsonl").absolute()  # all columns but prompt and env_class become extras
    file.write_text("".join(json.dumps({**row, "split": "train", "index": index}) + "\n" for index in indices))
    cfg = SkyRLTrainConfig.from_cli_overrides([f"data.train_data=['{file}']", "data.val_data=[]", *overrides])
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(ray.remote(num_cpus=1)(run).remote(cfg))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("environment", help="such as: math")
    parser.add_argument("overrides", nargs="*", help="of SkyRL's configuration, such as trainer.epochs=3")
    given = parser.parse_args()
    train(given.url, given.environment, given.overrides)


if __name__ == "__main__":
    main()
