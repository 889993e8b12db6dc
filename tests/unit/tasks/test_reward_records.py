"""Signed records of rewards: what they bind, and that no changed byte passes."""

from __future__ import annotations

import base64
import copy
import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.tasks import reward_records
from gateway.tasks.reward_records import FORMAT, FORMER_FORMAT, canonical, signed, signing_key, verify
from gateway.tasks.signing import BadSignature, NotSigned, key_id, public_pem, trusted_of

KEY = signing_key(b"the gateway's own secret")
TRUSTED = trusted_of({"gateway.pub": public_pem(KEY)})
EPISODE: dict[str, Any] = {
    "id": "0123",
    "name": "one",
    "owner": "alice",
    "environment": "math",
    "split": "train",
    "task": "train/0",
    "task_digest": "d" * 64,
    "image": "sha256:i",
    "scorer": "5" * 64,
    "seed": 3,
    "policy": "",
    "group_name": "",
    "protocol": "ors",
    "opened_at": 1.5,
    "closed_at": 2.5,
    "reason": "deleted",
    "outcome": "finished",
    "reward": 1.0,
    "begin": {"spec": {"question": "6·7 \ud800", "evaluation": {"reward_function": "equals"}}, "config": None},
    "end": {"steps": 2},
    "steps": [
        {"operation": "prompt", "number": 0, "action": None, "blocks": [{"text": "6·7"}]},
        {"operation": "call", "number": 1, "action": {"tool": "submit", "input": {"answer": "41"}}, "reward": 0.0},
        {"operation": "call", "number": 1, "action": {"tool": "submit", "input": {}}, "reward": 0.0, "repeated": True},
        {"operation": "call", "number": 2, "action": {"tool": "submit", "input": {"answer": "42"}}, "reward": 1.0},
    ],
}
LINE = signed(EPISODE, KEY, instance="here")
RECORDS = json.loads(LINE)["records"]


def changed(*path: Any, value: Any) -> bytes:
    """Return `LINE` with one value changed, in canonical form."""
    document = json.loads(LINE)
    place = document
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return canonical(document)


def test_each_reward_has_a_record_that_states_task_image_judge_and_seed_and_the_last_one_is_of_the_episode() -> None:
    records = verify(LINE, TRUSTED)

    for record in records:
        assert (record["format"], record["key"], record["instance"]) == (FORMAT, key_id(KEY.public_key()), "here")
        for name in ("environment", "task", "task_digest", "image", "scorer", "seed"):
            assert record[name] == EPISODE[name]
        assert len(record["judge"]) == len(record["chain"]) == 64
    *rewards, end = records
    assert [(one["step"], one["reward"]) for one in rewards] == [(1, 0.0), (2, 1.0)]
    assert (end["reward"], end["outcome"]) == (1.0, "finished")
    assert rewards[-1]["chain"] == end["chain"] != rewards[0]["chain"]


def test_the_record_of_a_reward_is_verified_without_the_episode_and_the_other_records() -> None:
    record = json.loads(LINE)["records"][1]
    signature = base64.b64decode(record.pop("signature"))

    KEY.public_key().verify(signature, f"{FORMAT}\n".encode() + canonical(record))


def test_the_judge_is_the_scorer_and_not_the_image_that_it_is_built_into() -> None:
    def judge(**more: str) -> str:
        found: str = json.loads(signed({**EPISODE, **more}, KEY, instance="here"))["records"][0]["judge"]
        return found

    assert judge() == judge(image="sha256:j") != judge(scorer="6" * 64)


def test_a_record_of_the_former_format_without_a_scorer_is_still_verified() -> None:
    line = (Path(__file__).parent / "reward_record_1.jsonl").read_bytes().rstrip(b"\n")

    records = verify(line, TRUSTED)

    assert {record["format"] for record in records} == {FORMER_FORMAT}
    assert [record["reward"] for record in records] == [0.0, 1.0, 1.0]
    with pytest.raises(BadSignature):
        verify(line.replace(FORMER_FORMAT.encode(), FORMAT.encode()), TRUSTED)


