"""For all tests: Hypothesis judges results and never times, which depend on what else the machine does."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("untimed", settings(), deadline=None)  # what the profile in force says, "ci" in CI, and this
settings.load_profile("untimed")
