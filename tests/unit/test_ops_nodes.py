"""The operators' routes for machines, and the settings that name them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from gateway.adapters import make_nodes
from gateway.core.errors import BackendError, ConfigError
from gateway.frontends.admin.nodes import NodeRoutes
from gateway.node.tls import make_certificates
from gateway.settings import Settings


class Machines:
    """Two machines; the second one does not answer."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = [{"id": "n1", "draining": False}, {"id": "n2", "draining": False}]

    async def drain(self, id: str, is_draining: bool) -> None:
        if id == "n2":
            raise BackendError("node n2 does not answer")
        self.rows[0]["draining"] = is_draining


@pytest.fixture
def machines() -> Machines:
    return Machines()


@pytest.fixture
async def client(machines: Machines) -> AsyncIterator[httpx.AsyncClient]:
    routes = NodeRoutes(rows=lambda: machines.rows, drain=machines.drain).routes()
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as made:
        yield made


async def test_machines_are_listed(client: httpx.AsyncClient, machines: Machines) -> None:
    assert (await client.get("/admin/v1/nodes")).json() == {"nodes": machines.rows}


async def test_a_gateway_of_one_machine_lists_none() -> None:
    routes = NodeRoutes(rows=list, drain=Machines().drain).routes()
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/admin/v1/nodes")).json() == {"nodes": []}


async def test_a_machine_is_drained_and_taken_back(client: httpx.AsyncClient) -> None:
    drained = await client.put("/admin/v1/nodes/n1", json={"draining": True})
    back = await client.put("/admin/v1/nodes/n1", json={"draining": False})

    assert (drained.status_code, drained.json()) == (200, {"id": "n1", "draining": True})
    assert (back.status_code, back.json()) == (200, {"id": "n1", "draining": False})


@pytest.mark.parametrize(
    ("id", "body", "status", "code"),
    [
        ("n9", b'{"draining": true}', 404, "unknown_node"),
        ("n2", b'{"draining": true}', 503, "backend"),
        ("n1", b"", 400, "invalid_request"),
        ("n1", b"true", 400, "invalid_request"),
        ("n1", b'{"draining": 1}', 400, "invalid_request"),
        ("n1", b'{"draining": true, "more": 1}', 400, "invalid_request"),
        ("n1", b" " * 5000, 413, "too_large"),
    ],
)
async def test_a_wrong_wish_changes_nothing_and_is_told_why(
    client: httpx.AsyncClient, machines: Machines, id: str, body: bytes, status: int, code: str
) -> None:
    answer = await client.put(f"/admin/v1/nodes/{id}", content=body)

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert machines.rows[0]["draining"] is False


# -- settings


def test_nodes_are_named_with_commas() -> None:
    assert Settings(nodes="a:7000, b").nodes == ("a:7000", "b")  # type: ignore[arg-type]  # as a variable has it


def test_a_cluster_needs_its_certificates_and_nodes(tmp_path: Path) -> None:
    files: dict[str, Any] = {f"cluster_{name}": tmp_path / name for name in ("ca", "cert", "key")}

    with pytest.raises(ConfigError, match="GATEWAY_CLUSTER_CA"):
        Settings(backend="swarm", nodes=("a",)).checked()
    with pytest.raises(ConfigError, match="GATEWAY_CLUSTER_CA"):
        Settings(backend="swarm", nodes=("a",), **(files | {"cluster_key": None})).checked()
    with pytest.raises(ConfigError, match="GATEWAY_NODES"):
        Settings(backend="swarm", **files).checked()
    assert Settings(backend="swarm", nodes=("a",), **files).checked().uses_containers


def test_of_another_backend_there_are_no_nodes() -> None:
    assert make_nodes(Settings(backend="docker", nodes=("a",))) is None


def test_a_host_that_is_none_stops_the_start(tmp_path: Path) -> None:
    make_certificates(tmp_path / "tls", days=1)
    settings = Settings(
        backend="swarm",
        nodes=("a:b",),
        cluster_ca=tmp_path / "tls" / "ca.pem",
        cluster_cert=tmp_path / "tls" / "gateway.pem",
        cluster_key=tmp_path / "tls" / "gateway-key.pem",
    )

    with pytest.raises(ConfigError, match="'a:b' is not of the form HOST"):
        make_nodes(settings)
