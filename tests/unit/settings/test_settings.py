"""Settings from ``GATEWAY_`` variables and files, their checks, and the secret that is created once."""

from __future__ import annotations

import ast
import inspect
import os
import re
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr, ValidationError

from gateway.adapters import check_store, hold_containers
from gateway.core.errors import ConfigError
from gateway.settings import Settings, inherited_environ, is_loopback, load, service_links, unknown_variables
from gateway.settings.keys import parse_keys
from tests.deadlines import HANG_S

KEY, OTHER = "a-trainer-key", "an-operator-key"


DOCKER = {"store": "memory", "backend": "docker"}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("GATEWAY_"):
            monkeypatch.delenv(name)


def settings(**given: Any) -> Settings:
    return Settings(**given)


# -- reading --------------------------------------------------------------------------------------------------------


def test_without_any_variable_the_embedded_default_is_served_on_loopback() -> None:
    read = load().checked()

    assert (read.host, read.port, read.store, read.backend) == ("127.0.0.1", 8080, "memory", "process")


def test_variables_are_read_and_the_command_line_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_PORT", "9000")
    monkeypatch.setenv("GATEWAY_HOST", "127.0.0.2")
    monkeypatch.setenv("GATEWAY_ENVIRONMENTS", " math, coding ,,os ")

    read = load(port=9001, host=None, insecure=None)

    assert (read.port, read.host, read.insecure) == (9001, "127.0.0.2", False)
    assert read.environments == ("math", "coding", "os")


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "SECRET", "TRAINER_KEYS", "ENVIRONMENTS", "SOCKET_VOLUME"):
        monkeypatch.setenv(f"GATEWAY_{name}", "")

    read = load()

    assert (read.port, read.secret, read.environments, read.socket_volume) == (8080, None, (), None)
    assert parse_keys(read.trainer_keys) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "65536"),
        ("PORT", "-1"),
        ("PORT", "http"),
        ("BACKEND", "podman"),
        ("DOCKER_THREADS", "0"),
        ("DOCKER_THREADS", "65"),
        ("INSTANCE", "-x"),
        ("INSTANCE", "a b"),
        ("INSTANCE", "x" * 64),
        ("MAX_BODY_BYTES", "1023"),
        ("QUEUE_MAX", "0"),
        ("CLOSED_KEPT_S", "-1"),
        ("DRAIN_S", "-1"),
        ("LOG_LEVEL", "loud"),
        ("LAZY_BINDING", "perhaps"),
        ("NODE_MAX_CONTAINERS", "0"),
    ],
)
def test_the_error_for_an_invalid_value_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"GATEWAY_{name}", value)

    with pytest.raises(ConfigError, match=f"^GATEWAY_{name}: "):
        load()


def test_all_invalid_values_are_reported_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_PORT", "x")
    monkeypatch.setenv("GATEWAY_QUEUE_MAX", "0")

    with pytest.raises(ConfigError, match=r"GATEWAY_PORT: .*; GATEWAY_QUEUE_MAX: "):
        load()


def test_an_unknown_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_TYPO", "1")
    monkeypatch.setenv("GATEWAY_PROT", "1")

    with pytest.raises(
        ConfigError,
        match=r"^unknown setting GATEWAY_PROT \(did you mean 'GATEWAY_PORT'\?\); unknown setting GATEWAY_TYPO",
    ):
        load()


def test_unknown_names_are_found_among_any_variables() -> None:
    environ = {"GATEWAY_PORT": "1", "GATEWAY_": "1", "GATEWAYS": "1", "PATH": "/bin", "GATEWAY_X": "1"}

    assert unknown_variables(environ) == ["GATEWAY_", "GATEWAY_X"]


LINKS = {
    "GATEWAY_SERVICE_HOST": "10.96.0.1",
    "GATEWAY_SERVICE_PORT": "8080",
    "GATEWAY_SERVICE_PORT_HTTP": "8080",
    "GATEWAY_PORT": "tcp://10.96.0.1:8080",
    "GATEWAY_PORT_8080_TCP": "tcp://10.96.0.1:8080",
    "GATEWAY_PORT_8080_TCP_PROTO": "tcp",
    "GATEWAY_PORT_8080_TCP_PORT": "8080",
    "GATEWAY_PORT_8080_TCP_ADDR": "10.96.0.1",
    "GATEWAY_REDIS_SERVICE_HOST": "10.96.0.2",
    "GATEWAY_REDIS_PORT": "udp://10.96.0.2:6379",
    "GATEWAY_REDIS_PORT_6379_UDP_ADDR": "10.96.0.2",
    "GATEWAY_NAME": "/trainer/gateway",
    "GATEWAY_ENV_PYTHON_VERSION": "3.11",
}


