"""Authentication by keys: which routes a key opens, and that the applications behind never see a key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from starlette.types import Message, Receive, Scope, Send

from gateway.core.routes import OPEN_PATHS, OPERATOR_SEGMENTS
from gateway.frontends.auth import KEY_CHARS, LOG_PAUSE_S, Authenticator
from gateway.frontends.dashboard.sign_in import SignIn
from gateway.metrics import Metrics
from gateway.settings import Settings
from gateway.settings.keys import NO_LIMITS, KeyLimits, Keyring, Role, add_key, revoke_key

ALICE, BOB, OLGA = "alice-key-1234", "bobs-key-1234", "olgas-key-1234"
TRAINERS = {"alice": ALICE, "bob": BOB}
OPERATORS = {"olga": OLGA}


class Inside:
    """The application behind the authenticator; it records the requests that pass."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)

    @property
    def owner(self) -> str | None:
        """The owner of the last request that passed, or None if none passed."""
        return self.scopes[-1].get("gateway.owner", "(nobody)") if self.scopes else None


def scope(
    path: str = "/call", headers: Mapping[str, str | bytes] | None = None, *, kind: str = "http", **more: Any
) -> Scope:
    pairs = [
        (name.lower().encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in (headers or {}).items()
    ]
    return {"type": kind, "method": "POST", "path": path, "raw_path": path.encode(), "headers": pairs, **more}


def door_to(inside: Inside, keys: Keyring, metrics: Metrics, settings: Settings | None = None) -> Authenticator:
    return Authenticator(inside, settings or Settings(), keys, metrics, sign_in=SignIn(b"secret", keys))


async def _nothing() -> Message:
    raise AssertionError("the door reads no body")


async def knock(
    wanted: Scope,
    *,
    trainers: Mapping[str, str] = TRAINERS,
    operators: Mapping[str, str] = OPERATORS,
    metrics: Metrics | None = None,
) -> tuple[Inside, list[Message]]:
    """Send one request to an authenticator, and return the application behind it and the answers."""
    inside, answers = Inside(), []

    async def send(message: Message) -> None:
        answers.append(message)

    await door_to(inside, Keyring(trainers, operators), metrics or Metrics())(wanted, _nothing, send)
    return inside, answers


async def owner_of(
    wanted: Scope, *, trainers: Mapping[str, str] = TRAINERS, operators: Mapping[str, str] = OPERATORS
) -> str | None:
    """Return the owner of a request, or None if the request is refused."""
    inside, answers = await knock(wanted, trainers=trainers, operators=operators)
    assert bool(inside.scopes) != bool(answers)
    return inside.owner


# -- the file of keys -----------------------------------------------------------------------------------------------


async def test_while_a_file_of_keys_exists_every_request_needs_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "carol", role=Role.TRAINER, limits=KeyLimits(environments=("math",)))
    revoked = add_key(path, "dora", role=Role.TRAINER, limits=NO_LIMITS)
    revoke_key(path, "dora")
    keys = Keyring({}, path=path)

    async def passed(given: str, path: str = "/call") -> Scope | None:
        inside = Inside()

        async def send(message: Message) -> None:
            pass

        await door_to(inside, keys, Metrics())(scope(path, {"X-API-Key": given}), _nothing, send)
        return inside.scopes[-1] if inside.scopes else None

    hers = await passed(key)
    assert hers is not None
    assert (hers["gateway.owner"], hers["gateway.environments"]) == ("carol", ("math",))
    assert await passed(revoked) is None
    assert await passed("") is None
    assert await passed("", "/admin/v1/workers") is None
    revoke_key(path, "carol")
    await keys.look()
    assert await passed(key) is None
    assert await passed("") is None, "without its last key, the gateway is not open to everyone"


