"""What is wrong with a value of a file, a setting or a request, in words for operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from gateway.core.validation import did_you_mean, reason_of


class Color(StrEnum):
    RED = "red"
    GREEN = "green"


class Pool(BaseModel):
    model_config = ConfigDict(extra="forbid")

    slots: int = Field(default=1, ge=1)
    share: float = Field(default=0.5, gt=0, lt=1, allow_inf_nan=False)


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern="^[a-z]+$", max_length=5)]
    color: Color = Color.RED
    size: Literal["small", "large"] = "small"
    pool: Pool = Pool()
    splits: Mapping[str, Pool] = {}
    several: tuple[Pool, ...] = ()
    tags: Annotated[list[str], Field(min_length=1)] = ["a"]
    even: int = 0

    @field_validator("even")
    @classmethod
    def _is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value


@dataclass(frozen=True)
class Stage:
    name: str


@dataclass(frozen=True)
class Plan:
    __pydantic_config__ = ConfigDict(extra="forbid")

    stages: tuple[Stage, ...]


def reason(model: Any, value: object) -> str:
    with pytest.raises(ValidationError) as refused:
        TypeAdapter(model).validate_python(value)
    (entry,) = refused.value.errors()
    return reason_of(entry, model)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        pytest.param({"colour": 1}, "there is no such key (did you mean 'color'?)", id="an unknown key"),
        pytest.param({"weather": 1}, "there is no such key", id="an unknown key that resembles none"),
        pytest.param({"pool": {"solts": 1}}, "there is no such key (did you mean 'slots'?)", id="in a table"),
        pytest.param(
            {"splits": {"a": {"solts": 1}}}, "there is no such key (did you mean 'slots'?)", id="in a named table"
        ),
        pytest.param(
            {"several": [{"solts": 1}]}, "there is no such key (did you mean 'slots'?)", id="in a list of tables"
        ),
        pytest.param({"name": None}, "it must be a text, not None", id="a text"),
        pytest.param({"name": "toolong"}, "it must have at most 5 characters", id="a long text"),
        pytest.param({"name": "A"}, "it must match ^[a-z]+$, not 'A'", id="a pattern"),
        pytest.param(
            {"color": "gren"}, "it must be 'red' or 'green', not 'gren' (did you mean 'green'?)", id="one of some"
        ),
        pytest.param(
            {"size": "smal"}, "it must be 'small' or 'large', not 'smal' (did you mean 'small'?)", id="one of two"
        ),
        pytest.param({"pool": {"slots": 0}}, "it must be at least 1, not 0", id="a bound"),
        pytest.param({"pool": {"slots": "many"}}, "it must be an integer, not 'many'", id="an integer"),
        pytest.param({"pool": {"slots": 1.5}}, "it must be an integer, not 1.5", id="a fraction"),
        pytest.param({"pool": {"share": 1}}, "it must be less than 1, not 1", id="an upper bound"),
        pytest.param({"pool": {"share": float("nan")}}, "it must be a finite number, not nan", id="no number"),
        pytest.param({"pool": 3}, "it must be a table (an object), not 3", id="a table"),
        pytest.param({"tags": []}, "it must have at least 1 item", id="an empty list"),
        pytest.param({"even": 3}, "3 is odd", id="a reason of the model's own"),
    ],
)
def test_the_reason_states_what_is_valid_the_value_and_the_closest_valid_one(value: dict[str, Any], words: str) -> None:
    assert reason(Document, {"name": "a", **value}) == words


def test_a_required_key_is_named_as_such() -> None:
    assert reason(Document, {}) == "it is required"


def test_keys_of_dataclasses_are_suggested_too() -> None:
    assert reason(Plan, {"stages": (), "stage": 1}) == "there is no such key (did you mean 'stages'?)"


def test_a_value_that_may_be_secret_is_not_repeated() -> None:
    with pytest.raises(ValidationError) as refused:
        Pool(slots="hunter2")  # type: ignore[arg-type]  # that is the point

    assert reason_of(refused.value.errors(include_input=False)[0]) == "it must be an integer"


def test_nothing_is_suggested_that_does_not_resemble_the_name() -> None:
    assert did_you_mean("frogs", ["slots", "warm"]) == ""
