"""URLs of a Redis service that Sentinels monitor."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from gateway.adapters import check_store
from gateway.core.errors import ConfigError
from gateway.stores.redis.sentinel import is_sentinel, read_url


@dataclass(frozen=True)
class Read:
    """The expected content of a URL."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    master: dict[str, object]
    sentinel: dict[str, object]


OPEN: dict[str, object] = {"username": None, "password": None}


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+sentinel://a/games", Read((("a", 26379),), "games", {"db": 0, **OPEN}, OPEN)),
        (
            "redis+sentinel://a:1,b,[::1]:3,[fe80::1]/games",
            Read((("a", 1), ("b", 26379), ("::1", 3), ("fe80::1", 26379)), "games", {"db": 0, **OPEN}, OPEN),
        ),
        ("redis+sentinel://a/games/3", Read((("a", 26379),), "games", {"db": 3, **OPEN}, OPEN)),
        (
            "rediss+sentinel://:p%40%2C@a/my%20games",
            Read(
                (("a", 26379),),
                "my games",
                {"db": 0, "username": None, "password": "p@,", "ssl": True},
                {**OPEN, "ssl": True},
            ),
        ),
        (
            "redis+sentinel://user:pass@a/g?sentinel_username=u&sentinel_password=p%26",
            Read(
                (("a", 26379),),
                "g",
                {"db": 0, "username": "user", "password": "pass"},
                {"username": "u", "password": "p&"},
            ),
        ),
    ],
)
def test_a_sentinel_url_is_parsed(url: str, expected: Read) -> None:
    read = read_url(url)

    assert is_sentinel(url)
    assert Read(read.sentinels, read.service, read.master, read.sentinel) == expected
    check_store(url)


@pytest.mark.parametrize(
    "rest",
    [
        "",
        "a",
        "a/",
        "/games",
        "a,,b/games",
        ":1/games",
        "::1/games",
        "a:0/games",
        "a:65536/games",
        "a:" + "9" * 5000 + "/games",
        "a:x/games",
        "a:/games",
        "a/games/",
        "a/games/x",
        "a/games/1/2",
        "secret@a/games",
        "a/games?db=1",
    ],
)
def test_a_url_of_another_form_is_refused_with_the_expected_form(rest: str) -> None:
    with pytest.raises(ConfigError, match=r"^GATEWAY_STORE: must be redis\+sentinel://.*HOST.*/SERVICE\[/DB\].*$"):
        check_store(f"redis+sentinel://{rest}")


def test_no_password_is_shown() -> None:
    assert "hidden" not in repr(read_url("redis+sentinel://:hidden@a/g?sentinel_password=hidden"))
    for url in ("redis+sentinel://:hidden@a:x/g?sentinel_password=hidden", "redis+sentinel://:][hidden@a:x/g"):
        with pytest.raises(ConfigError) as caught:
            check_store(url)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("store", ["sqlite://x", "redis", "sentinel://a/b", ""])
def test_an_unknown_store_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="redis\\+sentinel://"):
        check_store(store)


@pytest.mark.parametrize("store", ["memory", "redis://a", "rediss://a", "unix:///a"])
def test_stores_without_sentinel_are_accepted(store: str) -> None:
    check_store(store)
