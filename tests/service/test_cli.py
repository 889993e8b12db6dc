"""The command `gateway`, as an operator runs it. An error is one line and exit status 2, never a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
import typer

from gateway import __version__
from gateway.cli.main import app
from tests.deadlines import COMMAND_S
from tests.fakes.command import Command, Done, in_process

GATEWAY = str(Path(sys.executable).with_name("gateway"))
GOOD = """
name = "quiz"
image = "quiz"

[pool]
slots = 4

[loosened]
network = "bridge"

[tasks]
directory = "tasks/quiz"
"""


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """Make a catalog of one environment with one task, and return the folder above it."""
    (tmp_path / "env_images" / "quiz").mkdir(parents=True)
    (tmp_path / "env_images" / "quiz" / "environment.toml").write_text(GOOD)
    (tmp_path / "tasks" / "quiz").mkdir(parents=True)
    (tmp_path / "tasks" / "quiz" / "train.jsonl").write_text('{"question":"?"}\n')
    return tmp_path


def places(catalog: Path) -> dict[str, str]:
    """Return the environment variables of a command on *catalog*."""
    folders = {"GATEWAY_CATALOG_DIR": catalog / "env_images", "GATEWAY_STATE_DIR": catalog}
    variables = {name: str(path) for name, path in folders.items()}
    return variables | {"GATEWAY_SOCKET_DIR": str(catalog / "s"), "GATEWAY_PORT": "0", "COLUMNS": "160"}


@pytest.fixture
def run(catalog: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Return a function that runs the command on *catalog* in the test process."""
    with in_process(monkeypatch, capfd) as command:
        yield lambda *arguments, **settings: command(*arguments, **(places(catalog) | settings))


def served(catalog: Path, **settings: str) -> Done:
    """Run ``gateway serve`` as a separate process, because it leaves its listening sockets open at its end."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    variables = inherited | places(catalog) | settings
    done = subprocess.run([GATEWAY, "serve"], env=variables, capture_output=True, text=True, timeout=COMMAND_S)
    return Done(done.returncode, done.stdout, done.stderr)


def test_serve_writes_its_log_as_json(catalog: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    command = [GATEWAY, "serve", "--json", "--port", "0"]
    events = []
    with ExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory(prefix="gw-"))  # their paths must be short
        variables = inherited | places(catalog) | {"GATEWAY_BACKEND": "process", "GATEWAY_SOCKET_DIR": sockets}
        process = stack.enter_context(subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True))
        assert process.stderr is not None
        try:
            for line in process.stderr:
                assert line.startswith("{"), line
                events.append(json.loads(line)["event"])
                if events[-1] == "gateway_ready":
                    process.terminate()
        finally:
            process.kill()

    assert {"gateway_ready", "gateway_stopped"} <= set(events)


def refusal(done: Done) -> str:
    """Return the only line of an error."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done.stderr.strip()


def test_the_version_is_an_option_too(run: Command) -> None:
    assert run("--version").stdout == run("version").stdout == f"{__version__}\n"


@pytest.mark.parametrize("command", [(), ("run",), ("sessions", "list"), ("tasks", "validate")])
def test_each_command_explains_itself_with_a_short_option(command: tuple[str, ...], run: Command) -> None:
    short, long = run(*command, "-h", COLUMNS="200"), run(*command, "--help", COLUMNS="200")

    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "Usage:" in short.stdout


def test_help_shows_text_in_brackets(run: Command) -> None:
    assert "the text [image]" in " ".join(run("run", "--help", COLUMNS="200").stdout.split())


