"""Temporary changes of the process's user."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def need_other_users() -> None:
    """Skip the test if only root may pass through the root folder, as in a root filesystem made by ``mktemp -d``.

    Such a machine cannot have ordinary users, and the root of a sandbox is an ordinary user outside it.
    """
    if not os.stat("/").st_mode & 0o001:
        pytest.skip("only root may pass through / on this machine")


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Switch to a user to whom file permissions apply, if the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    need_other_users()
    os.setegid(10001)
    os.seteuid(10001)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