# -- the forms of a key ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "owner"),
    [
        ({"Authorization": f"Bearer {ALICE}"}, "alice"),
        ({"Authorization": f"bearer {BOB}"}, "bob"),
        ({"Authorization": f"Bearer   {ALICE} "}, "alice"),
        ({"Authorization": ALICE}, "alice"),
        ({"Authorization": f"\t{ALICE} "}, "alice"),
        ({"Authorization": f" \tBearer {ALICE}"}, "alice"),
        ({"X-API-Key": f" {BOB}\t "}, "bob"),
        ({"X-API-Key": " ", "Authorization": f"Bearer {ALICE}"}, "alice"),
        ({"X-API-Key": BOB}, "bob"),
        ({"X-API-Key": "", "Authorization": f"Bearer {ALICE}"}, "alice"),
        ({"Authorization": f"Bearer {ALICE}", "X-API-Key": ""}, "alice"),
        ({}, None),
        ({"X-API-Key": ""}, None),
        ({"Authorization": ""}, None),
        ({"Authorization": "Bearer"}, None),
        ({"Authorization": "Bearer "}, None),
        ({"Authorization": f"Basic {ALICE}"}, None),
        ({"X-API-Key": ALICE + "x"}, None),
        ({"X-API-Key": ALICE[:-1]}, None),
        ({"X-API-Key": ALICE.upper()}, None),
        ({"X-API-Key": "alice"}, None),
        ({"X-API-Key": f"alice:{ALICE}"}, None),
        ({"X-API-Key": b"\xff\xfe\x00"}, None),
        ({"X-API-Key": OLGA}, None),
    ],
)
async def test_a_key_may_be_in_a_header(headers: dict[str, str | bytes], owner: str | None) -> None:
    assert await owner_of(scope(headers=headers)) == owner


@pytest.mark.parametrize(
    ("path", "raw", "inner", "inner_raw", "owner"),
    [
        (f"/k/{ALICE}/math/call", None, "/math/call", b"/math/call", "alice"),
        (f"/k/{BOB}/", None, "/", b"/", "bob"),
        (f"/k/{BOB}", None, "/", b"/", "bob"),
        (f"/k/{ALICE}//ping", None, "//ping", b"//ping", "alice"),
        (f"/k/{ALICE}/a b/c", f"/k/{ALICE}/a%20b/c".encode(), "/a b/c", b"/a%20b/c", "alice"),
        ("/k/wrong-key/math/call", None, None, None, None),
        ("/k/", None, None, None, None),
        ("/k//math/call", None, None, None, None),
        (f"/k/{ALICE}x/call", None, None, None, None),
        (f"/k/{OLGA}/call", None, None, None, None),
    ],
)
async def test_a_key_may_be_in_the_path(
    path: str, raw: bytes | None, inner: str | None, inner_raw: bytes | None, owner: str | None
) -> None:
    wanted = scope(path)
    wanted["raw_path"] = raw or path.encode()

    inside, _ = await knock(wanted)

    assert inside.owner == owner
    if inner is not None:
        assert (inside.scopes[0]["path"], inside.scopes[0]["raw_path"]) == (inner, inner_raw)


async def test_a_key_in_the_path_needs_no_raw_path() -> None:
    wanted = scope(f"/k/{ALICE}/call")
    del wanted["raw_path"]

    inside, _ = await knock(wanted)

    assert (inside.scopes[0]["path"], inside.scopes[0]["raw_path"]) == ("/call", b"/call")


async def test_a_key_in_the_path_wins_over_a_key_in_a_header() -> None:
    assert await owner_of(scope(f"/k/{ALICE}/call", {"X-API-Key": BOB})) == "alice"
    assert await owner_of(scope("/k/wrong-key/call", {"X-API-Key": BOB})) is None


async def test_a_path_that_only_resembles_a_key_path_contains_no_key() -> None:
    inside, _ = await knock(scope(f"/kk/{ALICE}/call", {"X-API-Key": BOB}))

    assert (inside.owner, inside.scopes[0]["path"]) == ("bob", f"/kk/{ALICE}/call")


