"""Paths, cookies and bodies of NeMo Gym's clients, and the ids in their cookies."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.ids import EnvironmentName, Owner
from gateway.frontends.nemo.requests import cookies, place_of, read_object, read_rewards, read_seed, read_verify
from gateway.frontends.session_ids import SessionIds
from gateway.upstreams.ors_bodies import Unprocessable
from tests.service.stack import environment

LAB, MATH = Owner("lab"), EnvironmentName("math")


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ("/nemo/math/verify", ("math", ("verify",))),
        ("//nemo//Math/verify/", ("math", ("verify",))),
        ("/nemo/math:8080/verify", ("math", ("verify",))),
        ("/nemo/math:port/verify", ("math:port", ("verify",))),
        ("/nemo/math/ng-rollout/0-1/verify", ("math", ("verify",))),
        ("/nemo/math/ng-rollout", ("math", ("ng-rollout",))),
        ("/nemo/math/a/b", ("math", ("a", "b"))),
        ("/nemo/math", ("math", ())),
        ("/nemo", ("", ())),
    ],
)
def test_a_path_is_an_environment_and_a_route(path: str, place: tuple[str, tuple[str, ...]]) -> None:
    assert place_of(path) == place


def test_cookies_are_those_of_one_name_in_all_headers() -> None:
    headers = ["a=1; nemo_math=x.y;nemo_mathb=2; flag", 'nemo_math="q"; b', ""]

    assert list(cookies(headers, "nemo_math")) == ["x.y", "q"]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ([{"role": "assistant", "content": " 42 "}], "42"),
        ([{"type": "message", "role": "user", "content": "42"}], ""),
        ([{"type": "message", "role": "assistant", "content": None}], ""),
        (
            [{"type": "message", "role": "assistant", "content": [{"text": "4"}, {"refusal": "x"}, 3, {"text": "2"}]}],
            "42",
        ),
        (["42"], ""),
    ],
)
def test_the_final_text_is_the_last_message_of_the_assistant(output: list[Any], text: str) -> None:
    assert read_verify({"responses_create_params": {}, "response": {"output": output}}) == text


@pytest.mark.parametrize("body", [b"{}", b"", b" \n"])
def test_an_empty_body_is_a_tool_without_arguments(body: bytes) -> None:
    assert read_object(body) == {}


def test_an_error_names_its_place_as_fastapi_does() -> None:
    body = {"verifier_metadata": {"split": "train", "index": 1.5}}

    with pytest.raises(Unprocessable) as refused:
        read_seed(body, environment())

    [entry] = refused.value.entries
    assert entry == {
        "type": "int_type",
        "loc": ["body", "verifier_metadata", "index"],
        "msg": "Input should be a valid integer",
        "input": 1.5,
    }


def test_a_curriculums_task_is_drawn_once_although_the_row_has_its_place_too() -> None:
    metadata = {"split": "train:levels", "index": 3, "id": "train:levels/3"}

    seed = read_seed({"verifier_metadata": metadata}, environment())

    assert seed.by_place is None
    assert seed.by_id is not None
    assert seed.by_id.ids == ("train:levels/3",)


def test_rewards_of_invalid_samples_do_not_count() -> None:
    rows = [{"reward": 1}, {"reward": 0.5, "mask_sample": True}, {"reward": None}, 3]

    assert read_rewards({"verify_responses": rows}) == [1.0]


def test_an_id_of_a_clients_name_is_the_same_in_each_replica_and_of_one_owner_environment_and_protocol() -> None:
    id = SessionIds(b"secret", "nemo").of(LAB, MATH, "session-1")

    assert id == SessionIds(b"secret", "nemo").of(LAB, MATH, "session-1")
    assert SessionIds(b"secret", "nemo").holds(id, LAB, MATH)
    others = [
        SessionIds(b"other", "nemo").of(LAB, MATH, "session-1"),
        SessionIds(b"secret", "nemo").of(Owner("other"), MATH, "session-1"),
        SessionIds(b"secret", "nemo").of(LAB, EnvironmentName("os"), "session-1"),
        SessionIds(b"secret", "nemo").of(LAB, MATH, "session-2"),
    ]
    assert id not in others
    assert not SessionIds(b"secret").holds(id, LAB, MATH)
