"""A node's service for the gateways of its cluster: its report and its images, over TLS, with a fake engine."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.backends.docker.container import LABEL_ENVIRONMENT, LABEL_INSTANCE, LABEL_ROLE, LABEL_WORKER
from gateway.backends.swarm.image_sync import ImageSync
from gateway.backends.swarm.nodes import Nodes
from gateway.core.addresses import NODE_LEAVES
from gateway.core.environment import Environment
from gateway.core.errors import BackendError, ConfigError
from gateway.core.ids import EnvironmentName
from gateway.core.placement import VOUCHER_HEADER, NodeReport
from gateway.node import image_transfers as transfers
from gateway.node.cluster import Cluster
from gateway.node.gate import Gate
from gateway.node.image_ids import ImageIds
from gateway.node.policy import Rules
from gateway.node.report import available_bytes, built_at
from gateway.node.serve import listen_address, run_node, serving_cluster
from gateway.node.tls import NODE_NAME, client_context, server_context
from gateway.node.tunnel import Tunnel
from gateway.node.vouchers import Vouchers
from gateway.settings import Settings
from tests.deadlines import HANG_S
from tests.fakes import engine as fakes
from tests.fakes.certificates import Files, cluster
from tests.fakes.engine import FakeContainer, FakeEngine, Hold, Refusal
from tests.fakes.eventually import eventually, until
from tests.fakes.image_tars import ImageTar, loaded
from tests.fakes.ports import reserved_port

OURS, FAR, PINNED = "env-gateway/fake", "registry.example/far:1", f"registry.example/pinned@sha256:{'a' * 64}"
DIGEST = f"sha256:{'d' * 64}"
Content = bytes | AsyncIterator[bytes]
IMAGE_MAX_BYTES = 200_000


class Engine(FakeEngine):
    """An engine that loads, saves and tags images."""

    def __init__(self, socket_path: Path) -> None:
        super().__init__(socket_path)
        self.info |= {"ID": "ABCD:EFGH", "Name": "machine-1"}
        self.created = "2024-05-06T07:08:09.123456789Z"
        self.loads: list[bytes] = []
        self.auth: str | None = None
        self.deaf = False
        """True if the engine accepts a tar without loading it."""
        self.ids: dict[str, str] = {}
        self.tar = b""
        """The tar of each image that it saves. Empty: a text with the image's name."""

    def __enter__(self) -> Engine:
        super().__enter__()
        assert self._server is not None
        self._server.RequestHandlerClass = _Handler
        return self

    def image_id(self, image: str) -> str:
        return self.ids.get(image) or super().image_id(image)


class _Handler(fakes._Handler):
    ROUTES = (  # type: ignore[assignment]  # more rows than in the table above
        ("POST", r"/images/load", "load"),
        ("GET", r"/images/(?P<reference>.+)/get", "save"),
        ("DELETE", r"/images/(?P<reference>.+)", "untag"),
        *fakes._Handler.ROUTES,
    )

    def _engine(self) -> Engine:
        found = self.server.engine
        assert isinstance(found, Engine)
        return found

    def _load(self) -> None:
        engine = self._engine()
        engine.loads.append(self.body)
        if not engine.deaf:
            tag, id, _ = loaded(self.body)
            reference = tag.removesuffix(":latest")
            engine.images.add(reference)
            engine.ids[reference] = id
        self._answer(200, raw=b'{"stream":"Loaded image"}\n')

    def _save(self, reference: str) -> None:
        tar = self._engine().tar or f"tar of {reference}".encode() * 5000
        self._answer(200, raw=tar, type="application/x-tar")

    def _image(self, reference: str) -> None:
        if reference not in self._engine().images:
            raise Refusal(404, f"No such image: {reference}")
        self._answer(200, {"Id": self._engine().image_id(reference), "Created": self._engine().created})

    def _untag(self, reference: str) -> None:
        self._engine().images.remove(reference)
        self._answer(200, [{"Untagged": reference}])

    def _pull(self) -> None:
        self._engine().auth = self.headers.get("x-registry-auth")
        super()._pull()


def environment(name: str, image: str) -> Environment:
    return Environment(
        name=EnvironmentName(name), image=image, directory=Path("/nowhere"), command=("python3", "server.py")
    )


