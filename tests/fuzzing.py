"""The settings of tests that try generated input: the same input in each CI run, and ``FAULTS_SCALE`` times as much."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

SCALE = float(os.environ.get("FAULTS_SCALE", "1"))


def fuzzed(examples: int) -> settings:
    """Return settings for *examples* inputs of an ordinary run."""
    return settings(
        max_examples=max(1, round(examples * SCALE)),
        derandomize=os.environ.get("CI") == "true",
        database=None,
        suppress_health_check=list(HealthCheck),
    )