@pytest.mark.parametrize(
    "wanted",
    [
        scope("/call", {"Authorization": f"Bearer {ALICE}", "X-API-Key": ALICE, "X-Session-ID": "one"}),
        scope(f"/k/{ALICE}/call", {"X-Session-ID": "one"}),
        scope(f"/k/{ALICE}/call", {"X-Session-ID": "one", "Authorization": f"Bearer {BOB}"}),
        scope("/health", {"X-Session-ID": "one", "X-API-Key": ALICE}),
        scope(f"/k/{ALICE}/health", {"X-Session-ID": "one"}),
        scope("/call", {"X-Session-ID": "one", "X-API-Key": ALICE, "Authorization": ""}),
    ],
)
@pytest.mark.parametrize("keys", [TRAINERS, {}])
async def test_the_application_behind_never_sees_a_key(wanted: Scope, keys: dict[str, str]) -> None:
    inside, _ = await knock(dict(wanted), trainers=keys, operators=OPERATORS if keys else {})

    [seen] = inside.scopes
    assert ALICE not in str(seen)
    assert BOB not in str(seen)
    assert seen["headers"] == [(b"x-session-id", b"one")]


async def test_the_original_scope_gets_the_account_of_held_bytes_only() -> None:
    wanted = scope(f"/k/{ALICE}/call", {"X-API-Key": BOB})
    before = dict(wanted, headers=list(wanted["headers"]))

    await knock(wanted)

    assert wanted == before | {"gateway.held": wanted["gateway.held"]}


# -- routes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", sorted(OPERATOR_SEGMENTS))
@pytest.mark.parametrize("form", ["/{}", "/{}/v1/workers", "//{}", "/{}/"])
async def test_operator_routes_are_open_to_operators_only(segment: str, form: str) -> None:
    for path in (form.format(segment), form.format(segment.upper())):
        assert await owner_of(scope(path, {"X-API-Key": OLGA})) == "olga"
        assert await owner_of(scope(path, {"X-API-Key": ALICE})) is None
        assert await owner_of(scope(f"/k/{ALICE}{path}")) is None
        assert await owner_of(scope(f"/k/{OLGA}{path}")) == "olga"
        assert await owner_of(scope(path)) is None


@pytest.mark.parametrize("path", ["/call", "/", "/administrator", "/math/admin", "/healthz/x", "/Health", "//health"])
async def test_every_other_route_is_open_to_trainers_only(path: str) -> None:
    assert await owner_of(scope(path, {"X-API-Key": ALICE})) == "alice"
    assert await owner_of(scope(path, {"X-API-Key": OLGA})) is None
    assert await owner_of(scope(path)) is None


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
@pytest.mark.parametrize("headers", [{}, {"X-API-Key": "wrong-key-1"}, {"X-API-Key": ALICE}])
async def test_health_checks_need_no_key(path: str, headers: dict[str, str | bytes]) -> None:
    inside, answers = await knock(scope(path, headers))

    assert len(inside.scopes) == 1
    assert answers == []


async def test_without_configured_keys_every_route_is_open_and_the_owner_is_empty() -> None:
    for path in ("/call", "/admin/v1/workers", "/metrics", f"/k/{ALICE}/call"):
        assert await owner_of(scope(path), trainers={}, operators={}) == ""


async def test_with_only_operator_keys_configured_only_operator_routes_need_a_key() -> None:
    assert await owner_of(scope("/call"), trainers={}) == ""
    assert await owner_of(scope("/metrics"), trainers={}) is None
    assert await owner_of(scope("/metrics", {"X-API-Key": OLGA}), trainers={}) == "olga"


async def test_with_only_trainer_keys_configured_operator_routes_are_closed() -> None:
    assert await owner_of(scope("/metrics"), operators={}) is None
    assert await owner_of(scope("/metrics", {"X-API-Key": ALICE}), operators={}) is None
    assert await owner_of(scope("/call", {"X-API-Key": ALICE}), operators={}) == "alice"


async def test_spaces_around_a_key_in_a_path_are_ignored() -> None:
    assert await owner_of(scope(f"/k/ {ALICE} /call")) == "alice"


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "reason"), [({}, "a key is needed"), ({"X-API-Key": "wrong-key-1"}, "not known here")]
)
async def test_a_refusal_states_the_reason_and_never_shows_the_key(
    headers: dict[str, str | bytes], reason: str
) -> None:
    _, [start, body] = await knock(scope(headers=headers))

    assert start["status"] == 401
    assert (b"www-authenticate", b"Bearer") in start["headers"]
    assert (b"content-type", b"application/json") in start["headers"]
    assert reason in json.loads(body["body"])["detail"]
    assert b"wrong-key-1" not in body["body"]


