"""`gateway tasks …` without a gateway: templates, validation against the schema, and signing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from envserver import generic
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.cli.tasks import template
from gateway.core.environment import Isolation
from gateway.core.errors import GatewayError
from gateway.tasks.documents import read_yaml
from gateway.tasks.schema import parse
from gateway.tasks.signing import read_private, sign
from tests.deadlines import COMMAND_S

ENVIRONMENTS = ["math", "os", "coding", "browser", "game", "chat", "reasoning_gym", "textarena", "something-else"]
ROOT = Path(__file__).parents[3]


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["tasks", *map(str, arguments)])


def refusal(*arguments: str | Path) -> str:
    """Return the output of a failing command, or the error message that `gateway` prints for it."""
    done = run(*arguments)
    if isinstance(done.exception, GatewayError):
        return done.exception.detail
    assert done.exit_code == 2, done.output
    return done.output


@pytest.fixture
def task_file(tmp_path: Path) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text("id: custom/a\nenv_type: math\ninstruction: What is 6 times 7?\n")
    return path


TASK = {"id": "a", "env_type": "math", "instruction": "1e5?"}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (json.dumps(TASK), 1),
        (json.dumps(TASK, indent=2), 1),
        (json.dumps([TASK, {**TASK, "id": "b"}]), 2),
        (f"{json.dumps(TASK)}\n\n{json.dumps({**TASK, 'id': 'b'})}\n", 2),
        ("id: a\nenv_type: math\ninstruction: What is 6 times 7?\n", 1),
    ],
    ids=["JSON", "JSON in lines", "a list", "JSON lines", "YAML"],
)
def test_tasks_are_read_from_the_standard_input(text: str, count: int) -> None:
    done = CliRunner().invoke(app, ["tasks", "validate", "-", "--json"], input=text)

    assert (done.exit_code, json.loads(done.stdout)["tasks"]) == (0, count), done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"id": "a"}\n{"id": }\n', "standard input:2: not JSON"),
        ('{"id": \n', "standard input: line 2: not JSON"),
        ("a: [", "standard input: line 1: not YAML"),
        ("", "-: there is no task"),
    ],
)
def test_a_wrong_standard_input_is_refused_with_its_place(text: str, words: str) -> None:
    done = CliRunner().invoke(app, ["tasks", "validate", "-"], input=text)

    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_a_template_is_a_valid_task_and_equal_in_yaml_and_json(environment: str) -> None:
    document: Any = read_yaml(template(environment, id="custom/x-1").encode())

    task = parse(document, isolation=Isolation.SANDBOX, is_registered=True)

    assert (task["id"], task["env_type"]) == ("custom/x-1", environment)
    assert json.loads(template(environment, id="custom/x-1", form="json")) == document
    assert "# " in template(environment)


@pytest.mark.parametrize("environment", ["math", "os", "chat", "something-else"])
@pytest.mark.parametrize("id", ["custom/x-1", "9", "a/b/C.d_e", "import"])
def test_a_python_template_registers_its_task(environment: str, id: str) -> None:
    before = generic.registry.snapshot()
    rewards = dict(generic.REWARDS)
    text = template(environment, id=id, form="python")

    try:
        exec(compile(text, "template.py", "exec"), {"__name__": "template"})
        task = generic.registry.get(id)
        call = generic.parse_reward(task.evaluation["reward_function"])
        scores = [generic.REWARDS[call.name](said, *call.args) for said in ("Done ", "no")]
    finally:
        generic.registry.restore(before)
        generic.REWARDS.clear()
        generic.REWARDS.update(rewards)

    assert task.env_type == environment
    assert scores == [1.0, 0.0]
    assert parse(task.to_dict(), is_registered=True)["id"] == id


@pytest.mark.parametrize("id", ["custom/x-1", "custom/9", "---/..."])
def test_a_browser_s_python_template_is_a_module_that_compiles(id: str) -> None:
    if id.startswith("-"):
        with pytest.raises(GatewayError):
            template("browser", id=id, form="python")
    else:
        compile(template("browser", id=id, form="python"), "template.py", "exec")


READERS = {
    "math": "import math_scorers; math_scorers.Evaluation.read(task['evaluation'])",
    "os": "import os_problem; os_problem.Problem.read(task)",
    "game": "import game_config; game_config.read_game(task['config'], seed=1)",
    "browser": "import browser_spec; browser_spec.read_spec(task, variables={})",
}


def in_environment(environment: str, code: str) -> str:
    """Run *code* in a process with the environment's modules, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "env_images" / environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("environment", READERS)
def test_the_environment_accepts_its_template(environment: str) -> None:
    task = read_yaml(template(environment).encode())

    in_environment(environment, f"task = {task!r}\n{READERS[environment]}")


