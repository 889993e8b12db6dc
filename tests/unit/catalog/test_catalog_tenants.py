"""Workers of their own for each key, and catalogs that show a key only its environments."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.catalog.catalog import Catalog
from gateway.catalog.toml import read_environment
from gateway.core.environment import Environment, tenant_tag
from gateway.core.errors import ConfigError, NotPermitted, UnknownEnvironment
from gateway.core.ids import Owner

ALICE, BOB = Owner("alice"), Owner("bob")
SEPARATE = '[pool]\nslots = 4\nmin_workers = 1\nwarm = 2\ntenants = "separate"\n'


def read(folder: Path, name: str, more: str = "") -> Environment:
    path = folder / name / "environment.toml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'name = "{name}"\nimage = "env-{name}"\n{more}')
    return read_environment(path)


def names(catalog: Catalog) -> list[str]:
    return sorted(one.name for one in catalog.all())


def test_each_key_has_variants_of_a_separate_environment_and_of_its_splits(tmp_path: Path) -> None:
    catalog = Catalog([read(tmp_path, "os", SEPARATE + "[splits.hard]\ncpus = 2\n"), read(tmp_path, "math")])

    catalog.set_tenants({ALICE: (), BOB: ("math",)})

    assert names(catalog) == ["math", "os", "os.hard", "os.hard@alice", "os@alice"]
    assert [one.name for one in catalog] == ["os", "math"], "trainers cannot name a variant"
    with pytest.raises(UnknownEnvironment):
        catalog.wanted("os@alice")
    hers = catalog.offered["os"].tenants[ALICE]
    assert (hers.base, hers.worker_name, hers.limits) == ("os", "os", catalog.offered["os"].limits)
    assert hers.digest() != catalog.offered["os"].digest()
    assert catalog.named("os.hard@alice").base == "os"
    assert catalog.named("os.hard@alice").limits.cpus == 2


def test_the_shared_workers_of_a_separate_environment_are_not_kept_ready(tmp_path: Path) -> None:
    catalog = Catalog([read(tmp_path, "os", SEPARATE)])
    alone = {one.name: (one.pool.min_workers, one.pool.warm) for one in catalog.all()}

    catalog.set_tenants({ALICE: ()})

    assert alone == {"os": (1, 2)}, "a gateway without keys has only these"
    kept = {one.name: (one.pool.min_workers, one.pool.warm) for one in catalog.all()}
    assert kept == {"os": (0, 0), "os@alice": (1, 2)}


def test_variants_follow_their_environment_and_the_keys(tmp_path: Path) -> None:
    catalog = Catalog([read(tmp_path, "os", SEPARATE), read(tmp_path, "math")])
    catalog.set_tenants({ALICE: (), BOB: ()})

    catalog.replace(read(tmp_path, "os", SEPARATE.replace("slots = 4", "slots = 8")))
    changed = catalog.named("os@bob").pool.slots
    catalog.set_tenants({ALICE: ()})
    revoked = catalog.named("os@bob").pool
    catalog.replace(read(tmp_path, "os"))

    assert changed == 8
    assert (revoked.min_workers, revoked.warm, revoked.idle_worker_s) == (0, 0, 0.0), "its sessions may still run"
    assert not catalog.offered["os"].tenants
    assert catalog.named("os@alice").pool.idle_worker_s == 0.0


def test_tags_of_keys_are_distinct_and_fit_a_label() -> None:
    owners = ["alice", "Alice", "a b", "k.0", "ä", "x" * 40, "", "a/b", "a@b"]

    tags = [tenant_tag(Owner(owner)) for owner in owners]

    assert len(set(tags)) == len(owners)
    assert tags[0] == "alice"
    assert all(tag.startswith("k.") for tag in tags[1:])
    assert all(tag.isascii() and not set(tag) & set(":@/ ") for tag in tags)


def test_a_server_that_runs_elsewhere_cannot_be_separate(tmp_path: Path) -> None:
    server = 'protocol = "openenv"\n[server]\nurl = "http://127.0.0.1:1"\n[pool]\ntenants = "separate"\n'
    (tmp_path / "far").mkdir()
    path = tmp_path / "far" / "environment.toml"
    path.write_text(f'name = "far"\n{server}')

    with pytest.raises(ConfigError, match=r"pool.tenants: all keys share a server at \[server\] url"):
        read_environment(path)


# -- allowed environments -------------------------------------------------------------------------------------------


def test_a_part_of_the_catalog_shows_only_the_allowed_environments(tmp_path: Path) -> None:
    catalog = Catalog([read(tmp_path, name) for name in ("os", "math", "game")])

    part = catalog.part(("math", "game", "gone"))

    assert [one.name for one in part] == ["math", "game"]
    assert part.default.name == "math"
    assert "this key may use only math, game, gone" in part.unknown("os").detail
    assert "there are math, game" in part.unknown("maths").detail
    assert catalog.part(("math", "game", "gone")) is part, "made once"


def test_a_part_follows_changes_of_the_catalog(tmp_path: Path) -> None:
    catalog = Catalog([read(tmp_path, name) for name in ("os", "math")])
    catalog.part(("math",))

    catalog.replace(read(tmp_path, "math", "[pool]\nslots = 7\n"))
    slots = catalog.part(("math",)).offered["math"].pool.slots
    catalog.withdraw("math")

    assert slots == 7
    with pytest.raises(NotPermitted, match="may use only math, and none of these is available"):
        catalog.part(("math",))
