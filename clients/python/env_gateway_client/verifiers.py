"""verifiers: a taskset that lists the gateway's tasks, and an environment that plays their episodes.

    [env.taskset]
    id = "env-gateway-taskset"
    url = "http://127.0.0.1:8080"
    environment = "math"
    split = "train"

Checked against the sources of verifiers 0.4.0, and by an evaluation (``vf-eval``) with a stand-in for the model. The
plugin's id is the module ``env_gateway_taskset``, because ids have no dots.

* The environment plays the user: it sends the task and the results of the calls that the model writes as text.
* The trace gets the reward ``gateway``. An episode that failed raises its error, and so the rollout has no reward.
* The key is read from the environment variable that ``key_variable`` names, because traces contain a task's data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

from env_gateway_client.agent import options_of, play_text, system_text
from env_gateway_client.client import AsyncGateway, Gateway
from env_gateway_client.content import text_of

MAX_TURNS = 64
"""Largest number of the model's turns in an episode."""


class GatewayData(vf.TaskData):
    """What identifies a task. Its prompt comes from the episode."""

    url: str
    environment: str
    split: str
    index: int
    key_variable: str
    text_tool: str
    text_argument: str


class GatewayConfig(vf.TasksetConfig):
    """The section ``[env.taskset]``."""

    url: str = "http://127.0.0.1:8080"
    environment: str
    split: str = "train"
    start: int = 0
    stop: int | None = None
    """Index behind the last task. None: all tasks."""
    key_variable: str = "GATEWAY_KEY"
    """Environment variable with the trainer's key. It may be unset if the gateway needs no key."""
    text_tool: str = ""
    """Tool for a reply without a tool call, which becomes its ``text_argument``. Empty: the reply ends the episode."""
    text_argument: str = ""


class GatewayTask(vf.Task[GatewayData]):
    """A task of the gateway."""


class GatewayTaskset(vf.Taskset[GatewayTask, GatewayConfig]):
    """The tasks of a split, in the gateway's public view."""

    def load(self) -> Iterator[GatewayTask]:
        """Yield the tasks."""
        config = self.config
        with Gateway(config.url, os.environ.get(config.key_variable, "")) as gateway:
            tasks = gateway.tasks(config.environment, config.split, config.start, config.stop)
        for task in tasks:
            yield GatewayTask(
                GatewayData(
                    id=task.id or None,
                    name=f"{task.environment}/{task.split}/{task.index}",
                    prompt=None,
                    url=config.url,
                    environment=task.environment,
                    split=task.split,
                    index=task.index,
                    key_variable=config.key_variable,
                    text_tool=config.text_tool,
                    text_argument=config.text_argument,
                ),
                config.task,
            )


class GatewayEnvConfig(vf.EnvConfig):
    """The section ``[env]`` of verifiers' configuration of an evaluation: the settings of the model that plays."""

    player: vf.AgentConfig = vf.AgentConfig()


class GatewayPlayEnv(vf.Env[GatewayEnvConfig]):
    """Plays episodes: the environment is the user of the conversation."""

    async def run(self, task: Any, agents: Any) -> None:
        """Play one episode. Raises ``EpisodeFailed``: it has no reward."""
        data = task.data
        where = options_of({"split": data.split, "index": data.index})
        text = {"text_tool": data.text_tool, "text_argument": data.text_argument}
        async with (
            AsyncGateway(data.url, os.environ.get(data.key_variable, "")) as gateway,
            await gateway.open(data.environment, keep_alive=True, **where) as episode,
            agents.player.interaction(task) as interaction,
        ):
            segment = await interaction.turn(f"{system_text(episode)}\n\n{text_of(episode.prompt)}")
            for _ in range(MAX_TURNS):
                if segment.terminated:
                    break
                turn = await play_text(episode, segment.last_reply, **text)
                if turn.is_over:
                    break
                segment = await interaction.turn(text_of(turn.blocks))
            reward = episode.final_reward()
        interaction.trace.record_reward("gateway", reward)


__all__ = ["GatewayConfig", "GatewayData", "GatewayEnvConfig", "GatewayPlayEnv", "GatewayTask", "GatewayTaskset"]
