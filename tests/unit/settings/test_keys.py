"""The file of keys: what it holds, how commands change it, and that a running gateway follows its changes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import ConfigError
from gateway.core.ids import Owner
from gateway.settings import Settings
from gateway.settings.keys import (
    NO_LIMITS,
    KeyLimits,
    Keyring,
    Role,
    add_key,
    digest_of,
    read_keys,
    revoke_key,
)


def gateway(*words: str, state: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ``gateway`` with a state folder."""
    environ = os.environ | {"GATEWAY_STATE_DIR": str(state)} | variables
    command = [sys.executable, "-m", "gateway.cli", *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def owners(keys: Keyring) -> Mapping[str, str]:
    return {str(key.owner): key.digest.hex() for key in keys.trainers.values()}


# -- the file -------------------------------------------------------------------------------------------------------


def test_the_file_holds_the_hash_and_the_limits_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "state" / "keys.json"

    key = add_key(path, "alice", role=Role.TRAINER, limits=KeyLimits(max_sessions=8, environments=("Math",)))

    (stored,) = read_keys(path)
    assert len(key) >= 43
    assert key not in path.read_text()
    assert stored.hash == f"sha256:{digest_of(key).hex()}"
    assert (stored.limits.max_sessions, stored.limits.environments) == (8, ("math",))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", stored.created)
    assert path.stat().st_mode & 0o777 == 0o600


def test_keys_differ_and_names_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    made = {add_key(path, name, role=Role.TRAINER, limits=NO_LIMITS) for name in ("a", "b", "c")}
    with pytest.raises(ConfigError, match="there is a key 'a': revoke it first"):
        add_key(path, "a", role=Role.OPERATOR, limits=NO_LIMITS)

    assert len(made) == 3
    assert [key.name for key in read_keys(path)] == ["a", "b", "c"]


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a,b", "-a", "a/b", "a@b", "x" * 64, "ä"])
def test_a_name_that_a_log_or_url_would_not_show_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must begin with a letter or digit"):
        add_key(tmp_path / "keys.json", name, role=Role.TRAINER, limits=NO_LIMITS)

    assert not (tmp_path / "keys.json").exists()


def test_revoking_an_unknown_key_names_the_closest_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "alice", role=Role.TRAINER, limits=NO_LIMITS)

    with pytest.raises(ConfigError, match=r"there is no key 'alise'; it has alice \(did you mean 'alice'\?\)"):
        revoke_key(path, "alise")
    revoke_key(path, "alice")

    assert read_keys(path) == []


HASH = "sha256:" + "0" * 64


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "the file:"),
        ("[]", "the file:"),
        ('{"keys": 1}', "keys: it must be a list"),
        ({"keys": [{"name": "a"}]}, "keys.0.hash: it is required"),
        ({"keys": [{"name": "a", "hash": "sha256:00"}]}, "keys.0.hash"),
        ({"keys": [{"name": "a b", "hash": HASH}]}, "keys.0.name"),
        ({"keys": [{"name": "a", "hash": HASH, "role": "boss"}]}, "keys.0.role"),
        ({"keys": [{"name": "a", "hash": HASH, "limits": {"max_session": 1}}]}, "keys.0.limits.max_session"),
        ({"keys": [{"name": "a", "hash": HASH, "limits": {"pool_share": 0}}]}, "keys.0.limits.pool_share"),
        ({"keys": [{"name": "a", "hash": HASH, "limits": {"opens_per_s": -1}}]}, "keys.0.limits.opens_per_s"),
        ({"keys": [{"name": "a", "hash": HASH}] * 2}, "the name 'a' occurs twice"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_of_the_fault(tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))

    with pytest.raises(ConfigError, match=re.escape(reason)) as raised:
        Keyring({}, path=path)

    assert str(path) in raised.value.detail


def test_a_name_in_the_settings_and_the_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add_key(path, "alice", role=Role.TRAINER, limits=NO_LIMITS)

    with pytest.raises(ConfigError, match="'alice' is in the settings too"):
        Keyring({"alice": "another-key-1"}, path=path)