def test_variables_of_a_service_named_gateway_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)

    assert load().port == 8080
    assert service_links() == sorted(LINKS)


@pytest.mark.parametrize("name", ["GATEWAY_SERVICE", "GATEWAY_REDIS_PORT", "GATEWAY_PORT_TCP", "GATEWAY_NAME"])
def test_other_unknown_variables_are_errors_beside_a_service_named_gateway(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "6379")

    with pytest.raises(ConfigError, match=f"unknown setting {name}"):
        load()


def test_variables_of_the_client_commands_are_known_too() -> None:
    assert unknown_variables({"GATEWAY_URL": "http://gateway:8080", "GATEWAY_KEY": OTHER}) == []


def test_every_setting_has_a_docstring_below_it() -> None:
    assert set(_documented_fields()) == set(Settings.model_fields)


def _documented_fields() -> list[str]:
    [tree] = ast.parse(inspect.getsource(Settings)).body
    assert isinstance(tree, ast.ClassDef)
    return [
        statement.target.id
        for statement, following in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and isinstance(following, ast.Expr)
        and isinstance(following.value, ast.Constant)
    ]


def test_settings_are_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        settings().port = 1


def test_the_socket_folder_is_short_enough_for_a_worker_s_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    assert len(str(settings().socket_dir)) + len("/0123456789abcdef0123456789abcdef/worker.sock") <= 107


@pytest.mark.parametrize(
    ("variables", "folder"),
    [({"XDG_STATE_HOME": "/state", "HOME": "/home/a"}, "/state"), ({"HOME": "/home/a"}, "/home/a/.local/state")],
)
def test_the_state_folder_follows_the_users_xdg_folders(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert settings().state_dir == Path(folder) / "env-gateway"


def test_inherited_variables_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_VARIABLE", "1")

    assert inherited_environ()["SOME_VARIABLE"] == "1"


# -- keys -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("", {}),
        (" , ,", {}),
        ("alice:a-trainer-key", {"alice": "a-trainer-key"}),
        (" alice:a-trainer-key , bob:12345678 ", {"alice": "a-trainer-key", "bob": "12345678"}),
        ("alice:has:colons:in:it", {"alice": "has:colons:in:it"}),
        ("alice :\ta-trainer-key , bob: 12345678", {"alice": "a-trainer-key", "bob": "12345678"}),
    ],
)
def test_keys_are_pairs_of_name_and_key(text: str, keys: dict[str, str]) -> None:
    assert parse_keys(SecretStr(text)) == keys


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a-trainer-key", "entry 1 is not of the form name:key"),
        ("alice:a-trainer-key,b", "entry 2 is not of the form name:key"),
        (":a-trainer-key", "entry 1 is not of the form name:key"),
        ("alice:", "at least 8 printable ASCII"),
        ("alice:1234567", "at least 8 printable ASCII"),
        ("alice:  1234567  ", "at least 8"),
        ("alice:1234 5678", "without spaces and slashes"),
        ("alice:1234/5678", "without spaces and slashes"),
        ("alice:1234\t5678", "at least 8 printable ASCII"),
        ("alice:a-trainer-key,alice:another-key", "the name 'alice' occurs twice"),
        ("alice:a-trainer-key,bob:a-trainer-key", "the same key"),
        ("alice:schlüssel-eins", "ASCII"),
    ],
)
def test_ambiguous_or_malformed_keys_are_refused(monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_keys(SecretStr(text))

    monkeypatch.setenv("GATEWAY_TRAINER_KEYS", text)
    with pytest.raises(ConfigError, match=r"^GATEWAY_TRAINER_KEYS: .*" + reason):
        load()


@pytest.mark.parametrize(
    "text", ["alice:very-secret/key", "very-secret-key", "alice:very-secret,alice:very-secret-two"]
)
def test_no_error_shows_a_key(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("GATEWAY_OPERATOR_KEYS", text)

    with pytest.raises(ConfigError) as refusal:
        load()

    assert "very-secret" not in refusal.value.detail
    assert refusal.value.__cause__ is None
    assert refusal.value.__suppress_context__


def test_printed_settings_show_no_key() -> None:
    given = settings(trainer_keys=f"alice:{KEY}", operator_keys=f"olga:{OTHER}", secret="very-secret")

    shown = f"{given!r} {given} {given.model_dump_json()}"

    assert KEY not in shown
    assert OTHER not in shown
    assert "very-secret" not in shown


# -- combinations ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"host": "::1"},
        {"host": "127.9.9.9"},
        {"host": "localhost"},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "0.0.0.0", "trainer_keys": f"alice:{KEY}"},
        {"host": "gateway.example", "trainer_keys": f"alice:{KEY}", "operator_keys": f"olga:{OTHER}"},
    ],
)
def test_safe_combinations_are_accepted(given: dict[str, Any]) -> None:
    wanted = settings(**given)

    assert wanted.checked() is wanted


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "gateway.example", "", "8.8.8.8"])
def test_an_address_beyond_loopback_is_refused_without_trainer_keys(host: str) -> None:
    for given in ({}, {"operator_keys": f"olga:{OTHER}"}):
        with pytest.raises(ConfigError, match="without keys"):
            settings(host=host, **given).checked()


