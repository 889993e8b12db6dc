"""URLs of a Redis that Sentinels watch."""

from __future__ import annotations

import pytest

from gateway.adapters import check_store
from gateway.core.errors import ConfigError
from gateway.stores.redis.sentinel import SentinelUrl, is_sentinel, read_url


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("redis+sentinel://a/games", SentinelUrl((("a", 26379),), "games")),
        (
            "redis+sentinel://a:1,b,[::1]:3,[fe80::1]/games",
            SentinelUrl((("a", 1), ("b", 26379), ("::1", 3), ("fe80::1", 26379)), "games"),
        ),
        ("redis+sentinel://a/games/", None),
        ("redis+sentinel://a/games/3", SentinelUrl((("a", 26379),), "games", db=3)),
        (
            "rediss+sentinel://:p%40%2C@a/my%20games",
            SentinelUrl((("a", 26379),), "my games", is_tls=True, password="p@,"),
        ),
        (
            "redis+sentinel://user:pass@a/g?sentinel_username=u&sentinel_password=p%26",
            SentinelUrl(
                (("a", 26379),), "g", username="user", password="pass", sentinel_username="u", sentinel_password="p&"
            ),
        ),
    ],
)
def test_a_url_is_read(url: str, read: SentinelUrl | None) -> None:
    assert is_sentinel(url)
    if read is None:
        with pytest.raises(ValueError, match="database"):
            read_url(url)
    else:
        assert read_url(url) == read
        check_store(url)


@pytest.mark.parametrize(
    ("rest", "named"),
    [
        ("", "/SERVICE"),
        ("a", "/SERVICE"),
        ("a/", "/SERVICE"),
        ("/games", "addresses"),
        ("a,,b/games", "addresses"),
        (":1/games", "addresses"),
        ("::1/games", "addresses"),
        ("a:0/games", "port"),
        ("a:65536/games", "port"),
        ("a:" + "9" * 5000 + "/games", "port"),
        ("a:x/games", "port"),
        ("a:/games", "port"),
        ("a/games/x", "database"),
        ("a/games/1/2", "database"),
        ("secret@a/games", "PASSWORD"),
        ("a/games?db=1", "'db'"),
    ],
)
def test_a_url_that_says_too_little_is_refused_by_name(rest: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"^GATEWAY_STORE: .*{named}"):
        check_store(f"redis+sentinel://{rest}")


def test_no_password_is_told() -> None:
    read = read_url("redis+sentinel://:hidden@a/g?sentinel_password=hidden")

    assert "hidden" not in repr(read)
    for url in ("redis+sentinel://:hidden@a:x/g?sentinel_password=hidden", "redis+sentinel://:][hidden@a:x/g"):
        with pytest.raises(ConfigError) as caught:
            check_store(url)
        assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("store", ["sqlite://x", "redis", "sentinel://a/b", ""])
def test_another_store_is_refused(store: str) -> None:
    with pytest.raises(ConfigError, match="redis\\+sentinel://"):
        check_store(store)


@pytest.mark.parametrize("store", ["memory", "redis://a", "rediss://a", "unix:///a"])
def test_the_others_are_known(store: str) -> None:
    check_store(store)
