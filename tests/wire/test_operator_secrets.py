"""Secrets that the operator gives to sessions: clients of every protocol play, and no log has them."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import PROJECT
from tests.wire.gateways import WIRE, Gateway, short_folder
from tests.wire.nemo_client import Call, rollout, row_of
from tests.wire.openenv.clients import NEWEST, DriverOf, connected
from tests.wire.raw import episode

pytestmark = [pytest.mark.wire, pytest.mark.needs("openenv-clients")]

TOKEN = "operators-t0ken/77"
SECRETS = """
[secrets]
TOKEN = "env:WIRE_OPERATOR_TOKEN"
FROM_FILE = "file:riddle-key"
"""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    """Serve the environments ``probe`` and, on a server of openreward, ``riddles`` with the operator's secrets."""
    folder = short_folder()
    catalog = folder / "catalog"
    shutil.copytree(WIRE / "environments" / "probe", catalog / "probe")
    foreign = (PROJECT / "tests/foreign/catalog/openreward/environment.toml").read_text()
    foreign = foreign.replace('name = "openreward"', 'name = "riddles"').replace(
        '"../../openreward/server.py"', f'"{PROJECT}/tests/foreign/openreward/server.py"'
    )
    own = (catalog / "probe" / "environment.toml").read_text().replace('directory = "tasks/probe"\n', "")
    for name, toml in (("riddles", foreign), ("probe", own)):
        (catalog / name).mkdir(exist_ok=True)
        (catalog / name / "environment.toml").write_text(toml + SECRETS)
    (folder / "secrets").mkdir()
    (folder / "secrets" / "riddle-key").write_text("from-a-file-4\n")
    started = Gateway(
        folder,
        {
            "GATEWAY_CATALOG_DIR": str(catalog),
            "GATEWAY_ENVIRONMENTS": "",
            "GATEWAY_SECRETS_DIR": str(folder / "secrets"),
            "GATEWAY_TRAINER_KEYS": "",
            "WIRE_OPERATOR_TOKEN": TOKEN,
        },
    )
    try:
        started.start()
        yield started
    finally:
        started.stop()
        shutil.rmtree(folder, ignore_errors=True)


def client(gateway: Gateway) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=gateway.url, timeout=HANG_S)


async def test_clients_of_every_protocol_play_an_environment_that_needs_a_secret(
    gateway: Gateway, driver_of: DriverOf
) -> None:
    async with client(gateway) as http, episode(http, {"word": "w"}, environment="riddles") as opened:
        over_ors = [(await opened.call("has_secret", {"name": name})).text for name in ("TOKEN", "FROM_FILE", "NONE")]
    areal = ArealClient(f"{gateway.url}/areal/riddles")
    started = await areal.start("0")
    over_areal = await areal.step(started["episode_id"], '{"name": "has_secret", "arguments": {"name": "TOKEN"}}')
    await areal.cancel(started["episode_id"])
    async with connected(driver_of(NEWEST), f"{gateway.url}/openenv/riddles", kind="mcp") as openenv:
        await openenv.reset(index=0)
        action = {"tool_name": "has_secret", "arguments": {"name": "TOKEN"}}
        over_openenv = await openenv.step({"$call_tool": action})
    asked = Call("has_secret", {"name": "TOKEN"})
    over_nemo = await rollout(f"{gateway.url}/nemo/riddles", row_of("riddles"), [asked], "river")

    assert over_ors == ["yes", "yes", "no"]
    assert over_areal["observation"]["content"] == "yes"
    assert over_openenv["observation"]["result"]["data"] == "yes"
    assert "yes" in over_nemo.seen[0]


async def test_a_trainers_own_secret_takes_precedence(gateway: Gateway) -> None:
    own = base64.b64encode(json.dumps({"TOKEN": {"value": "trainers-own"}}).encode()).decode()
    async with client(gateway) as http, episode(http, headers={"X-Secrets": own}) as opened:
        told = [(await opened.call("secret", {"name": name})).text for name in ("TOKEN", "FROM_FILE")]

    assert told == ["trainers-own", "from-a-file-4"]


async def test_an_operators_secret_is_masked_in_the_record_of_an_episode(gateway: Gateway) -> None:
    async with client(gateway) as http, episode(http) as opened:
        told = (await opened.call("secret", {"name": "TOKEN"})).text
    listed = await gateway.ask("episodes", environment="probe", name=opened.sid)
    (found,) = listed["episodes"]
    record = await gateway.ask(f"episodes/{found['id']}")

    assert told == TOKEN
    assert "*" * len(TOKEN) in json.dumps(record["steps"])
    assert TOKEN not in json.dumps(record) + gateway.log


async def test_a_secret_that_cannot_be_read_is_named_and_opens_nothing(gateway: Gateway) -> None:
    file = Path(gateway.variables["GATEWAY_SECRETS_DIR"]) / "riddle-key"
    content = file.read_text()
    file.unlink()
    try:
        async with client(gateway) as http:
            body = {"env_name": "probe", "task_spec": {}}
            refused = await http.post("/create", headers={"X-Session-ID": "without-file"}, json=body)
    finally:
        file.write_text(content)

    assert refused.status_code == 503
    assert "secrets.FROM_FILE = 'file:riddle-key' of environment probe" in refused.text
    assert "without-file" not in {session["name"] for session in await gateway.sessions()}
