"""Settings of all tests: Hypothesis judges results, never times, because times depend on the machine's load."""

from __future__ import annotations

import logging

from hypothesis import settings

settings.register_profile("untimed", settings(), deadline=None)  # the active profile ("ci" in CI) without a deadline
settings.load_profile("untimed")
logging.getLogger("httpx").setLevel(logging.WARNING)  # the tests' own requests hide what the gateway logs