CATALOG = (environment("fake", OURS), environment("far", FAR), environment("pinned", PINNED))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    return cluster(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
def engine(folder: Path) -> Iterator[Engine]:
    with Engine(folder / "engine.sock") as running:
        assert isinstance(running, Engine)
        yield running


class NodeClient(httpx.AsyncClient):
    """An HTTP client that expects a node's certificate at every address, and has vouchers of another node."""

    vouchers: Vouchers

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        request.extensions = {**request.extensions, "sni_hostname": NODE_NAME}
        return await super().send(request, **options)


def client_of(files: tuple[Files, Files], port: int) -> NodeClient:
    gateway, other = files
    tls = client_context(gateway.ca, gateway.cert, gateway.key)
    client = NodeClient(verify=tls, base_url=f"https://127.0.0.1:{port}", trust_env=False, timeout=HANG_S)
    client.vouchers = Vouchers(*astuple(other))
    return client


@asynccontextmanager
async def node(
    folder: Path, engine: Engine, files: tuple[Files, Files], *, drain_s: float = 1.0, ids: Path | None = None
) -> AsyncIterator[NodeClient]:
    _, own = files
    rules = Rules.of(CATALOG, instance="ours", socket_root=str(folder / "sockets"), max_containers=7)
    gate = Gate(engine=engine.url, rules=rules)
    vouchers = Vouchers(*astuple(own))
    app = Cluster(
        gate,
        engine=engine.url,
        vouchers=vouchers,
        state=folder / "state",
        image_max_bytes=IMAGE_MAX_BYTES,
        image_ids=ImageIds(ids) if ids is not None else None,
    )
    app.check()
    port, tls = reserved_port(count=2), server_context(own.ca, own.cert, own.key)
    relay = Tunnel(sockets=folder / "sockets", tls=tls)
    async with (
        serving_cluster(app, relay, host="127.0.0.1", port=port, tls=tls, drain_s=drain_s),
        client_of(files, port) as client,
    ):
        yield client
    await gate.aclose()
    await app.aclose()


@pytest.fixture
async def client(folder: Path, engine: Engine, files: tuple[Files, Files]) -> AsyncIterator[NodeClient]:
    async with node(folder, engine, files) as made:
        yield made


def container(engine: Engine, name: str, *, state: str = "running", **labels: str) -> None:
    own = {LABEL_INSTANCE: "ours", LABEL_WORKER: name, LABEL_ENVIRONMENT: "fake"} | labels
    id = hashlib.sha256(f"{name} {labels}".encode()).hexdigest()
    engine.containers[id] = FakeContainer(id, id[:12], {"Labels": own, "Image": OURS}, state=state)


async def reported(client: NodeClient) -> dict[str, Any]:
    response = await client.get("/env-gateway/node")
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


# -- the report


async def test_a_node_reports_its_machine_images_and_workers(client: NodeClient, engine: Engine) -> None:
    container(engine, "w1")
    container(engine, "paused", state="paused")
    container(engine, "dead", state="exited")
    container(engine, "theirs", **{LABEL_INSTANCE: "theirs"})

    found = await reported(client)

    available = found.pop("available_bytes")
    assert 0 < available < 2**50
    assert found == {
        "id": hashlib.sha256(b"ABCD:EFGH").hexdigest()[:16],
        "name": "machine-1",
        "cpus": 4.0,
        "memory_bytes": 2**33,
        "max_containers": 7,
        "containers": 3,
        "is_draining": False,
        "images": {OURS: engine.image_id(OURS)},
        "built_at": {OURS: pytest.approx(1714979289.123456)},
        "workers": {"w1": "fake", "paused": "fake"},
    }
    assert NodeReport(**found, available_bytes=available).id == found["id"]


async def test_a_worker_of_two_containers_runs_if_both_containers_run(client: NodeClient, engine: Engine) -> None:
    for worker, roles in {"both": ("server", "forwarder"), "s": ("server",), "f": ("forwarder",)}.items():
        for role in roles:
            container(engine, worker, **{LABEL_ROLE: role, LABEL_ENVIRONMENT: "far"})
    container(engine, "half", **{LABEL_ROLE: "server"})
    container(engine, "half", state="exited", **{LABEL_ROLE: "forwarder"})

    found = await reported(client)

    assert found["workers"] == {"both": "far"}
    assert found["containers"] == 6


async def test_each_report_needs_one_list_request_to_the_engine(client: NodeClient, engine: Engine) -> None:
    await reported(client)
    engine.requests.clear()

    await asyncio.gather(*(reported(client) for _ in range(10)))

    assert engine.requests == ["GET list"] * 10


async def test_a_draining_node_reports_it_and_still_drains_after_a_restart(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    async with node(folder, engine, files) as client:
        response = await client.put("/env-gateway/node/draining", content=b"true")
        assert (response.status_code, response.json()["is_draining"]) == (200, True)
    async with node(folder, engine, files) as client:
        assert (await reported(client))["is_draining"] is True
        response = await client.put("/env-gateway/node/draining", content=b" false\n")
        assert response.json()["is_draining"] is False
        assert (await client.put("/env-gateway/node/draining", content=b"false")).status_code == 200
    async with node(folder, engine, files) as client:
        assert (await reported(client))["is_draining"] is False


@pytest.mark.parametrize("body", [b"", b"1", b'"true"', b"yes", b"true" * 100])
async def test_a_drain_request_that_is_not_true_or_false_changes_nothing(client: NodeClient, body: bytes) -> None:
    response = await client.put("/env-gateway/node/draining", content=body)

    assert response.status_code in (400, 413)
    assert (await reported(client))["is_draining"] is False


async def test_a_refusal_of_the_engine_fails_the_report(client: NodeClient, engine: Engine) -> None:
    engine.refuse("GET list", 500, "out of order")

    response = await client.get("/env-gateway/node")

    assert response.status_code == 502
    assert "out of order" in response.json()["message"]
    await reported(client)


async def test_an_unreachable_engine_fails_the_report(folder: Path, files: tuple[Files, Files]) -> None:
    with Engine(folder / "engine.sock") as engine:
        async with node(folder, engine, files) as client:
            (folder / "engine.sock").rename(folder / "away.sock")
            response = await client.get("/env-gateway/node")
            assert response.status_code == 503
            (folder / "away.sock").rename(folder / "engine.sock")
            await reported(client)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("1970-01-01T00:01:00Z", 60.0),
        ("1970-01-01T01:01:00.5+01:00", 60.5),
        ("0001-01-01T00:00:00Z", 0.0),
        ("", 0.0),
        (None, 0.0),
        ("yesterday", 0.0),
    ],
)
def test_the_build_time_of_an_image_is_read_in_the_engines_formats(written: Any, expected: float) -> None:
    assert built_at(written) == expected


