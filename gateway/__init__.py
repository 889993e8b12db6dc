"""A self-hosted gateway between RL trainers and environments."""

__version__ = "0.1.0"
