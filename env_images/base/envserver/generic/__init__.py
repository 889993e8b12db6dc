"""Generic tasks (RFC 005 of OpenEnv): tasks as data with a schema, a registry of them, and rewards by name.

A server imports this only where a task asks for it: one that serves its own files never does.
"""

from envserver.generic import texts as texts  # registers the built-in rewards
from envserver.generic.registry import TaskRegistry, UnknownTask, registry
from envserver.generic.rewards import (
    REWARDS,
    RewardCall,
    RewardError,
    RewardFunction,
    parse_reward,
    read_reward,
    reward_function,
)
from envserver.generic.task import GenericTask, TaskError, parse_task

__all__ = [
    "REWARDS",
    "GenericTask",
    "RewardCall",
    "RewardError",
    "RewardFunction",
    "TaskError",
    "TaskRegistry",
    "UnknownTask",
    "parse_reward",
    "parse_task",
    "read_reward",
    "registry",
    "reward_function",
]