def test_a_browser_s_python_template_registers_its_class() -> None:
    text = template("browser", id="custom/log-in", form="python")

    said = in_environment("browser", f"{text}\nfrom browser_tasks import list_custom_tasks\nprint(list_custom_tasks())")

    assert "'log-in'" in said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("new", "no/name"), "is not an environment's name"),
        (("new", "math", "--id", "a b"), "--id a b"),
        (("new", "math", "--format", "toml"), "--format toml"),
    ],
)
def test_invalid_arguments_for_a_template_are_refused(arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refusal(*arguments)


def test_a_template_does_not_overwrite_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"

    assert run("new", "os", "--id", "custom/x", "-o", path).exit_code == 0

    assert path.read_text() == template("os", id="custom/x")
    assert "exists" in refusal("new", "os", "-o", path)


def test_valid_tasks_are_reported_as_valid(task_file: Path) -> None:
    done = run("validate", task_file, ROOT / "tasks" / "math" / "test.jsonl")

    assert done.exit_code == 0, done.output
    assert "each fits the schema; none was tried" in done.output
    assert done.output.splitlines()[-1].startswith(f"gateway tasks prove {task_file}: ")


def test_every_problem_of_every_file_is_reported_with_its_place(tmp_path: Path, task_file: Path) -> None:
    lines = tmp_path / "b.jsonl"
    lines.write_text('{"id": 3, "tags": "x"}\n{"id": "ok"}\n{"evaluation": {"module": "os"}}\n')
    broken = tmp_path / "c.json"
    broken.write_text("{")

    said = refusal("validate", task_file, lines, broken).splitlines()

    assert [line.partition(": ")[0] for line in said] == [f"{lines}:1", f"{lines}:1", f"{lines}:3", str(broken)]
    assert [line.split(": ")[1] for line in said] == ["id", "tags", "evaluation.module", "line 1"]


def test_local_validation_uses_the_environments_of_this_machine(
    tmp_path: Path, task_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = tmp_path / "env_images"
    (catalog / "math").mkdir(parents=True)
    (tmp_path / "tasks" / "math").mkdir(parents=True)
    shutil.copy(ROOT / "env_images" / "math" / "environment.toml", catalog / "math")
    monkeypatch.setenv("GATEWAY_CATALOG_DIR", str(catalog))
    other = tmp_path / "b.json"
    other.write_text('[{"id": "b", "env_type": "os"}, {"id": "c", "evaluation": {"script": "true"}}]')

    assert run("validate", "--local", task_file).exit_code == 0
    said = refusal("validate", "--local", "-e", "math", other)

    assert f"{other}: [0]: env_type: no environment 'os' is available" in said
    assert f"{other}: [1]: evaluation.script: scripts are only for" in said


def test_a_task_is_signed_and_verified_and_a_changed_bundle_is_refused(tmp_path: Path, task_file: Path) -> None:
    key, bundle = tmp_path / "lab", tmp_path / "bundle.json"

    assert run("keygen", key).exit_code == 0
    assert run("sign", task_file, "--key", key, "-o", bundle).exit_code == 0
    done = run("verify", bundle, "--keys", tmp_path)

    assert done.exit_code == 0, done.output
    assert "1 task, signed with the key" in done.output
    assert run("validate", bundle).exit_code == 0
    bundle.write_text(bundle.read_text().replace("6 times 7", "6 times 8"))
    assert "is not what the key" in refusal("verify", bundle, "--keys", tmp_path)


def test_a_bundle_names_when_and_where_it_may_be_used(tmp_path: Path) -> None:
    key, path, bundle = tmp_path / "lab", tmp_path / "a.json", tmp_path / "bundle.json"
    path.write_text('{"id": "a", "instruction": "go"}')
    run("keygen", key)

    done = run(
        *("sign", path, "--key", key, "-o", bundle),
        *("--valid-for", "7", "--instance", "lab-1", "-e", "math", "-s", "train"),
    )
    said = run("verify", bundle, "--keys", tmp_path).output

    assert done.exit_code == 0, done.output
    signed = json.loads(bundle.read_text())
    times = [datetime.fromisoformat(signed[name]) for name in ("made_at", "expires")]
    assert times[1] - times[0] == timedelta(days=7)
    assert (signed["instance"], signed["environment"], signed["split"]) == ("lab-1", "math", "train")
    for part in ("lab-1", "math", "train", signed["made_at"], signed["expires"]):
        assert part in said
    assert run("validate", bundle).exit_code == 0


def test_an_expired_bundle_is_not_verified(tmp_path: Path, task_file: Path) -> None:
    bundle = tmp_path / "bundle.json"
    run("keygen", tmp_path / "lab")
    key = read_private(tmp_path / "lab")
    bundle.write_text(json.dumps(sign([{"id": "a"}], key, made_at=datetime(2020, 1, 1, tzinfo=UTC))))

    assert "expired at 2020-01-31" in refusal("verify", bundle, "--keys", tmp_path)


@pytest.mark.parametrize(
    ("task", "options", "reason"),
    [
        ('{"id": "a"}', (), "env_type: "),
        ('{"env_type": "math"}', (), "id: "),
        ('{"id": "a"}', ("-e", "math", "-s", "../x"), "split: "),
        ('{"id": "a"}', ("-e", "a b"), "env_type: "),
    ],
)
def test_a_bundle_that_no_gateway_could_add_is_not_signed(
    tmp_path: Path, task: str, options: tuple[str, ...], reason: str
) -> None:
    key, path = tmp_path / "lab", tmp_path / "a.json"
    run("keygen", key)
    path.write_text(task)

    assert reason in refusal("sign", path, "--key", key, "-o", tmp_path / "bundle.json", *options)
    assert not (tmp_path / "bundle.json").exists()


def test_an_invalid_task_is_not_signed(tmp_path: Path) -> None:
    key, path = tmp_path / "lab", tmp_path / "a.json"
    run("keygen", key)
    path.write_text('{"id": 3}')

    assert "id: " in refusal("sign", path, "--key", key, "-o", tmp_path / "bundle.json")
    assert not (tmp_path / "bundle.json").exists()


def test_the_error_for_an_unreachable_gateway_names_its_url(task_file: Path) -> None:
    for arguments in (("add", task_file), ("list",), ("remove", "math", "a"), ("validate", task_file)):
        done = run(*arguments, "--url", "http://127.0.0.1:1")

        assert done.exit_code == 1
        assert "http://127.0.0.1:1: " in done.output
        assert "Traceback" not in done.output


def test_the_schema_is_printed(tmp_path: Path) -> None:
    path = tmp_path / "schema.json"
    path.write_text("an older one")

    assert run("schema", "-o", path).exit_code == 0

    assert json.loads(path.read_text())["title"] == "Task"