def test_all_replicas_of_a_gateway_sign_with_one_key() -> None:
    assert public_pem(signing_key(b"one")) == public_pem(signing_key(b"one")) != public_pem(signing_key(b"two"))


@given(st.integers(0, len(LINE) - 1), st.integers(0, 7))
def test_no_flipped_bit_passes(place: int, bit: int) -> None:
    flipped = bytearray(LINE)
    flipped[place] ^= 1 << bit

    with pytest.raises((BadSignature, InvalidRequest, NotSigned)):
        verify(bytes(flipped), TRUSTED)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("episode", "reward"), 0.0),
        (("episode", "seed"), 4),
        (("episode", "image"), "sha256:j"),
        (("episode", "scorer"), "6" * 64),
        (("episode", "task_digest"), "e" * 64),
        (("episode", "begin", "spec", "evaluation"), {}),
        (("episode", "steps", 1, "action", "input", "answer"), "42"),
        (("episode", "steps", 0, "blocks", 0, "text"), "7*7"),
        (("episode", "steps", 3, "reward"), 0.5),
        (("episode", "steps"), EPISODE["steps"][:3]),
        (("episode", "steps"), EPISODE["steps"][::-1]),
        (("episode", "steps"), "none"),
        (("episode", "begin"), 1),
        (("records", 2, "reward"), 2.0),
        (("records", 1, "step"), 1),
        (("records", 0, "signed_at"), 1.0),
        (("records", 0, "signature"), "AAAA"),
        (("records", 2, "signature"), "not base64!"),
        (("records",), RECORDS[:2]),
        (("records",), RECORDS[1:]),
        (("records",), [RECORDS[1], RECORDS[0], RECORDS[2]]),
    ],
)
def test_a_changed_value_is_found(path: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(BadSignature):
        verify(changed(*path, value=value), TRUSTED)


def test_a_record_of_another_episode_is_found() -> None:
    other = copy.deepcopy(EPISODE)
    other["id"] = "4567"
    document = {**json.loads(LINE), "episode": other}

    with pytest.raises(
        BadSignature, match=r"the episode is not the one of its records: chain, content, episode differ"
    ):
        verify(canonical(document), TRUSTED)


@pytest.mark.parametrize("rewrite", [lambda line: line.replace(b",", b", ", 1), lambda line: line + b" "])
def test_white_space_is_a_change(rewrite: Any) -> None:
    with pytest.raises(BadSignature, match="canonical"):
        verify(rewrite(LINE), TRUSTED)


def test_another_key_is_not_trusted() -> None:
    with pytest.raises(NotSigned, match="not trusted here"):
        verify(signed(EPISODE, Ed25519PrivateKey.generate(), instance="here"), TRUSTED)


@pytest.mark.parametrize(
    "line",
    [b"", b"{", b"[]", b"1", b'"x"', b"{}", b'{"episode":{},"records":[]}', b"\xff", b"[" * 100_000],
)
def test_what_is_no_line_of_an_export_is_refused(line: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not an episode with signed records"):
        verify(line, TRUSTED)


INCOMPLETE = [
    pytest.param({"end": {"steps": 3}}, "it had 3 steps, of which 2 are recorded", id="a missing step"),
    pytest.param({"lost": 1}, "1 of its records were lost", id="a lost record"),
    pytest.param({"damaged_batches": 1}, "is damaged", id="a damaged batch"),
]


@pytest.mark.parametrize(("changes", "why"), INCOMPLETE)
def test_an_episode_with_a_gap_is_not_signed(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'0123' cannot be signed: .*{why}"):
        signed({**EPISODE, **changes}, KEY, instance="here")


@pytest.mark.parametrize(("changes", "why"), INCOMPLETE)
def test_a_signature_of_an_episode_with_a_gap_does_not_pass(
    changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as former:  # which signed it
        former.setattr(reward_records, "why_incomplete", lambda _: "")
        line = signed({**EPISODE, **changes}, KEY, instance="here")

    with pytest.raises(BadSignature, match=why):
        verify(line, TRUSTED)


def test_an_additional_member_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        verify(canonical({**json.loads(LINE), "more": 1}), TRUSTED)