def test_available_memory_that_the_kernel_does_not_report_counts_as_zero(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\nMemAvailable:      3 kB\n")
    (tmp_path / "odd").write_text("MemTotal: 5 kB\n")

    assert available_bytes(tmp_path / "meminfo") == 3072
    assert available_bytes(tmp_path / "odd") == available_bytes(tmp_path / "none") == 0


# -- routes and clients


async def test_paths_outside_the_nodes_own_routes_go_to_the_gate(client: NodeClient) -> None:
    assert (await client.get("/_ping")).text == "OK"
    assert (await client.get("/v1.41/info")).json()["Name"] == "machine-1"
    assert (await client.get("/images/json")).status_code == 403


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/env-gateway/"),
        ("POST", "/env-gateway/node"),
        ("DELETE", f"/env-gateway/images/{OURS}"),
        ("POST", f"/env-gateway/images/{OURS}"),
        ("GET", "/env-gateway/other"),
    ],
)
async def test_unknown_routes_are_not_found(client: NodeClient, method: str, path: str) -> None:
    assert (await client.request(method, path)).status_code == 404


async def test_a_client_without_a_gateways_certificate_is_not_served(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    async with node(folder, engine, files) as client:
        port = client.base_url.port
        stranger = ssl.create_default_context(cafile=files[0].ca)
        stranger.check_hostname = False
        async with httpx.AsyncClient(verify=stranger, trust_env=False) as other:
            with pytest.raises(httpx.TransportError):
                await other.get(f"https://127.0.0.1:{port}/env-gateway/node")

    assert engine.requests == []


# -- images sent by the node


async def test_an_image_is_saved_with_its_tag(client: NodeClient) -> None:
    response = await client.get(f"/env-gateway/images/{OURS}")

    assert response.content == f"tar of {OURS}:latest".encode() * 5000


async def test_an_image_that_is_missing_or_not_in_the_catalog_is_not_saved(client: NodeClient) -> None:
    assert (await client.get(f"/env-gateway/images/{FAR}")).status_code == 404
    assert (await client.get("/env-gateway/images/debian:latest")).status_code == 403
    assert (await client.get(f"/env-gateway/images/{OURS}/../debian")).status_code in (403, 404)


# -- images sent to the node


def leftovers(folder: Path) -> list[str]:
    """Return the files in the spool folder, including open files of this process without a name."""
    spool = folder / "state"
    opened = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    links = [str(path.readlink()) for path in opened if path.is_symlink()]
    return [path.name for path in spool.iterdir()] + [link for link in links if link.startswith(str(spool))]


async def bring(client: NodeClient, image: ImageTar, reference: str = OURS) -> httpx.Response:
    return await put(client, image.written(), reference=reference, id=image.id)


async def put(
    client: NodeClient, content: Content, *, reference: str = OURS, id: str, voucher: str | None = None
) -> httpx.Response:
    """Send *content* as image *id*, by default with another node's voucher for it."""
    given = client.vouchers.issue(reference, id) if voucher is None else voucher
    return await client.put(
        f"/env-gateway/images/{reference}", params={"id": id}, content=content, headers={VOUCHER_HEADER: given}
    )


async def test_an_image_is_loaded_and_reported_immediately(client: NodeClient, engine: Engine, folder: Path) -> None:
    image = ImageTar(f"{OURS}:latest")
    await reported(client)

    response = await bring(client, image)

    assert (response.status_code, response.json()) == (200, {"id": image.id})
    assert loaded(engine.loads[0]) == (f"{OURS}:latest", image.id, [b"one layer", b"another"])
    assert (await reported(client))["images"] == {OURS: image.id}
    assert leftovers(folder) == []


async def test_an_image_may_be_sent_without_a_content_length(client: NodeClient) -> None:
    image = ImageTar(f"{OURS}:latest")

    async def pieces() -> AsyncIterator[bytes]:
        whole = image.written()
        for start in range(0, len(whole), 1000):
            yield whole[start : start + 1000]

    response = await put(client, pieces(), id=image.id)

    assert response.json() == {"id": image.id}


async def test_another_image_than_the_announced_one_never_reaches_the_engine(
    client: NodeClient, engine: Engine, folder: Path
) -> None:
    stranger = ImageTar("debian:latest")
    other = ImageTar(f"{OURS}:latest", config=b'{"other": 1}')
    device = ImageTar(f"{OURS}:latest")
    device.add("../../etc/cron.d/x", b"x")

    responses = [
        await bring(client, stranger),
        await put(client, other.written(), id=ImageTar("x").id),
        await bring(client, device),
        await bring(client, stranger, "debian:latest"),
        await bring(client, ImageTar(PINNED), PINNED),
        await client.put(f"/env-gateway/images/{OURS}", params={"id": "sha256:1"}, content=b""),
        await client.put(f"/env-gateway/images/{OURS}", content=b""),
    ]

    assert [response.status_code for response in responses] == [403, 403, 403, 403, 403, 400, 400]
    assert all(response.json()["message"] for response in responses)
    assert engine.loads == []
    assert "POST load" not in engine.requests
    assert leftovers(folder) == []


async def test_an_image_for_which_no_node_vouches_neither_comes_nor_replaces_one(
    client: NodeClient, engine: Engine, files: tuple[Files, Files], folder: Path
) -> None:
    gateway, _ = files
    image, other = ImageTar(f"{OURS}:latest"), ImageTar(f"{OURS}:latest", config=b'{"other": 1}')
    _, strangers = cluster(folder / "strangers")

    refused = [
        await put(client, image.written(), id=image.id, voucher=voucher)
        for voucher in (
            "",
            Vouchers(*astuple(gateway)).issue(OURS, image.id),
            Vouchers(*astuple(strangers)).issue(OURS, image.id),
            client.vouchers.issue(OURS, other.id),
            client.vouchers.issue(FAR, image.id),
        )
    ]

    assert [response.status_code for response in refused] == [403] * 5
    assert all(f"no node vouches for {OURS} as {image.id}" in response.json()["message"] for response in refused)
    assert engine.loads == []
    assert (await bring(client, image)).status_code == 200


async def test_a_gateway_carries_an_image_from_one_node_to_another(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    image = ImageTar(f"{OURS}:latest")
    engine.images.clear()
    (folder / "source").mkdir()
    with Engine(folder / "source" / "engine.sock") as source:
        source.info |= {"ID": "EFGH:ABCD", "Name": "machine-2"}
        source.ids[OURS], source.tar = image.id, image.written()
        async with node(folder, engine, files) as target, node(folder / "source", source, files) as other:
            hosts = [("127.0.0.1", client.base_url.port or 0) for client in (target, other)]
            tls = client_context(*astuple(files[0]))
            nodes = Nodes(hosts, tls=tls, tls_name=NODE_NAME, every_s=0.05)
            sync = ImageSync(nodes)
            await nodes.settled()  # a node that was too busy to answer counts as polled
            await until(lambda: {view.name for view in nodes.views()} == {"machine-1", "machine-2"})
            empty = next(view.id for view in nodes.views() if view.name == "machine-1")

            assert await sync.pinned(OURS) == image.id
            await sync.ensure(empty, OURS, image.id)

            await sync.aclose()
            await nodes.aclose()
            assert (await reported(target))["images"] == {OURS: image.id}
    assert [loaded(tar)[1] for tar in engine.loads] == [image.id]


async def test_an_older_build_does_not_replace_a_newer_one(client: NodeClient, engine: Engine) -> None:
    def built(at: str) -> ImageTar:
        return ImageTar(f"{OURS}:latest", config=f'{{"created": "{at}"}}'.encode())

    older, newer = built("2024-05-06T07:08:08.9Z"), built("2024-05-06T07:08:09.2Z")
    assert (await bring(client, newer)).status_code == 200
    engine.created = "2024-05-06T07:08:09.2Z"

    response = await bring(client, older)

    assert (response.status_code, "has a newer build" in response.json()["message"]) == (403, True)
    assert [loaded(tar)[1] for tar in engine.loads] == [newer.id]
    assert (await bring(client, newer)).status_code == 200


async def test_an_image_that_is_too_large_is_refused_before_it_fills_the_disk(
    client: NodeClient, engine: Engine, folder: Path
) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 500 * IMAGE_MAX_BYTES:
            sent += 2**16
            yield bytes(2**16)

    try:
        response = await put(client, endless(), id=ImageTar(OURS).id)
        assert response.status_code == 413
    except httpx.TransportError:
        pass  # the node closed the connection while the client was sending

    assert sent < 500 * IMAGE_MAX_BYTES
    assert engine.loads == []
    await until(lambda: leftovers(folder) == [])


async def test_an_image_whose_sender_disconnects_leaves_nothing_behind(
    client: NodeClient, engine: Engine, folder: Path
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def halting() -> AsyncIterator[bytes]:
        yield bytes(1000)
        begun.set()
        await go_on.wait()

    sending = asyncio.create_task(put(client, halting(), id=ImageTar(OURS).id))
    await begun.wait()
    await until(lambda: len(leftovers(folder)) == 1)
    sending.cancel()
    await asyncio.wait({sending})

    await until(lambda: leftovers(folder) == [])
    assert engine.loads == []
    assert (await bring(client, ImageTar(f"{OURS}:latest"))).status_code == 200


async def test_an_upload_whose_sender_is_silent_is_aborted(
    client: NodeClient, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "SILENCE_S", 0.05)
    go_on = asyncio.Event()

    async def halting() -> AsyncIterator[bytes]:
        yield bytes(1000)
        await go_on.wait()

    sending = asyncio.create_task(put(client, halting(), id=ImageTar(OURS).id))
    await until(lambda: len(leftovers(folder)) == 1)
    await until(lambda: leftovers(folder) == [])
    sending.cancel()
    await asyncio.wait({sending})


async def reached(hold: Hold) -> None:
    assert await asyncio.to_thread(hold.reached.wait, HANG_S)


async def test_images_are_loaded_one_at_a_time_and_the_queue_is_bounded(
    client: NodeClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "WAITING_MAX", 1)
    image, hold = ImageTar(f"{OURS}:latest"), engine.hold("POST load")
    first = asyncio.create_task(bring(client, image))
    await reached(hold)
    others = [asyncio.create_task(bring(client, image)) for _ in range(2)]

    done, waiting = await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result().status_code for task in done] == [503]
    assert engine.count("POST load") == 1
    hold.released.set()

    assert (await first).status_code == 200
    assert [(await task).status_code for task in waiting] == [200]


async def test_an_image_that_waits_too_long_for_its_turn_is_refused(
    client: NodeClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "TURN_S", 0.05)
    image, hold = ImageTar(f"{OURS}:latest"), engine.hold("POST load")
    first = asyncio.create_task(bring(client, image))
    await reached(hold)

    assert (await bring(client, image)).status_code == 503
    hold.released.set()
    assert (await first).status_code == 200


async def test_the_refusal_of_a_tar_by_the_engine_is_reported(client: NodeClient, engine: Engine, folder: Path) -> None:
    engine.refuse("POST load", 500, "no space left on device")

    response = await bring(client, ImageTar(f"{OURS}:latest"))

    assert response.status_code == 502
    assert "no space left" in response.json()["message"]
    assert leftovers(folder) == []


async def test_an_engine_that_has_another_image_after_the_load_is_reported(client: NodeClient, engine: Engine) -> None:
    engine.deaf = True

    response = await bring(client, ImageTar(f"{OURS}:latest"))

    assert response.status_code == 502
    assert ", not sha256:" in response.json()["message"]


# -- images that the operator lists


async def pull_pinned(client: NodeClient) -> httpx.Response:
    return await client.post(f"/env-gateway/images/{PINNED}/pull", params={"digest": PINNED.partition("@")[2]})


async def test_an_image_that_a_node_vouches_for_is_refused_if_the_operator_lists_another_id(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    images = [ImageTar(f"{OURS}:latest"), ImageTar(f"{OURS}:latest", config=b'{"other": 1}')]
    ours, other = sorted(images, key=lambda image: image.id)  # the order of builds without a time
    ids, engine.created = folder / "ids", ""
    ids.write_text(f"{OURS} {ours.id}\n")
    async with node(folder, engine, files, ids=ids) as client:
        refused = await bring(client, other)

        assert refused.status_code == 403
        for part in (f"{ids} lists {ours.id} (line 1) for {OURS}", f"not {other.id}", "gateway node images"):
            assert part in refused.json()["message"]
        assert engine.loads == []
        unvouched = await put(client, ours.written(), id=ours.id, voucher="")
        assert "no node vouches" in unvouched.json()["message"], "a listed image still needs a voucher"
        assert (await bring(client, ours)).status_code == 200

        ids.write_text(f"{OURS} {other.id}\n")

        assert (await bring(client, other)).status_code == 200
        assert f"not {ours.id}" in (await bring(client, ours)).json()["message"]


@pytest.mark.parametrize("content", [None, "", "nonsense\n"])
async def test_without_a_usable_list_no_image_is_accepted(
    folder: Path, engine: Engine, files: tuple[Files, Files], content: str | None
) -> None:
    engine.registry.add(PINNED)
    ids = folder / "ids"
    if content is not None:
        ids.write_text(content)
    async with node(folder, engine, files, ids=ids) as client:
        for response in (await bring(client, ImageTar(f"{OURS}:latest")), await pull_pinned(client)):
            assert response.status_code == 403
            assert str(ids) in response.json()["message"]
    assert "POST load" not in engine.requests
    assert "POST pull" not in engine.requests


async def test_an_image_that_is_no_longer_listed_after_its_upload_is_not_loaded(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    ids, image = folder / "ids", ImageTar(f"{OURS}:latest")
    ids.write_text(f"{OURS} {image.id}\n")

    async def pieces() -> AsyncIterator[bytes]:
        whole = image.written()
        yield whole[:1000]
        await until(lambda: len(leftovers(folder)) > 0)  # the upload has begun
        ids.write_text("")
        yield whole[1000:]

    async with node(folder, engine, files, ids=ids) as client:
        assert (await put(client, pieces(), id=image.id)).status_code == 403
    assert engine.loads == []


async def test_a_pulled_image_of_another_id_than_the_listed_one_is_removed_again(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    engine.registry.add(PINNED)
    ids = folder / "ids"
    ids.write_text(f"{PINNED} {DIGEST}\n")
    async with node(folder, engine, files, ids=ids) as client:
        response = await pull_pinned(client)

        assert response.status_code == 403
        assert engine.image_id(PINNED) in response.json()["message"]
        assert PINNED not in engine.images
        assert PINNED not in (await reported(client))["images"]

        engine.images.add(PINNED)  # the operator's own
        assert (await pull_pinned(client)).status_code == 403
        assert PINNED in engine.images

        ids.write_text(f"{PINNED} {engine.image_id(PINNED)}\n")
        assert (await pull_pinned(client)).status_code == 200


# -- images from registries


async def test_an_image_with_a_digest_in_the_catalog_is_pulled(client: NodeClient, engine: Engine) -> None:
    engine.registry.add(PINNED)

    response = await client.post(
        f"/env-gateway/images/{PINNED}/pull",
        params={"digest": PINNED.partition("@")[2]},
        headers={"X-Registry-Auth": "e30="},
    )

    assert (response.status_code, response.json()) == (200, {"id": engine.image_id(PINNED)})
    assert engine.auth == "e30="


async def test_an_image_that_the_registry_lacks_is_reported(client: NodeClient) -> None:
    response = await client.post(f"/env-gateway/images/{PINNED}/pull", params={"digest": PINNED.partition("@")[2]})

    assert response.status_code == 502
    assert "not found" in response.json()["message"]


@pytest.mark.parametrize(
    ("reference", "digest", "status"),
    [
        pytest.param(OURS, DIGEST, 403, id="no registry"),
        pytest.param(FAR, DIGEST, 403, id="a digest that the catalog does not name"),
        pytest.param("registry.example/other:1", DIGEST, 403, id="not in the catalog"),
        pytest.param(PINNED, DIGEST, 403, id="pinned to another digest"),
        pytest.param(FAR, "latest", 400, id="no digest"),
        pytest.param(FAR, "", 400, id="an empty digest"),
    ],
)
async def test_images_outside_the_catalog_and_other_digests_are_not_pulled(
    client: NodeClient, engine: Engine, reference: str, digest: str, status: int
) -> None:
    response = await client.post(f"/env-gateway/images/{reference}/pull", params={"digest": digest})

    assert response.status_code == status
    assert "POST pull" not in engine.requests


# -- the whole process


def settings_of(folder: Path, engine: FakeEngine, files: Files, **given: Any) -> Settings:
    return Settings(
        **{
            "node_engine": engine.url,
            "node_socket": folder / "gate.sock",
            "socket_dir": folder / "workers",
            "state_dir": folder / "state",
            "instance": "ours",
            "node_makes_folders": True,
            "cluster_ca": files.ca,
            "cluster_cert": files.cert,
            "cluster_key": files.key,
            **given,
        }
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cluster_ca": None}, "GATEWAY_CLUSTER_CA"),
        ({"cluster_key": None}, "GATEWAY_CLUSTER_KEY"),
        ({"node_makes_folders": False}, "GATEWAY_NODE_MAKES_FOLDERS"),
        ({"node_listen": "7443"}, "HOST:PORT"),
        ({"node_listen": "127.0.0.1:65535"}, "65534"),
    ],
)
async def test_a_missing_or_invalid_setting_stops_the_start_of_a_cluster_node(
    folder: Path, engine: Engine, files: tuple[Files, Files], given: dict[str, Any], said: str
) -> None:
    settings = settings_of(folder, engine, files[1], **{"node_listen": "127.0.0.1:7443", **given})

    with pytest.raises(ConfigError, match=said):
        await run_node(settings, [], makes_folders=settings.node_makes_folders)  # type: ignore[arg-type]  # the argument is not used

    assert engine.requests == []


def test_the_listen_address_may_be_ipv4_or_ipv6() -> None:
    assert listen_address("0.0.0.0:7443") == ("0.0.0.0", 7443)
    assert listen_address("[::]:7443") == ("::", 7443)


async def test_a_state_folder_that_cannot_be_written_fails_the_check(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    _, own = files
    (folder / "file").touch()
    rules = Rules.of([], instance="ours", socket_root=str(folder))
    gate, state = Gate(engine=engine.url, rules=rules), folder / "file" / "below"
    app = Cluster(gate, engine=engine.url, vouchers=Vouchers(*astuple(own)), state=state, image_max_bytes=1)

    with pytest.raises(BackendError, match="set state_dir"):
        app.check()


async def test_the_node_command_serves_both_ports_and_continues_after_sigterm_for_the_drain_notice(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    (folder / "catalog" / "fake").mkdir(parents=True)
    (folder / "catalog" / "fake" / "environment.toml").write_text(
        f'name = "fake"\nimage = "{OURS}"\ncommand = ["python3", "server.py"]\n'
    )
    port = reserved_port(count=2)
    told = settings_of(folder, engine, files[1], node_listen=f"127.0.0.1:{port}", catalog_dir=folder / "catalog")
    told = told.model_copy(update={"drain_notice_s": 600.0})
    values = told.model_dump(exclude_unset=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    environ |= {f"GATEWAY_{name.upper()}": str(value) for name, value in values.items()}
    (folder / "workers").mkdir(mode=0o711)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from gateway.cli.__main__ import main; main()", "node",
        env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(3 * HANG_S):
            said = b""
            while b"gate_ready" not in said:
                line = await process.stdout.readline()
                assert line, said
                said += line
            (folder / "workers" / "w1").mkdir()
            async with client_of(files, port) as client:
                assert (await reported(client))["images"] == {OURS: engine.image_id(OURS)}
            echo = await asyncio.start_unix_server(answer_once, str(folder / "workers" / "w1" / "worker.sock"))
            tls = client_context(files[0].ca, files[0].cert, files[0].key)
            process.send_signal(signal.SIGTERM)
            while b"node_leaving" not in said:
                said += await process.stdout.readline()
            async with client_of(files, port) as client:
                assert (await reported(client))["images"] == {OURS: engine.image_id(OURS)}
            reader, writer = await asyncio.open_connection("127.0.0.1", port + 1, ssl=tls, server_hostname=NODE_NAME)
            writer.write(b"EG1 w1/worker.sock\nask")
            assert await reader.readexactly(2) == b"+\n"
            process.send_signal(signal.SIGTERM)  # a second signal ends the drain notice
            rest = await reader.readuntil(NODE_LEAVES)
            assert rest == b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nask" + NODE_LEAVES
            writer.close()
            assert await process.wait() == 0
            echo.close()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert not (folder / "gate.sock").exists()


async def test_a_node_that_shuts_down_reports_over_kept_connections_and_accepts_no_new_connections(
    folder: Path, engine: Engine, files: tuple[Files, Files]
) -> None:
    (folder / "sockets" / "w1").mkdir(parents=True)
    go_on = asyncio.Event()

    async def answer_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(3)
        await go_on.wait()
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        await reader.read()
        writer.close()

    async def ended() -> None:
        async with node(folder, engine, files, drain_s=HANG_S) as client:
            made.set_result(client)
            await leave.wait()

    made: asyncio.Future[httpx.AsyncClient] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()
    worker = await asyncio.start_unix_server(answer_late, str(folder / "sockets" / "w1" / "worker.sock"))
    running = asyncio.create_task(ended())
    port = (await made).base_url.port
    assert port is not None
    tls = client_context(files[0].ca, files[0].cert, files[0].key)
    async with client_of(files, port) as kept:
        await reported(kept)
        reader, writer = await asyncio.open_connection("127.0.0.1", port + 1, ssl=tls, server_hostname=NODE_NAME)
        writer.write(b"EG1 w1/worker.sock\nask")
        assert await reader.readexactly(2) == b"+\n"
        leave.set()

        async def are_closed() -> None:
            for number in (port, port + 1):
                try:
                    _, opened = await asyncio.open_connection("127.0.0.1", number)
                except ConnectionRefusedError:
                    continue
                except ConnectionResetError as error:  # the connection was in the backlog when the port was closed
                    raise AssertionError(f"port {number} was open just now") from error
                opened.close()
                raise AssertionError(f"port {number} is still open")

        await eventually(are_closed)
        assert (await reported(kept))["is_draining"] is False
        assert not running.done()
        go_on.set()
        assert await reader.readuntil(NODE_LEAVES) == b"HTTP/1.1 204 No Content\r\n\r\n" + NODE_LEAVES
        writer.close()
    await running
    worker.close()


async def answer_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    asked = await reader.readexactly(3)
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n" + asked)
    await reader.read()
    writer.close()