@pytest.mark.parametrize(
    ("path", "key", "reason"),
    [("/admin/v1/workers", ALICE, "this is a trainer's key"), ("/call", OLGA, "this is an operator's key")],
)
async def test_a_known_key_of_another_role_says_which_key_is_needed(path: str, key: str, reason: str) -> None:
    _, [start, body] = await knock(scope(path, headers={"X-API-Key": key}))

    assert start["status"] == 401
    assert reason in json.loads(body["body"])["detail"]


async def test_refusals_are_counted_and_logged_without_the_key_once_in_a_while(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("gateway.frontends.auth.time.monotonic", lambda: now[0])
    metrics = Metrics()
    door = door_to(Inside(), Keyring(TRAINERS, OPERATORS), metrics)

    async def send(message: Message) -> None:
        pass

    async def refused(count: int) -> None:
        for _ in range(count):
            await door(scope(headers={"X-API-Key": "wrong-key-1"}, client=("10.0.0.7", 1)), _nothing, send)

    await refused(100)
    await door(scope(), _nothing, send)
    now[0] += LOG_PAUSE_S
    await refused(1)
    await door(scope(headers={"X-API-Key": ALICE}), _nothing, send)

    logged = [record.getMessage() for record in caplog.records if record.name == "gateway.frontends.auth"]
    assert logged == [
        "requests_turned_away reason=wrong_key count=1 client=10.0.0.7",
        "requests_turned_away reason=no_key count=1 client=",
        "requests_turned_away reason=wrong_key count=100 client=10.0.0.7",
    ]
    text = metrics.exposition().decode()
    assert 'gateway_requests_turned_away_total{reason="wrong_key"} 101.0' in text
    assert 'gateway_requests_turned_away_total{reason="no_key"} 1.0' in text


async def test_pages_of_other_sites_are_counted() -> None:
    metrics = Metrics()
    page = scope(headers={"Host": "evil.example"})
    inside, answers = await knock(page, trainers={}, operators={}, metrics=metrics)

    assert (inside.scopes, answers[0]["status"]) == ([], 403)
    assert 'gateway_requests_turned_away_total{reason="other_site"} 1.0' in metrics.exposition().decode()


def test_a_gateway_with_short_keys_starts_and_names_them_in_its_log(caplog: pytest.LogCaptureFixture) -> None:
    keys = f"short:{'x' * (KEY_CHARS - 1)},long:{'y' * KEY_CHARS}"
    settings = Settings(trainer_keys=SecretStr(keys), operator_keys=SecretStr("ops:zzzzzzzz"))

    door_to(Inside(), settings.keyring(), Metrics(), settings)

    assert [record.getMessage() for record in caplog.records] == [
        f"short_keys names=ops,short shorter_than={KEY_CHARS}"
    ]


async def test_a_websocket_without_a_key_is_refused_with_a_message_before_it_opens() -> None:
    inside, answers = await knock(scope("/openenv/math/ws", kind="websocket"))

    assert inside.scopes == []
    assert [answer["type"] for answer in answers] == ["websocket.http.response.start", "websocket.http.response.body"]
    assert answers[0]["status"] == 401
    assert b"a key is needed" in answers[1]["body"]


@pytest.mark.parametrize("path", ["/openenv/math/health", "/openenv/no_such/health"])
async def test_the_health_of_an_environment_needs_no_key(path: str) -> None:
    inside, _ = await knock(scope(path))

    assert len(inside.scopes) == 1


@pytest.mark.parametrize("path", ["math/metadata", "a/b/health", "health", "math/health/"])
async def test_paths_that_only_resemble_a_health_route_need_a_key(path: str) -> None:
    inside, answers = await knock(scope(f"/openenv/{path}"))

    assert inside.scopes == []
    assert answers[0]["status"] == 401


async def test_a_websocket_with_a_key_is_accepted() -> None:
    assert await owner_of(scope(f"/k/{ALICE}/openenv/math/ws", kind="websocket")) == "alice"


async def test_a_scope_that_is_not_a_request_passes_unchanged() -> None:
    wanted: Scope = {"type": "lifespan"}

    inside, _ = await knock(wanted)

    assert inside.scopes == [{"type": "lifespan"}]
