"""Being somebody else for a while."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


def need_other_users() -> None:
    """Skip where nobody but root may pass through the root folder, as in a root filesystem made by ``mktemp -d``.

    There is no such thing as an ordinary user on such a machine, and a sandbox's root is one outside.
    """
    if not os.stat("/").st_mode & 0o001:
        pytest.skip("only root may pass through / on this machine")


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Be somebody for whom the rights on files count, if the tests run as root."""
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