# -- a running gateway ----------------------------------------------------------------------------------------------


async def test_the_keyring_follows_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    keys = Keyring({"bob": "bobs-key-1234"}, path=path)
    told: list[Mapping[Owner, tuple[str, ...]]] = []
    keys.changed(told.append)
    before = owners(keys), keys.has_file

    key = add_key(path, "alice", role=Role.TRAINER, limits=KeyLimits(max_sessions=3, environments=("math",)))
    ops = add_key(path, "ops", role=Role.OPERATOR, limits=NO_LIMITS)
    await keys.look()
    after = owners(keys)

    bobs = digest_of("bobs-key-1234").hex()
    assert before == ({"bob": bobs}, False)
    assert after == {"bob": bobs, "alice": digest_of(key).hex()}
    assert list(keys.operators) == [digest_of(ops)]
    assert keys.has_file
    assert keys.by_owner[Owner("alice")].max_sessions == 3
    assert told == [{"bob": ()}, {"bob": (), "alice": ("math",)}]

    revoke_key(path, "alice")
    await keys.look()

    assert owners(keys) == {"bob": bobs}
    assert told[-1] == {"bob": ()}


async def test_a_broken_or_removed_file_changes_no_key_and_opens_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    key = add_key(path, "alice", role=Role.TRAINER, limits=NO_LIMITS)
    keys = Keyring({}, path=path)

    path.write_text("{")
    await keys.look()
    await keys.look()
    broken = owners(keys)
    path.unlink()
    await keys.look()

    assert broken == owners(keys) == {"alice": digest_of(key).hex()}
    assert keys.has_file
    refused = [record for record in caplog.records if record.getMessage().startswith("keys_refused")]
    assert len(refused) == 1


# -- the commands ---------------------------------------------------------------------------------------------------


def test_the_commands_add_list_and_revoke(tmp_path: Path) -> None:
    added = gateway("keys", "add", "alice", "--max-sessions", "8", "--environments", "math, game", state=tmp_path)
    operator = gateway("keys", "add", "ops", "--operator", state=tmp_path)
    listed = gateway("keys", "list", "--json", state=tmp_path, GATEWAY_TRAINER_KEYS="bob:bobs-key-1234")
    revoked = gateway("keys", "revoke", "alice", state=tmp_path)

    key = added.stdout.strip()
    assert (added.returncode, operator.returncode, revoked.returncode) == (0, 0, 0), (added, operator, revoked)
    assert added.stdout == f"{key}\n"
    rows = {row["name"]: row for row in json.loads(listed.stdout)}
    assert rows["alice"]["limits"] == {"max_sessions": 8, "environments": ["math", "game"]}
    assert {name: row["role"] for name, row in rows.items()} == {
        "alice": "trainer",
        "bob": "trainer",
        "ops": "operator",
    }
    assert key not in listed.stdout
    assert [one.name for one in read_keys(tmp_path / "keys.json")] == ["ops"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("add", "bob"), "the settings have a key 'bob'"),
        (("add", "alice", "--pool-share", "1.5"), "--pool-share: it must be at most 1, not 1.5"),
        (("add", "alice", "--operator", "--max-sessions", "1"), "an operator's key opens no sessions"),
        (("revoke", "alice"), "there is no key 'alice'; it has no key"),
    ],
)
def test_a_wrong_command_changes_nothing(tmp_path: Path, words: tuple[str, ...], reason: str) -> None:
    done = gateway("keys", *words, state=tmp_path, GATEWAY_TRAINER_KEYS="bob:bobs-key-1234")

    assert done.returncode == 2
    assert reason in done.stderr
    assert not (tmp_path / "keys.json").exists()


def test_a_gateway_with_a_file_of_keys_may_listen_beyond_loopback(tmp_path: Path) -> None:
    settings = Settings(host="0.0.0.0", state_dir=tmp_path)
    with pytest.raises(ConfigError, match="without keys: make one"):
        settings.checked()

    add_key(settings.keys_path, "alice", role=Role.TRAINER, limits=NO_LIMITS)

    assert settings.checked() is settings
