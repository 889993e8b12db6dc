"""Gymnasium: a policy gradient on a game, with eight episodes side by side. It takes seconds and needs no GPU.

    pip install gymnasium numpy ./clients/python
    python examples/trainers/gymnasium_policy.py http://127.0.0.1:8080

On a gateway with keys, set GATEWAY_KEY to a trainer's key.

The agent is a table: for each map of the game it has a weight per move, and draws a move from their softmax. It learns
by REINFORCE with the mean reward of the group as the baseline, as GRPO does. Put your own model in place of `Table`.

Run with gymnasium 1.4.0 and numpy 2.4.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import defaultdict
from typing import Any

import numpy as np
from env_gateway_client import Gateway
from env_gateway_client.gymnasium import GatewayVectorEnv

MOVES = ("[up]", "[down]", "[left]", "[right]")
TASK = {"split": "train", "index": 0}  # a grid with a goal; an episode has 20 turns
GROUP = 8
RATE = 0.5


class Table:
    def __init__(self, seed: int) -> None:
        self._weights: dict[str, Any] = defaultdict(lambda: np.zeros(len(MOVES)))
        self._random = np.random.default_rng(seed)

    def probabilities(self, text: str) -> Any:
        """Return the probability of each move for the map in an observation, and the weights behind them."""
        weights = self._weights["\n".join(re.findall(r"^[#.^@G]+$", text, re.M))]
        powers = np.exp(weights - weights.max())
        return powers / powers.sum(), weights

    def draw(self, text: str) -> int:
        return int(self._random.choice(len(MOVES), p=self.probabilities(text)[0]))

    def learn(self, text: str, move: int, advantage: float) -> None:
        """Make *move* more probable in proportion to *advantage*."""
        probabilities, weights = self.probabilities(text)
        weights += RATE * advantage * (np.eye(len(MOVES))[move] - probabilities)


def play(envs: GatewayVectorEnv, policy: Table) -> tuple[list[list[tuple[str, int]]], Any]:
    """Play one episode in each environment. Return what each saw and did, and the rewards: NaN for a failed episode."""
    texts, _ = envs.reset(options=TASK)
    seen: list[list[tuple[str, int]]] = [[] for _ in texts]
    rewards: Any = np.zeros(GROUP)
    over: Any = np.zeros(GROUP, dtype=bool)
    while not over.all():
        moves = [policy.draw(text) for text in texts]
        for i in np.flatnonzero(~over):
            seen[i].append((texts[i], moves[i]))
        texts, gained, ends, cuts, _ = envs.step([MOVES[move] for move in moves])
        rewards, over = rewards + gained, ends | cuts
    return seen, rewards


def train(url: str, steps: int, seed: int) -> list[float]:
    """Train a new policy, and return the mean reward of each step. The same *seed* gives the same curve."""
    policy, curve = Table(seed), []
    with Gateway(url, os.environ.get("GATEWAY_KEY", "")) as gateway:
        envs = GatewayVectorEnv(gateway, "game", GROUP)
        try:
            for _ in range(steps):
                seen, rewards = play(envs, policy)
                curve.append(float(np.nanmean(rewards)))
                for pairs, advantage in zip(seen, np.nan_to_num(rewards - curve[-1]), strict=True):
                    for text, move in pairs:
                        policy.learn(text, move, advantage)
        finally:
            envs.close()
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the gateway, such as http://127.0.0.1:8080")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for step, reward in enumerate(train(given.url, given.steps, given.seed)):
        print(f"{step:3} {reward:.3f} {'#' * round(40 * reward)}")


if __name__ == "__main__":
    main()