def test_the_same_key_for_a_trainer_and_an_operator_is_refused() -> None:
    with pytest.raises(ConfigError, match="they must differ") as refusal:
        settings(trainer_keys=f"alice:{KEY}", operator_keys=f"olga:{KEY}").checked()
    assert KEY not in refusal.value.detail


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("127.0.0.1", True),
        ("127.255.0.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("", False),
    ],
)
def test_loopback_addresses_are_recognized(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here


# -- settings in files ----------------------------------------------------------------------------------------------


def test_settings_are_read_from_files_too_and_a_variable_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gateway_secret").write_text("from-a-file\n")
    (tmp_path / "gateway_trainer_keys").write_text(f"alice:{KEY}\n")
    (tmp_path / "gateway_store").write_text("redis://in-a-file/0")
    (tmp_path / "cluster-ca.pem").write_text("of no concern here")
    monkeypatch.setenv("GATEWAY_SECRETS_DIR", str(tmp_path))
    monkeypatch.setenv("GATEWAY_STORE", "memory")

    read = load()

    assert read.read_secret() == b"from-a-file"
    assert parse_keys(read.trainer_keys) == {"alice": KEY}
    assert read.store == "memory"


def test_without_a_folder_of_secrets_no_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gateway_secret").write_text("from-a-file")
    monkeypatch.chdir(tmp_path)

    assert load().secret is None


def test_a_file_with_the_name_of_an_unknown_setting_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "gateway_trainer_key").write_text(f"alice:{KEY}")
    monkeypatch.setenv("GATEWAY_SECRETS_DIR", str(tmp_path))

    with pytest.raises(ConfigError, match=r"GATEWAY_SECRETS_DIR.*unknown settings: gateway_trainer_key$"):
        load()


def test_the_error_for_an_invalid_value_in_a_file_names_the_setting_but_not_the_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "gateway_trainer_keys").write_text("very-secret-key")
    monkeypatch.setenv("GATEWAY_SECRETS_DIR", str(tmp_path))

    with pytest.raises(ConfigError, match="GATEWAY_TRAINER_KEYS") as refusal:
        load()

    assert "very-secret" not in refusal.value.detail


def test_a_missing_folder_of_secrets_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GATEWAY_SECRETS_DIR", str(tmp_path / "nowhere"))

    with pytest.raises(ConfigError, match=r"GATEWAY_SECRETS_DIR.*nowhere"):
        load()


@pytest.mark.parametrize("content", [pytest.param(b"\n", id="empty"), pytest.param(b"\xff\xfe", id="not a text")])
def test_a_file_without_a_value_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "gateway_secret").write_bytes(content)
    monkeypatch.setenv("GATEWAY_SECRETS_DIR", str(tmp_path))

    with pytest.raises(ConfigError, match="GATEWAY_SECRETS_DIR"):
        load()


