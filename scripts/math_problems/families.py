"""The families of tasks, and how they are loaded from reasoning-gym.

A usual import of the package `reasoning_gym` runs its `__init__`. This loads all its families, and with them
matplotlib, Pillow and more: 111 MiB resident and 0.6 s. This module loads only the modules in `MODULES`, under bare
parent packages whose `__init__` never runs: 65 MiB and 0.25 s, mostly for sympy and numpy. It depends on the place of a
family's module. The versions are pinned, and a test makes all tasks again, so it detects a move.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

PACKAGE = "reasoning_gym"

MODULES: Mapping[str, str] = {
    "advanced_geometry": "geometry.advanced_geometry",
    "base_conversion": "algorithmic.base_conversion",
    "basic_arithmetic": "arithmetic.basic_arithmetic",
    "calendar_arithmetic": "arithmetic.calendar_arithmetic",
    "chain_sum": "arithmetic.chain_sum",
    "complex_arithmetic": "algebra.complex_arithmetic",
    "count_primes": "algorithmic.count_primes",
    "decimal_arithmetic": "arithmetic.decimal_arithmetic",
    "dice": "arithmetic.dice",
    "fraction_simplification": "arithmetic.fraction_simplification",
    "gcd": "arithmetic.gcd",
    "jugs": "algorithmic.jugs",
    "lcm": "arithmetic.lcm",
    "leg_counting": "arithmetic.leg_counting",
    "number_sequence": "cognition.number_sequences",
    "polynomial_equations": "algebra.polynomial_equations",
    "power_function": "arithmetic.power_function",
    "prime_factorization": "arithmetic.prime_factorization",
    "products": "arithmetic.products",
    "simple_equations": "algebra.simple_equations",
    "simple_geometry": "geometry.simple_geometry",
    "time_intervals": "arithmetic.time_intervals",
}
"""The module below the package for each family, by reasoning-gym's registered name.

No module evaluates the answer or the task's data as code (`countdown`, `simple_integration`, `bitwise_arithmetic` …
do), and no module takes long for an answer of bounded length.
"""


class Dataset(Protocol):
    """The used interface of a reasoning-gym dataset, which is both generator and scorer."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the entry at *index*: `question`, `answer` and `metadata`; ValueError if the generator gives up."""

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Score *answer* against *entry*, which has at least `answer` and `metadata`."""


def make_dataset(family: str, **parameters: Any) -> Dataset:
    """Create the family's dataset with the generator's *parameters*.

    Raises:
        ImportError: The family cannot be found.
    """
    import_families([family])
    factory = importlib.import_module(f"{PACKAGE}.factory")
    dataset: Dataset = factory.create_dataset(family, **{"seed": 0, **parameters})
    return dataset


def import_families(families: Iterable[str]) -> None:
    """Register *families* with reasoning-gym, by their modules.

    Raises:
        ImportError: A module is not in its place, or the package (or one of its requirements) is not installed.
    """
    for family in families:
        if family not in _registered():
            module = f"{PACKAGE}.{MODULES[family]}"
            _open_parents(module)
            importlib.import_module(module)


def _registered() -> Mapping[str, object]:
    """Return the families that reasoning-gym has registered so far."""
    return getattr(sys.modules.get(f"{PACKAGE}.factory"), "DATASETS", {})


def _open_parents(module: str) -> None:
    """Make the packages above *module* importable without running their `__init__`; imported packages stay."""
    parts = module.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        if name in sys.modules:
            continue
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"no package {name}", name=name)
        sys.modules[name] = importlib.util.module_from_spec(spec)
