"""Ids that prove themselves, and who is attached where."""

from __future__ import annotations

import pytest

from gateway.core.ids import EnvironmentName, Owner
from gateway.frontends.openenv.session_ids import Attachments, SessionIds

LAB, MATH = Owner("lab"), EnvironmentName("math")


def test_an_id_is_known_wherever_the_secret_is_and_nowhere_else() -> None:
    id = SessionIds(b"secret").new(LAB, MATH)

    assert SessionIds(b"secret").holds(id, LAB, MATH)
    assert not SessionIds(b"other").holds(id, LAB, MATH)
    assert not SessionIds(b"secret").holds(id, Owner("other"), MATH)
    assert not SessionIds(b"secret").holds(id, LAB, EnvironmentName("os"))


def test_no_two_ids_are_alike() -> None:
    ids = SessionIds(b"secret")

    assert len({ids.new(LAB, MATH) for _ in range(1000)}) == 1000


@pytest.mark.parametrize(
    "id", ["", ".", "x", "a" * 32, "a" * 32 + ".", "é" * 32 + "." + "é" * 16, "\ud800." + "a" * 16]
)
def test_what_is_no_id_is_refused(id: str) -> None:
    assert not SessionIds(b"secret").holds(id, LAB, MATH)


def test_a_session_has_one_socket_and_ends_with_it_if_it_was_closed_meanwhile() -> None:
    attached = Attachments()

    assert attached.add(LAB, "a")
    assert not attached.add(LAB, "a")
    assert attached.add(Owner("other"), "a")
    assert not attached.close_later(LAB, "b")
    assert attached.close_later(LAB, "a")
    assert attached.remove(LAB, "a")
    assert not attached.remove(Owner("other"), "a")
    assert len(attached) == 0
