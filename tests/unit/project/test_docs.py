"""docs/reference.md names everything that an operator may meet, and commands on pages exist and are run."""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, run
from typing import Any

import pytest
import typer.main

from gateway.cli.main import app
from gateway.core.errors import GatewayError
from gateway.core.routes import ORS_OPERATIONS, ORS_ROUTES, RESERVED
from gateway.metrics import Metrics
from tests.pages import PAGES, PROJECT, Block, blocks
from tests.runner.__main__ import number_of_tasks

REFERENCE = (PROJECT / "docs" / "reference.md").read_text()
ENVIRONMENTS = (PROJECT / "docs" / "environments.md").read_text()
LEVELS = {"debug", "info", "warning", "error", "exception"}


def descendants(kind: type[GatewayError]) -> Iterator[type[GatewayError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from descendants(child)


def log_events() -> set[str]:
    """Return the first words of all log lines of the package."""
    found = set()
    for path in (PROJECT / "gateway").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="logger"), attr=level),
                    args=[ast.Constant(value=str(text)), *_],
                ) if level in LEVELS:
                    found.add(text.split()[0])
    return found


def test_the_table_of_settings_matches_the_docstrings_of_the_settings() -> None:
    done = run([sys.executable, PROJECT / "scripts" / "settings-table", "--check"], stderr=PIPE, text=True, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_every_module_that_a_design_page_names_exists() -> None:
    packages = {path.name for path in (PROJECT / "gateway").iterdir() if path.is_dir()}
    gone = [
        f"{page.name}: {named}"
        for page in (PROJECT / "ARCHITECTURE.md", *(PROJECT / "docs" / "design").glob("*.md"))
        for named in re.findall(r"`([a-z_]+(?:/[a-z_0-9]+)+)/?(?:\.[A-Za-z_.]+)?(?:\(.*\))?`", page.read_text())
        if named.partition("/")[0] in packages and not list((PROJECT / "gateway").glob(f"{named}*"))
    ]

    assert gone == []


@pytest.mark.parametrize("code", sorted({kind.code for kind in descendants(GatewayError)}))
def test_an_error_code_is_in_the_reference(code: str) -> None:
    assert f"`{code}`" in REFERENCE


def test_every_metric_is_in_the_reference() -> None:
    names = set(re.findall(r"^# TYPE (\S+)", Metrics().exposition().decode(), re.M))
    names = {name for name in names if not name.endswith("_created")}

    assert names
    assert {name for name in names if f"`{name}`" not in REFERENCE} == set()


def test_every_log_event_is_in_the_reference() -> None:
    events = log_events()

    assert len(events) > 20
    assert {event for event in events if f"`{event}`" not in REFERENCE} == set()


def test_every_reserved_name_is_in_the_docs() -> None:
    words = set(re.findall(r"[a-z0-9_.]+", ENVIRONMENTS))

    assert words >= RESERVED


@pytest.mark.parametrize("route", sorted(ORS_ROUTES - {"docs", "redoc", "openapi.json"} | ORS_OPERATIONS))
def test_an_ors_route_is_in_the_reference(route: str) -> None:
    assert f"/{route}`" in REFERENCE


@pytest.mark.parametrize("environment", ["math", "os", "coding", "game", "chat"])
def test_the_readme_states_the_actual_number_of_tasks(environment: str) -> None:
    told = re.search(rf"^\| `{environment}` \| ([\d,]+) ", (PROJECT / "README.md").read_text(), re.MULTILINE)

    assert told is not None
    assert int(told[1].replace(",", "")) == number_of_tasks(environment)


@pytest.mark.parametrize("environment", ["math", "game"])
def test_the_readme_states_the_areas_of_the_recorded_learning_curves(environment: str) -> None:
    summary = json.loads((PROJECT / "examples" / f"curriculum-{environment}.json").read_text())["summary"]
    areas = {row["sampler"]: f"{row['area']['mean']:.2f}" for row in summary}

    readme = " ".join((PROJECT / "README.md").read_text().split())

    told = rf"`{environment}` (.{{0,50}}of )?{areas['staged']} (.{{0,60}} )?instead of {areas['uniform']}\b"
    assert re.search(told, readme)


def test_no_page_puts_a_key_into_the_path_of_an_ors_sdk_url() -> None:
    """Both ORS SDKs drop the path of their base URL. Only AReaL and OpenEnv clients keep it."""
    text = "\n".join((PROJECT / page).read_text("utf-8") for page in PAGES)

    shown = re.findall(r"\b(?:Async)?(?:ORS|OpenReward)\([^)]*\)|\bbase_url ?=[^\n,)]*|OPENREWARD_\w*URL\S*", text)

    assert shown
    assert [one for one in shown if "/k/" in one and "/openenv/" not in one] == []


MARKDOWN = sorted(
    str(path.relative_to(PROJECT))
    for folder in (".", "bench", "clients", "deploy", "docs", "env_images", "examples", "tasks", "tests")
    for path in (PROJECT / folder).glob("*.md" if folder == "." else "**/*.md")
)


def headings(page: Path) -> set[str]:
    """Return the anchors that the headings of *page* create."""
    found = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", MARKDOWN)
def test_every_link_of_a_page_leads_to_an_existing_file_and_heading(page: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (PROJECT / page).read_text("utf-8"), flags=re.M | re.S)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        path, _, anchor = link.partition("#")
        target = (PROJECT / page).parent / path if path else PROJECT / page
        if "://" not in link and (not target.exists() or (anchor and anchor not in headings(target))):
            broken.append(link)

    assert broken == []


BLOCKS = [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_names_its_language_and_the_reason_if_it_is_not_run(block: Block) -> None:
    assert block.language, "a fence names its language: sh, python, json, toml, text, …"
    if block.note and not block.file:
        named = re.findall(r"\btests/[\w/.-]*\w", block.note)
        assert named or re.fullmatch(r"not run: .{10,}", block.note, re.S), block.note
        assert [path for path in named if not (PROJECT / path).exists()] == []


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command ``gateway …`` in *text*."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars=True)
        words.whitespace_split = True
        one: list[str] = []
        for word in [*words, ";"]:
            if word and set(word) <= set(";&|()<>"):
                if one[:1] == ["gateway"]:
                    yield one[1:]
                one = []
            else:
                one.append(word)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.language == "sh"], ids=str)
def test_a_command_on_a_page_exists_with_its_options(block: Block) -> None:
    for words in commands(block.text):
        command: Any = typer.main.get_command(app)
        context = command.make_context("gateway", [], resilient_parsing=True)
        left = list(words)
        while hasattr(command, "list_commands"):
            assert left, f"{words}: of which there are {', '.join(command.list_commands(context))}"
            assert left[0] in command.list_commands(context), words
            command = command.get_command(context, left.pop(0))
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in left if word.startswith("-")} - {"-"} <= options, words