# -- the secret -----------------------------------------------------------------------------------------------------


def test_the_secret_is_created_once_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    first = settings(state_dir=tmp_path / "new" / "state").read_secret()
    again = settings(state_dir=tmp_path / "new" / "state").read_secret()

    path = tmp_path / "new" / "state" / "secret"
    assert first == again
    assert len(bytes.fromhex(first.decode())) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["secret"]


def test_two_gateways_create_different_secrets(tmp_path: Path) -> None:
    assert settings(state_dir=tmp_path / "a").read_secret() != settings(state_dir=tmp_path / "b").read_secret()


def test_gateways_with_the_same_secret_have_the_same_identity_and_others_a_different_one(tmp_path: Path) -> None:
    owners = [settings(secret=secret).read_owner() for secret in ("ours", "ours", "theirs")]

    assert owners[0] == owners[1] != owners[2]
    assert re.fullmatch("[0-9a-f]{16}", owners[0])


def test_a_second_gateway_without_a_shared_store_may_not_hold_the_containers_of_a_running_gateway(
    tmp_path: Path,
) -> None:
    with hold_containers(settings(state_dir=tmp_path, **DOCKER)):
        with pytest.raises(ConfigError, match="set another GATEWAY_INSTANCE here, or the same Redis in both"):
            hold_containers(settings(state_dir=tmp_path, **DOCKER))
        hold_containers(settings(state_dir=tmp_path, instance="another", **DOCKER)).close()
        hold_containers(settings(state_dir=tmp_path, secret="another", **DOCKER)).close()
        hold_containers(settings(state_dir=tmp_path, store="memory", backend="process")).close()

    hold_containers(settings(state_dir=tmp_path, **DOCKER)).close()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("memory", "redis://a"),
        ("redis://a", "memory"),
        ("redis://a", "redis://b"),
        ("redis://a:6379/0", "redis://a:6379/1"),
        ("redis+sentinel://a,b/one", "redis+sentinel://a,b/another"),
        ("unix:///run/a.sock", "redis://a"),
    ],
)
def test_gateways_with_different_stores_may_not_hold_the_same_containers(
    tmp_path: Path, first: str, second: str
) -> None:
    with hold_containers(settings(state_dir=tmp_path, backend="docker", store=first)):
        with pytest.raises(ConfigError) as refused:
            hold_containers(settings(state_dir=tmp_path, backend="docker", store=second))
        hold_containers(settings(state_dir=tmp_path, backend="docker", store=second, instance="another")).close()
        (path,) = tmp_path.glob("env-gateway-*.lock")
        theirs = path.read_text()

    hold_containers(settings(state_dir=tmp_path, backend="docker", store=second)).close()
    assert str(path) in str(refused.value)
    assert f"GATEWAY_STORE={theirs} where this one has {path.read_text()}, " in str(refused.value)
    assert "set another GATEWAY_INSTANCE here, or the same Redis in both" in str(refused.value)


def test_two_prefixes_in_one_redis_count_as_two_stores(tmp_path: Path) -> None:
    one: dict[str, Any] = {"state_dir": tmp_path, "backend": "docker", "store": "redis://a"}
    with hold_containers(settings(**one)), pytest.raises(ConfigError, match="GATEWAY_STORE_PREFIX=gateway where"):
        hold_containers(settings(**one, store_prefix="another"))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("redis://a", "redis://another:user@a:6379/0"),
        ("redis+sentinel://:word@a,b:1/one", "redis+sentinel://b:1,a:26379/one?sentinel_password=word"),
        ("unix:///run/a.sock", "unix://user:word@/run/a.sock?db=0"),
    ],
)
def test_replicas_with_the_same_store_hold_their_containers_together(tmp_path: Path, first: str, second: str) -> None:
    with (
        hold_containers(settings(state_dir=tmp_path, backend="docker", store=first)),
        hold_containers(settings(state_dir=tmp_path, backend="docker", store=second)),
    ):
        (path,) = tmp_path.glob("*.lock")
        assert "word" not in path.read_text()
        assert "user" not in path.read_text()


