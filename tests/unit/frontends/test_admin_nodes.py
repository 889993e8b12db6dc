"""The admin routes for the machines of a cluster, and the settings that name these machines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette

from gateway.adapters import make_nodes
from gateway.backends.swarm.backend import SwarmBackend
from gateway.backends.swarm.nodes import NodeState, NodeView
from gateway.backends.swarm.reports import Endpoint
from gateway.core.errors import BackendError, ConfigError
from gateway.core.ids import Owner
from gateway.core.placement import NodeId, NodeReport
from gateway.frontends.admin.nodes import NodeRoutes, node_rows
from gateway.frontends.admin.replies import ERRORS
from gateway.frontends.dashboard.rendering import render
from gateway.frontends.dashboard.sign_in import Viewer
from gateway.node.tls import make_certificates
from gateway.settings import Settings

N1, N2 = NodeId("n1"), NodeId("n2")


class Machines:
    """A cluster of two machines, of which the second does not answer."""

    def __init__(self) -> None:
        self.is_draining = False

    def nodes(self) -> list[NodeView]:
        report = NodeReport(
            id=N1,
            name="one",
            cpus=2,
            memory_bytes=2**30,
            available_bytes=2**29,
            max_containers=10,
            is_draining=self.is_draining,
        )
        return [
            NodeView(id=N1, state=NodeState.LIVE, report=report, endpoint=Endpoint("10.0.0.1", 7443), silent_s=0.1),
            NodeView(id=N2, state=NodeState.SILENT, report=None, endpoint=None, silent_s=3.0),
        ]

    async def drain(self, id: NodeId, is_draining: bool) -> None:
        if id == N2:
            raise BackendError("node n2 does not answer")
        self.is_draining = is_draining


@pytest.fixture
def machines() -> Machines:
    return Machines()


@pytest.fixture
async def client(machines: Machines) -> AsyncIterator[httpx.AsyncClient]:
    routes = NodeRoutes(cast(SwarmBackend, machines)).routes()
    transport = httpx.ASGITransport(Starlette(routes=routes, exception_handlers=ERRORS))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as made:
        yield made


async def test_machines_are_listed(client: httpx.AsyncClient, machines: Machines) -> None:
    listed = (await client.get("/admin/v1/nodes")).json()["nodes"]

    assert [(row["id"], row["name"], row["state"], row["address"]) for row in listed] == [
        ("n1", "one", "live", "10.0.0.1:7443"),
        ("n2", "n2", "silent", ""),
    ]
    assert (listed[0]["draining"], listed[0]["max_containers"]) == (False, 10)


def test_the_dashboard_shows_machines_with_what_an_operator_may_do(machines: Machines) -> None:
    def rows() -> dict[str, str]:
        nothing: dict[str, Any] = {"environments": [], "failures": [], "unexpected_errors": []}
        found = nothing | {"nodes": node_rows(cast(SwarmBackend, machines))}
        page = render("now.html", viewer=Viewer(Owner("boss"), True), page=found, path="/dashboard/now", query="")
        _, live, silent = page.partition('id="nodes"')[2].partition("</table>")[0].split("<tr>")[1:]
        return {"live": live, "silent": silent}

    before = rows()
    machines.is_draining = True
    after = rows()

    assert all(
        text in before["live"] for text in ("<td>live</td>", "0/10", "0.5 GiB", '{"draining": true}', "/nodes/n1")
    )
    assert "silent for 3 s" in before["silent"]
    assert "<button" not in before["silent"]
    assert all(text in after["live"] for text in ("<td>live, draining</td>", '{"draining": false}'))


async def test_a_gateway_without_a_cluster_lists_no_machines() -> None:
    routes = NodeRoutes(None).routes()
    transport = httpx.ASGITransport(Starlette(routes=routes, exception_handlers=ERRORS))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/admin/v1/nodes")).json() == {"nodes": []}


async def test_a_machine_is_drained_and_put_back_into_service(client: httpx.AsyncClient) -> None:
    drained = await client.put("/admin/v1/nodes/n1", json={"draining": True})
    back = await client.put("/admin/v1/nodes/n1", json={"draining": False})

    assert (drained.status_code, drained.json()["draining"]) == (200, True)
    assert (back.status_code, back.json()["draining"]) == (200, False)


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
async def test_an_invalid_drain_request_changes_nothing_and_its_answer_has_a_code(
    client: httpx.AsyncClient, machines: Machines, id: str, body: bytes, status: int, code: str
) -> None:
    answer = await client.put(f"/admin/v1/nodes/{id}", content=body, headers={"content-type": "application/json"})

    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert machines.is_draining is False


# -- settings


def test_nodes_are_a_list_separated_by_commas() -> None:
    assert Settings(nodes="a:7000, b").nodes == ("a:7000", "b")  # type: ignore[arg-type]  # the text of the environment variable


def test_a_cluster_needs_its_certificates_and_nodes(tmp_path: Path) -> None:
    files: dict[str, Any] = {f"cluster_{name}": tmp_path / name for name in ("ca", "cert", "key")}

    with pytest.raises(ConfigError, match="GATEWAY_CLUSTER_CA"):
        Settings(backend="swarm", nodes=("a",)).checked()
    with pytest.raises(ConfigError, match="GATEWAY_CLUSTER_CA"):
        Settings(backend="swarm", nodes=("a",), **(files | {"cluster_key": None})).checked()
    with pytest.raises(ConfigError, match="GATEWAY_NODES"):
        Settings(backend="swarm", **files).checked()
    assert Settings(backend="swarm", nodes=("a",), **files).checked().uses_containers


def test_only_the_swarm_backend_has_nodes() -> None:
    assert make_nodes(Settings(backend="docker", nodes=("a",))) is None


def test_an_invalid_host_stops_the_start(tmp_path: Path) -> None:
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