def test_a_used_port_is_reported_with_the_remedy(catalog: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        done = served(catalog, GATEWAY_PORT=str(used.getsockname()[1]))

    assert refusal(done).splitlines()[-1].endswith("choose another port with GATEWAY_PORT or --port")


def test_the_first_key_says_what_it_changes_and_later_ones_do_not(run: Command) -> None:
    first, second = run("keys", "add", "alice"), run("keys", "add", "bob")

    assert "refuses requests without a key" in first.stderr
    assert "refuses requests without a key" not in second.stderr


def test_check_prints_the_effective_configuration(run: Command) -> None:
    done = run("check")

    assert done.returncode == 0, done.stderr
    assert "quiz" in done.stdout
    assert "0-4 x 4 slots" in done.stdout
    assert "train 1" in done.stdout
    assert "network=bridge" in done.stdout
    assert "default environment: quiz" in done.stdout


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_wrong_environment_stops_with_file_line_and_reason(catalog: Path, command: str, run: Command) -> None:
    path = catalog / "env_images" / "quiz" / "environment.toml"
    path.write_text(GOOD.replace("slots = 4", "slots = 0"))

    assert f"{path}:6: pool.slots: " in refusal(run(command))


@pytest.mark.parametrize("command", ["check", "serve"])
def test_a_wrong_task_stops_with_file_line_and_reason(catalog: Path, command: str, run: Command) -> None:
    path = catalog / "tasks" / "quiz" / "train.jsonl"
    path.write_text('{"question":"?"}\n[1]\n')

    assert f"{path}:2: a task is a JSON object, not list" in refusal(run(command))


def test_check_names_environments_that_are_not_on_offer_and_the_reason(catalog: Path, run: Command) -> None:
    (catalog / "env_images" / "pages").mkdir()
    (catalog / "env_images" / "pages" / "environment.toml").write_text('name = "pages"\nimage = "p"\ncommand = []\n')

    done = run("check")

    assert "pages: not available: it runs in its image only: use GATEWAY_BACKEND=docker" in done.stdout


def test_check_names_environments_that_need_bubblewrap_if_it_is_missing(catalog: Path, run: Command) -> None:
    folder = catalog / "env_images" / "shell"
    folder.mkdir()
    (folder / "environment.toml").write_text('name = "shell"\nimage = "s"\nisolation = "sandbox"\n')

    without = run("check", PATH=str(catalog))

    assert without.returncode == 0, without.stderr
    (told,) = [line for line in without.stdout.splitlines() if line.startswith("shell: ")]
    assert "not available: its sandboxes need bubblewrap" in told
    (catalog / "bwrap").touch(0o755)
    assert "not available" not in run("check", PATH=str(catalog)).stdout


def test_a_missing_catalog_is_reported_in_one_line_with_the_remedy(tmp_path: Path, run: Command) -> None:
    said = refusal(run("check", GATEWAY_CATALOG_DIR=str(tmp_path / "nothing")))

    assert len(said.splitlines()) == 1
    assert "set GATEWAY_CATALOG_DIR to a folder of environments" in said


def test_one_option_may_hold_several_static_servers(run: Command) -> None:
    said = refusal(run("serve", "--static", "a=http://127.0.0.1:1,b=nowhere"))

    assert "'b=nowhere' is not of the form NAME=URL" in said


def test_check_and_serve_refuse_wrong_curricula_and_report_the_same_problems(catalog: Path, run: Command) -> None:
    folder = catalog / "curricula"
    folder.mkdir()
    (folder / "a.toml").write_text('seed = -1\nenvironment = "nowhere"\n')
    (folder / "b.toml").write_text(
        'environment = "quiz"\nsampler.kind = "staged"\nsampler.stages = [{name = "x", tags = ["y"]}]'
    )
    settings = {"GATEWAY_CURRICULA_DIR": str(folder)}

    told = refusal(run("check", **settings))

    assert refusal(served(catalog, **settings)) == told
    assert told.splitlines() == [
        f"gateway: {folder}/a.toml:1: seed: it must be at least 0, not -1",
        f"{folder}/a.toml:2: environment: no environment 'nowhere' is available",
        f"{folder}/b.toml:3: sampler.stages: none of the component's tasks is in any stage",
        f"{folder}/b.toml:3: sampler.stages[0]: no task is in the stage 'x'",
    ]


def test_check_names_the_curricula(catalog: Path, run: Command) -> None:
    (catalog / "curricula").mkdir()
    (catalog / "curricula" / "plain.toml").write_text('environment = "quiz"\n')

    done = run("check", GATEWAY_CURRICULA_DIR=str(catalog / "curricula"))

    assert "curriculum plain: uniform on quiz" in done.stdout


def test_an_unknown_setting_is_named(run: Command) -> None:
    assert "GATEWAY_TYPO" in refusal(run("check", GATEWAY_TYPO="1"))


def test_a_wrong_setting_is_named(run: Command) -> None:
    assert "GATEWAY_PORT" in refusal(run("check", GATEWAY_PORT="http"))


def test_a_public_address_without_keys_is_refused(run: Command) -> None:
    assert "refusing to listen on 0.0.0.0 without keys" in refusal(run("serve", "--host", "0.0.0.0"))


def test_a_store_of_another_kind_is_refused(catalog: Path) -> None:
    assert "GATEWAY_STORE" in refusal(served(catalog, GATEWAY_STORE="postgres://h"))


def test_an_engine_that_does_not_answer_is_reported_at_the_start(catalog: Path) -> None:
    settings = {"GATEWAY_BACKEND": "docker", "GATEWAY_DOCKER_URL": f"unix://{catalog}/no.sock"}

    assert "engine" in refusal(served(catalog, **settings))


@pytest.fixture
def gateway() -> Iterator[str]:
    """Serve the responses of a gateway with an operator key to the commands, and yield the address."""
    name = "a-session-whose-name-is-longer-than-any-terminal-is-wide-" * 3
    session = {
        "id": "s",
        "name": name,
        "environment": "math",
        "owner": "lab",
        "state": "open",
        "worker": "w",
        "task": "",
    }
    answers = {
        "GET /admin/v1/nodes": {"nodes": []},
        "GET /admin/v1/workers": {"workers": []},
        "GET /admin/v1/sessions": {"sessions": [session]},
        "POST /admin/v1/environments/math/restart": {"environment": "math", "draining": ["w"]},
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            known = self.headers["X-API-Key"] == "an operator's"
            body = answers[f"{self.command} {self.path}"] if known else {"detail": "a key is needed"}
            self.send_response(200 if known else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_ps_cuts_no_line_without_a_terminal_and_prints_json(gateway: str, run: Command) -> None:
    reached = ("ps", "--url", gateway, "--key", "an operator's")

    table, whole = run(*reached, COLUMNS="80"), run(*reached, "--json")

    assert table.returncode == whole.returncode == 0, table.stderr
    found = json.loads(whole.stdout)
    assert found.keys() == {"nodes", "workers", "sessions"}
    assert found["sessions"][0]["name"] in table.stdout
    assert [line.strip() for line in table.stdout.splitlines() if line.strip().startswith("1 ")] == ["1 session"]


def test_a_command_without_a_key_asks_for_an_operator_key(gateway: str, run: Command) -> None:
    for command in (("ps",), ("tasks", "list"), ("restart", "math")):
        done = run(*command, "--url", gateway)

        assert done.returncode == 2
        told = f"{gateway}: a key is needed; give an operator's key with --key or GATEWAY_KEY\n"
        assert done.stderr == told


def test_restart_prints_the_number_of_replaced_workers(gateway: str, run: Command) -> None:
    done = run("restart", "math", "--url", gateway, "--key", "an operator's")

    assert done.stdout == "1 worker of math will be replaced\n"


def test_ps_reports_that_no_gateway_answers(run: Command) -> None:
    done = run("ps", "--url", "http://127.0.0.1:1")

    assert done.returncode == 1
    assert done.stderr.startswith("http://127.0.0.1:1: ")
    assert "Traceback" not in done.stderr


def commands(group: Any, *names: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each command below *group* with its options."""
    context = group.make_context("gateway", [], resilient_parsing=True)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        if hasattr(found, "list_commands"):
            yield from commands(found, *names, name)
        else:
            yield " ".join((*names, name)), {option for one in found.params for option in one.opts}


def test_every_command_prints_json_and_every_command_that_asks_a_gateway_takes_a_key() -> None:
    found = dict(commands(typer.main.get_command(app)))

    assert len(found) >= 35
    assert {name for name, options in found.items() if "--json" not in options} == set()
    assert {name for name, options in found.items() if "--url" in options and "--key" not in options} == set()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("check", {"default": "quiz", "backend": "process", "left_out": {}}, id="check"),
        pytest.param("version", {"version": __version__}, id="version"),
        pytest.param("env show quiz", {"name": "quiz", "protocol": "ors"}, id="env show"),
        pytest.param("certs new", {"offline": ["new/ca-key.pem"]}, id="certs"),
        pytest.param("keys add ops --operator", {"name": "ops", "role": "operator"}, id="keys add"),
        pytest.param("tasks new quiz -o new.yaml", {"file": "new.yaml"}, id="tasks new"),
        pytest.param("tasks schema -o schema.json", {"file": "schema.json"}, id="tasks schema"),
        pytest.param("tasks keygen lab", {"private": "lab", "public": "lab.pub"}, id="tasks keygen"),
        pytest.param("tasks validate tasks/quiz/train.jsonl -e quiz", {"tasks": 1, "problems": []}, id="validate"),
    ],
)
def test_a_command_without_a_gateway_prints_its_result_as_json(
    catalog: Path, run: Command, monkeypatch: pytest.MonkeyPatch, line: str, expected: dict[str, Any]
) -> None:
    monkeypatch.chdir(catalog)

    done = run(*line.split(), "--json", GATEWAY_BACKEND="process")

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in expected} == expected


def test_a_signed_bundle_and_a_revoked_key_are_described_as_json(
    catalog: Path, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(catalog)

    def words(line: str) -> Done:
        return run(*line.split())

    words("tasks keygen lab")
    (catalog / "task.json").write_text('{"id": "custom/one", "env_type": "quiz", "instruction": "?"}')

    signed = words("tasks sign task.json -k lab -o bundle.json --json")
    verified = words("tasks verify bundle.json --keys lab.pub --json")
    written = words("tasks sign task.json -k lab --json")
    added = words("keys add ops --operator --json")
    revoked = words("keys revoke ops --json")

    assert json.loads(signed.stdout) == {"file": "bundle.json"}
    assert json.loads(verified.stdout)["tasks"] == 1
    assert json.loads(written.stdout)["tasks"][0]["id"] == "custom/one"  # the document itself; the result is beside it
    assert json.loads(written.stderr) == {"file": None}
    assert len(json.loads(added.stdout)["key"]) > 20
    assert json.loads(revoked.stdout)["revoked"] == "ops"