HOLDS = """
import sys
from gateway.adapters import check_store, hold_containers
from gateway.settings import Settings
with hold_containers(Settings(state_dir=sys.argv[1], backend="docker", store="redis://:pass-word@a")):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_containers_are_held_by_two_processes_until_both_have_died(tmp_path: Path) -> None:
    holding = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with (
        subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one,
        subprocess.Popen(holding, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other,
    ):
        try:
            assert [process.stdout and process.stdout.readline() for process in (one, other)] == [b"held\n"] * 2
            hold_containers(settings(state_dir=tmp_path, backend="docker", store="redis://a")).close()
            one.kill()
            one.wait(HANG_S)
            with pytest.raises(ConfigError, match="a:6379 database 0"):
                hold_containers(settings(state_dir=tmp_path, **DOCKER))
        finally:
            one.kill()
            other.kill()
    hold_containers(settings(state_dir=tmp_path, **DOCKER)).close()
    assert not any(b"pass-word" in path.read_bytes() for path in tmp_path.iterdir())


def test_replicas_that_start_together_after_a_change_of_the_store_hold_their_containers(tmp_path: Path) -> None:
    count = 8
    hold_containers(settings(state_dir=tmp_path, **DOCKER)).close()  # its lock file stays
    line = threading.Barrier(count)
    held: list[ExitStack] = []
    wrong: list[ConfigError] = []

    def start() -> None:
        line.wait(HANG_S)
        try:
            held.append(hold_containers(settings(state_dir=tmp_path, backend="docker", store="redis://a")))
        except ConfigError as error:
            wrong.append(error)

    replicas = [threading.Thread(target=start) for _ in range(count)]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join(HANG_S)

    assert not wrong
    assert len(held) == count
    with pytest.raises(ConfigError):
        hold_containers(settings(state_dir=tmp_path, **DOCKER))
    for one in held:
        one.close()


def test_a_replica_with_a_set_secret_and_redis_starts_without_a_writable_state_folder(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    nowhere: dict[str, Any] = {"state_dir": tmp_path / "file" / "state", "secret": "ours", "backend": "docker"}

    hold_containers(settings(**nowhere, store="redis://a")).close()
    with pytest.raises(ConfigError, match="GATEWAY_STATE_DIR="):
        hold_containers(settings(**nowhere, store="memory"))


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:pass/word@host",
        "redis://:12/word@host:6379/0",
        "redis://:pass?word@host",
        "redis://:12?word@host",
        "rediss://:12#word@host",
        "redis://:pa@ss/word@host",
        "redis+sentinel://:pass/word@a/games",
    ],
)
def test_the_error_for_an_unencoded_password_says_how_to_write_it_and_does_not_show_it(
    tmp_path: Path, url: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        hold_containers(settings(state_dir=tmp_path, backend="docker", store=url))

    assert str(refused.value).startswith("GATEWAY_STORE: must be redis")
    assert str(refused.value).endswith("; write /, ? and # of a password as %2F, %3F and %23")
    assert "word@" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    ["redis://:pa@ss@host", "redis://host/0?password=p@ss", "redis://:p%2Fss@host:1/2", "unix:///run/redis@a.sock"],
)
def test_other_characters_of_a_password_or_a_path_are_accepted(url: str) -> None:
    assert "p" not in check_store(url).replace("/run/redis@a.sock", "")


def test_a_secret_that_is_set_replaces_the_file(tmp_path: Path) -> None:
    assert settings(state_dir=tmp_path / "x", secret="ours").read_secret() == b"ours"
    assert not (tmp_path / "x").exists()


def test_replicas_that_start_together_agree_on_one_secret(tmp_path: Path) -> None:
    count = 16
    line, found = threading.Barrier(count), []

    def start() -> None:
        line.wait(HANG_S)
        found.append(settings(state_dir=tmp_path / "state").read_secret())

    replicas = [threading.Thread(target=start) for _ in range(count)]
    for replica in replicas:
        replica.start()
    for replica in replicas:
        replica.join(HANG_S)

    assert len(found) == count
    assert len(set(found)) == 1
    assert len(found[0]) == 64
    assert [entry.name for entry in (tmp_path / "state").iterdir()] == ["secret"]


def test_a_state_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(ConfigError, match="GATEWAY_STATE_DIR="):
        settings(state_dir=tmp_path / "file" / "state").read_secret()


def test_an_empty_secret_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("\n")

    with pytest.raises(ConfigError, match="empty"):
        settings(state_dir=tmp_path).read_secret()
