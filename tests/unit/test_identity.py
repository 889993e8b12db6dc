"""The identity of a gateway: its replicas share it, and it survives a store that lost its data."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.adapters import identify, new_identity
from gateway.settings import Settings
from gateway.stores.memory.curricula import MemoryCurriculumStore


async def test_replicas_that_start_together_agree_on_one_identity() -> None:
    store = MemoryCurriculumStore()

    found = await asyncio.gather(*(identify(store, f"replica-{number}") for number in range(5)))

    assert len(set(found)) == 1
    assert await identify(store, "later") == found[0]


async def test_a_replica_restores_the_identity_to_a_store_that_lost_its_data() -> None:
    emptied = MemoryCurriculumStore()

    assert await identify(emptied, "known") == "known"
    assert await identify(emptied, "of a new replica") == "known"


def test_without_a_shared_store_the_identity_is_that_of_folder_instance_and_port(tmp_path: Path) -> None:
    def identity(folder: str = "a", instance: str = "one", port: int = 8080, store: str = "memory") -> str:
        return new_identity(Settings(state_dir=tmp_path / folder, instance=instance, store=store), port)

    assert identity() == identity()
    assert len({identity(), identity("b"), identity(instance="two"), identity(port=9000)}) == 4
    assert identity(store="redis://127.0.0.1/0") != identity(store="redis://127.0.0.1/0")
