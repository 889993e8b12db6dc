"""The settings of tests that try generated input: the same input in each CI run, and ``FAULTS_SCALE`` times as much.

A run with a seed tries other input, which the seed determines.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.runner.lanes import seed

SCALE = float(os.environ.get("FAULTS_SCALE", "1"))


def fuzzed(examples: int) -> settings:
    """Return settings for *examples* inputs of an ordinary run."""
    return settings(
        max_examples=max(1, round(examples * SCALE)),
        derandomize=os.environ.get("CI") == "true" and seed() is None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
