"""The texts of the Lua operations: each documents its arguments and result, and none searches for keys."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gateway.stores.redis.sessions as store
from gateway.stores.redis.client import SHARED, scripts

LUA = Path(store.__file__).parent / "lua"
OPERATIONS = sorted(path.stem for path in LUA.glob("*.lua"))
FAMILIES = sorted(path.name for path in LUA.iterdir() if path.is_dir() and path.name != "shared")


def test_every_file_is_an_operation_that_starts_with_the_shared_code() -> None:
    loaded = scripts()

    assert sorted(loaded) == OPERATIONS
    assert sorted(SHARED) == sorted(path.stem for path in (LUA / "shared").glob("*.lua"))
    shared = b"\n".join((LUA / "shared" / f"{name}.lua").read_bytes() for name in SHARED)
    assert all(script.text.startswith(shared) for script in loaded.values())
    assert len({script.sha for script in loaded.values()}) == len(loaded)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_operation_of_a_family_starts_with_the_familys_prelude(family: str) -> None:
    loaded = scripts(family)

    assert sorted(loaded) == sorted(path.stem for path in (LUA / family).glob("*.lua") if path.stem != "prelude")
    base, own = (LUA / "shared" / "base.lua").read_bytes(), (LUA / family / "prelude.lua").read_bytes()
    assert all(script.text.startswith(base + b"\n" + own) for script in loaded.values())


def test_every_operation_is_used_and_every_used_operation_exists() -> None:
    folder = Path(store.__file__).parent
    source = "".join((folder / name).read_text() for name in ("sessions.py", "claims.py"))

    used = re.findall(r'(?:_run|_link\.run|_link\.run_in_batches|_link\.begin)\(\s*"([a-z_]+)"', source)

    assert sorted(set(used)) == OPERATIONS


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_head_of_an_operation_documents_its_arguments_and_result(name: str) -> None:
    text = (LUA / f"{name}.lua").read_text()

    head = text.split("\n\n")[0]
    assert all(line.startswith("-- ") for line in head.splitlines())
    assert "-- Returns " in head
    assert ("-- ARGV: " in head) == ("ARGV" in text.split("\n\n", 1)[1])


@pytest.mark.parametrize("name", [*(f"shared/{name}" for name in SHARED), *OPERATIONS])
def test_no_operation_searches_for_keys_or_has_global_functions(name: str) -> None:
    text = (LUA / f"{name}.lua").read_text()

    assert not re.search(r"""call\(\s*['"](KEYS|SCAN|RANDOMKEY|FLUSH)""", text, re.IGNORECASE)
    # Redis itself refuses other globals at run time, and the contract suite runs every operation.
    assert not re.search(r"^\s*function ", text, re.MULTILINE)
