"""The operator's list of image ids: its format, its changes, and the command that writes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from gateway.core.errors import BackendError
from gateway.node.image_ids import ImageIds, image_lines
from gateway.node.routes import GateRefusal
from tests.fakes.engine import FakeEngine

OURS, PINNED = "env-gateway/fake", f"registry.example/x@sha256:{'c' * 64}"
ONE, OTHER = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ids"


@pytest.fixture
def ids(path: Path) -> ImageIds:
    return ImageIds(path)


def refusal(ids: ImageIds, reference: str = OURS, id: str = ONE) -> str:
    with pytest.raises(GateRefusal) as refused:
        ids.check(reference, id)
    return str(refused.value)


def test_only_a_listed_id_of_the_reference_is_accepted(path: Path, ids: ImageIds) -> None:
    path.write_text(f"# of the lab\n\n{OURS} {ONE}  # built on m1\n\t{PINNED}\t{OTHER}\r\n")

    ids.check(OURS, ONE)
    ids.check(PINNED, OTHER)
    ids.check(OURS)
    said = refusal(ids, id=OTHER)

    assert f"{path} lists {ONE} (line 3) for {OURS}, and not {OTHER}" in said
    assert "gateway node images" in said
    assert "lists nothing for env-gateway/os" in refusal(ids, "env-gateway/os", ONE)
    assert "lists nothing" in refusal(ids, "env-gateway/os", "")
    assert "lists nothing" in refusal(ids, PINNED.replace("c", "d"), OTHER)


def test_a_reference_may_have_several_ids_for_an_update(path: Path, ids: ImageIds) -> None:
    path.write_text(f"{OURS} {ONE}\n{OURS} {OTHER}\n")

    ids.check(OURS, ONE)
    ids.check(OURS, OTHER)
    assert f"{ONE} (line 1), {OTHER} (line 2)" in refusal(ids, id=ONE.replace("a", "c"))


@pytest.mark.parametrize("listed", [OURS, f"{OURS}:latest", f"docker.io/{OURS}"])
@pytest.mark.parametrize("named", [OURS, f"{OURS}:latest"])
def test_the_spellings_of_one_reference_are_one(path: Path, ids: ImageIds, listed: str, named: str) -> None:
    path.write_text(f"{listed} {ONE}\n")

    ids.check(named, ONE)
    refusal(ids, f"{OURS}:other", ONE)


def test_a_changed_file_counts_at_the_next_check(path: Path, ids: ImageIds) -> None:
    path.write_text(f"{OURS} {ONE}\n")
    ids.check(OURS, ONE)

    path.write_text(f"{OURS} {OTHER}\n")

    ids.check(OURS, OTHER)
    refusal(ids, id=ONE)
    path.unlink()
    assert f"GATEWAY_NODE_IMAGE_IDS={path}: no image is accepted: No such file" in refusal(ids, id=OTHER)


@pytest.mark.parametrize(
    "line",
    [
        OURS,
        ONE,
        f"{OURS} {ONE[:-1]}",
        f"{OURS} {ONE}0",
        f"{OURS} {ONE.upper()}",
        f"{OURS} {ONE.removeprefix('sha256:')}",
        f"{OURS} {ONE} {OTHER}",
        f"{OURS}# {ONE}",
        f"{OURS}={ONE}",
    ],
)
def test_one_invalid_line_refuses_all_images_with_its_number(path: Path, ids: ImageIds, line: str) -> None:
    path.write_text(f"{OURS} {ONE}\n# a comment\n{line}\n")

    said = refusal(ids)

    assert f"{path}, line 3: no image is accepted" in said
    assert line.partition("#")[0].strip()[:60] in said


def test_a_file_that_is_no_text_refuses_all_images(path: Path, ids: ImageIds) -> None:
    path.write_bytes(f"{OURS} {ONE}\n".encode() + b"\xff\n")

    assert "no image is accepted" in refusal(ids)
    path.unlink()
    path.mkdir()
    assert "no image is accepted" in refusal(ids)


# -- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with tempfile.TemporaryDirectory(prefix="eg-") as folder, FakeEngine(Path(folder) / "engine.sock") as running:
        yield running


def test_the_command_prints_what_the_file_needs(
    engine: FakeEngine, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, image in (("fake", OURS), ("far", "registry.example/far:1")):
        (tmp_path / "catalog" / name).mkdir(parents=True)
        (tmp_path / "catalog" / name / "environment.toml").write_text(
            f'name = "{name}"\nimage = "{image}"\ncommand = ["x"]\n'
        )
    monkeypatch.setenv("GATEWAY_CATALOG_DIR", str(tmp_path / "catalog"))
    monkeypatch.setenv("GATEWAY_NODE_ENGINE", engine.url)

    done = CliRunner().invoke(app, ["node", "images"])

    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines() == [
        f"{OURS} {engine.image_id(OURS)}",
        "# registry.example/far:1: not on this machine",
    ]
    path.write_text(done.stdout)
    ImageIds(path).check(OURS, engine.image_id(OURS))


async def test_an_engine_that_does_not_answer_or_refuses_is_reported(engine: FakeEngine, tmp_path: Path) -> None:
    engine.refuse("GET image", 500, "out of order")

    with pytest.raises(BackendError, match="out of order"):
        await image_lines(engine.url, [OURS])
    with pytest.raises(BackendError, match="does not answer"):
        await image_lines(f"unix://{tmp_path}/none.sock", [OURS])
