"""Signed session ids, and the sockets that are attached to sessions."""

from __future__ import annotations

import pytest

from gateway.core.ids import EnvironmentName, Owner
from gateway.frontends.openenv.session_ids import Attachments
from gateway.frontends.session_ids import SessionIds

LAB, MATH = Owner("lab"), EnvironmentName("math")


def test_an_id_is_valid_only_for_its_secret_owner_and_environment() -> None:
    id = SessionIds(b"secret").new(LAB, MATH)

    assert SessionIds(b"secret").holds(id, LAB, MATH)
    assert not SessionIds(b"other").holds(id, LAB, MATH)
    assert not SessionIds(b"secret").holds(id, Owner("other"), MATH)
    assert not SessionIds(b"secret").holds(id, LAB, EnvironmentName("os"))


def test_ids_are_unique() -> None:
    ids = SessionIds(b"secret")

    assert len({ids.new(LAB, MATH) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "id", ["", ".", "x", "a" * 32, "a" * 32 + ".", "é" * 32 + "." + "é" * 16, "\ud800." + "a" * 16]
)
def test_a_malformed_id_is_refused(id: str) -> None:
    assert not SessionIds(b"secret").holds(id, LAB, MATH)


def test_a_session_has_one_socket_and_a_close_request_takes_effect_when_the_socket_ends() -> None:
    attached = Attachments()

    assert attached.add(LAB, "a")
    assert not attached.add(LAB, "a")
    assert attached.add(Owner("other"), "a")
    assert not attached.close_later(LAB, "b")
    assert attached.close_later(LAB, "a")
    assert attached.remove(LAB, "a")
    assert not attached.remove(Owner("other"), "a")
    assert not attached._closing
