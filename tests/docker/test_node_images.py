"""Images between machines, with a real engine on both sides: one node saves an image, another one loads it."""

from __future__ import annotations

import io
import json
import secrets
import tarfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
from docker.errors import ImageNotFound

from gateway.core.environment import Environment
from gateway.core.placement import VOUCHER_HEADER
from gateway.node.cluster import Cluster
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.vouchers import Vouchers
from tests.contract.backend_world import ENGINE_URL, fake_environment
from tests.deadlines import HANG_S
from tests.fakes.certificates import cluster
from tests.fakes.images import built_once

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

IMAGE_MAX_BYTES = 2**31


@pytest.fixture
def image(docker_engine: docker.APIClient) -> Iterator[str]:
    """An image of two small layers, in which nothing runs. Its name is unique to this test."""
    tag = f"env-gateway-tests/travels-{secrets.token_hex(4)}:1"
    lines = b"FROM scratch\nCOPY first /\nCOPY second /\n"
    files = {"Dockerfile": lines, "first": b"the same in all\n", "second": tag.encode()}
    yield built_once(docker_engine, tag, files)
    for name in (tag, tag.replace(":1", ":2")):
        remove(docker_engine, name)


def remove(engine: docker.APIClient, name: str) -> None:
    with suppress(ImageNotFound):
        engine.remove_image(name, force=True)


def id_of(engine: docker.APIClient, name: str) -> str:
    found: str = engine.inspect_image(name)["Id"]  # type: ignore[no-untyped-call]  # no stubs
    return found


@asynccontextmanager
async def node(
    environment: Environment, instance: str, folder: Path, vouchers: Vouchers
) -> AsyncIterator[httpx.AsyncClient]:
    rules = Rules.of([environment], instance=instance, socket_root=str(folder / "sockets"))
    gate = Gate(engine=ENGINE_URL, rules=rules)
    app = Cluster(gate, engine=ENGINE_URL, vouchers=vouchers, state=folder / "state", image_max_bytes=IMAGE_MAX_BYTES)
    app.check()
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://node", timeout=HANG_S, trust_env=False
    ) as client:
        yield client
    await app.aclose()
    await gate.aclose()


async def pieces(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 2**20):
        yield data[start : start + 2**20]


async def bring(client: httpx.AsyncClient, reference: str, id: str, data: bytes, *, voucher: str) -> httpx.Response:
    """Send an image to a node, as a gateway does with the voucher of the node that saved it."""
    return await client.put(
        f"/env-gateway/images/{reference}",
        params={"id": id},
        content=pieces(data),
        headers={VOUCHER_HEADER: voucher},
    )


@pytest.fixture(scope="module")
def vouchers(tmp_path_factory: pytest.TempPathFactory) -> Vouchers:
    """The vouchers of all nodes: they have the same certificate."""
    _, own = cluster(tmp_path_factory.mktemp("certificates"))
    return Vouchers(own.ca, own.cert, own.key)


async def test_an_image_that_one_node_saved_is_loaded_by_another(
    docker_engine: docker.APIClient, image: str, instance: str, tmp_path: Path, vouchers: Vouchers
) -> None:
    async with node(fake_environment(image), instance, tmp_path, vouchers) as client:
        id = id_of(docker_engine, image)
        before: dict[str, Any] = (await client.get("/env-gateway/node")).json()
        saved = await client.get(f"/env-gateway/images/{image}")
        assert saved.status_code == 200
        remove(docker_engine, image)

        response = await bring(client, image, id, saved.content, voucher=saved.headers[VOUCHER_HEADER])

        assert (response.status_code, response.json()) == (200, {"id": id})
        assert id_of(docker_engine, image) == id
        after: dict[str, Any] = (await client.get("/env-gateway/node")).json()
    assert before["images"] == after["images"] == {image: id}
    assert before["built_at"] == after["built_at"]
    assert after["built_at"][image] > 1.6e9
    assert len(after["id"]) == 16
    assert after["memory_bytes"] > after["available_bytes"] > 0
    assert after["cpus"] >= 1
    assert after["workers"] == {}
    assert list((tmp_path / "state").iterdir()) == []


async def test_an_image_cannot_be_loaded_under_another_images_name(
    docker_engine: docker.APIClient, image: str, instance: str, tmp_path: Path, vouchers: Vouchers
) -> None:
    other = image.replace(":1", ":2")
    async with node(fake_environment(image), instance, tmp_path, vouchers) as client:
        id = id_of(docker_engine, image)
        saved = (await client.get(f"/env-gateway/images/{image}")).content
        docker_engine.tag(image, other.partition(":")[0], "2")
    async with node(fake_environment(other), instance, tmp_path, vouchers) as client:
        remove(docker_engine, other)

        response = await bring(client, other, id, saved, voucher=vouchers.issue(other, id))

        assert response.status_code == 403
        assert "the image's names are" in response.json()["message"]
        assert (await client.get("/env-gateway/node")).json()["images"] == {}
    assert id_of(docker_engine, image) == id


async def test_an_image_with_a_changed_layer_is_refused_by_the_engine(
    docker_engine: docker.APIClient, image: str, instance: str, tmp_path: Path, vouchers: Vouchers
) -> None:
    async with node(fake_environment(image), instance, tmp_path, vouchers) as client:
        id = id_of(docker_engine, image)
        saved = (await client.get(f"/env-gateway/images/{image}")).content
        remove(docker_engine, image)

        response = await bring(client, image, id, with_another_layer(saved), voucher=vouchers.issue(image, id))

        assert response.status_code == 502
        assert "the engine refuses" in response.json()["message"]
        assert (await client.get("/env-gateway/node")).json()["images"] == {}


def with_another_layer(data: bytes) -> bytes:
    """Return the tar with a different last layer."""
    changed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(data)) as before, tarfile.open(fileobj=changed, mode="w") as after:
        file = before.extractfile("manifest.json")
        assert file is not None
        last = json.loads(file.read())[0]["Layers"][-1]
        evil = io.BytesIO()
        with tarfile.open(fileobj=evil, mode="w") as layer:
            layer.addfile(tarfile.TarInfo("evil"))
        for member in before.getmembers():
            if member.name == last:
                member = tarfile.TarInfo(last)
                member.size = len(evil.getvalue())
                after.addfile(member, io.BytesIO(evil.getvalue()))
            else:
                after.addfile(member, before.extractfile(member) if member.isreg() else None)
    return changed.getvalue()
