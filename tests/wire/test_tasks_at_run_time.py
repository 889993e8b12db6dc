"""Tasks that an operator adds by command while the gateway serves: every protocol's client plays them immediately."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from gateway.cli.main import app
from gateway.core.errors import ConfigError
from tests.deadlines import COMMAND_S
from tests.wire.areal_client import ArealClient, Failed
from tests.wire.catalog import EMBEDDED, STACK, on_stack, serving
from tests.wire.gateways import OPERATOR_KEY, Gateway
from tests.wire.openenv.clients import NEWEST, ClientError, Driver, connected
from tests.wire.sdks import SDKS

pytestmark = [pytest.mark.wire, pytest.mark.needs("openenv-clients")]

HELLO: dict[str, Any] = {
    "id": "custom/say-hello",
    "env_type": "math",
    "instruction": "Say hello.",
    "evaluation": {"reward_function": "iexact_match('hello')"},
}


@pytest.fixture(scope="module", params=[EMBEDDED, on_stack("math")])
def gateway(request: pytest.FixtureRequest) -> Iterator[Gateway]:
    with serving(request.param, "math") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    with contextlib.closing(Driver(NEWEST)) as driver:
        yield driver


def command(*arguments: str | Path) -> Result:
    """Run ``gateway tasks`` in this process, because the imports of a new process cost a second of CPU each time."""
    return CliRunner().invoke(app, ["tasks", *map(str, arguments)])


def at(gateway: Gateway) -> list[str]:
    return ["--url", gateway.url, "--key", OPERATOR_KEY]


def written(folder: Path, task: Any) -> Path:
    path = folder / "task.json"
    path.write_text(json.dumps(task), "utf-8")
    return path


@pytest.fixture(scope="module")
def added(gateway: Gateway) -> Gateway:
    """The gateway with the task `HELLO`, which the command read from standard input and added from its own process.

    Tests that add further tasks ask for it too, so that `HELLO` is the first of its split in any order of the tests.
    """
    program = Path(sys.executable).with_name("gateway")
    done = subprocess.run(
        [program, "tasks", "add", "-", "--validate", *at(gateway)],
        input=json.dumps(HELLO),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return gateway


async def test_an_openenv_client_resets_to_an_added_task_by_its_id_and_by_its_split(
    added: Gateway, driver: Driver
) -> None:
    async with connected(driver, f"{added.url}/openenv/math") as client:
        for wish in ({"task": HELLO["id"]}, {"split": "custom", "index": 0}):
            seen = await client.reset(**wish)
            said = await client.step({"answer": "Hello"})

            assert "Say hello." in seen["observation"]["text"]
            assert (said["reward"], said["done"]) == (1.0, True)


async def test_an_areal_client_starts_an_added_task_by_its_id(added: Gateway) -> None:
    client = ArealClient(f"{added.url}/areal/math")
    episode = (await client.start(HELLO["id"]))["episode_id"]

    reply = await client.tool(episode, "submit", answer="hello")

    assert (reply["reward"], reply["done"]) == (1.0, True)


@pytest.mark.parametrize("sdk", SDKS.values(), ids=SDKS)
async def test_an_ors_client_finds_an_added_task_in_the_custom_split(added: Gateway, sdk: Any) -> None:
    async with sdk.connect(added.url, None) as client:
        math = client.environment("math")
        assert "custom" in await math.list_splits()
        task, *_ = await math.list_tasks("custom")
        async with math.session(task=task) as session:
            output = await session.call_tool("submit", {"answer": "HELLO"})

    assert (output.reward, output.finished) == (1.0, True)


async def test_no_client_finds_a_removed_task(added: Gateway, driver: Driver, tmp_path: Path) -> None:
    gateway = added
    task = {**HELLO, "id": "custom/short-lived"}
    assert command("add", written(tmp_path, task), *at(gateway)).exit_code == 0
    async with connected(driver, f"{gateway.url}/openenv/math") as client:
        await client.reset(task=task["id"])
        assert command("remove", "math", task["id"], *at(gateway)).exit_code == 0

        assert (await client.step({"answer": "hello"}))["reward"] == 1.0  # the open episode goes on
        with pytest.raises(ClientError, match="Unknown task: custom/short-lived"):
            await client.reset(task=task["id"])
    with pytest.raises(Failed):
        await ArealClient(f"{gateway.url}/areal/math").start(task["id"])


async def test_a_task_beyond_its_rate_limit_is_refused_in_each_protocol(
    added: Gateway, driver: Driver, tmp_path: Path
) -> None:
    gateway = added
    task = {**HELLO, "id": "custom/costly", "rate_limit": {"starts": 1, "per_s": 3600}}
    assert command("add", written(tmp_path, task), *at(gateway)).exit_code == 0
    async with connected(driver, f"{gateway.url}/openenv/math") as client:
        await client.reset(task=task["id"])
        with pytest.raises(ClientError, match="EXECUTION_ERROR") as refused:
            await client.reset(task=task["id"])
        assert (await client.step({"answer": "hello"}))["reward"] == 1.0  # the open episode goes on
    status, body = await ArealClient(f"{gateway.url}/areal/math").request(
        "POST", "/episode/start", json={"sample_id": task["id"], "config": {}}
    )
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        wish = {"env_name": "math", "task_spec": {"id": task["id"]}}
        created = await http.post("/create", json=wish, headers={"X-Session-ID": "costly"})

    assert "may begin 1 times in 3600 s" in refused.value.message
    assert (status, "may begin 1 times" in body["detail"]) == (503, True)
    assert (created.status_code, "may begin 1 times" in created.text) == (429, True)
    assert int(created.headers["retry-after"]) > 3000


@pytest.mark.parametrize("gateway", [EMBEDDED], indirect=True)
def test_a_task_that_the_environment_refuses_is_not_added(gateway: Gateway, tmp_path: Path) -> None:
    task = {**HELLO, "id": "custom/unjudged", "evaluation": {"reward_function": "no_such_function('x')"}}

    tried = command("validate", written(tmp_path, task), *at(gateway))
    refused = command("add", written(tmp_path, task), "--validate", *at(gateway))
    listed = command("list", *at(gateway))

    assert (tried.exit_code, refused.exit_code) == (2, 2)
    assert "no_such_function" in tried.stderr
    assert "custom/unjudged" not in listed.stdout


def test_only_tasks_with_a_trusted_signature_are_added_when_signatures_are_required(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    for name in ("ours", "theirs"):
        assert command("keygen", tmp_path / name).exit_code == 0
    (keys / "ours.pub").write_bytes((tmp_path / "ours.pub").read_bytes())
    plain, bundles = written(tmp_path, HELLO), {}
    for name in ("ours", "theirs"):
        bundles[name] = tmp_path / f"{name}.json"
        assert command("sign", plain, "--key", tmp_path / name, "-o", bundles[name]).exit_code == 0
    tampered = tmp_path / "tampered.json"
    tampered.write_text(bundles["ours"].read_text("utf-8").replace("Say hello.", "Say bye."), "utf-8")

    with serving(EMBEDDED, "math", GATEWAY_TASK_SIGNATURES="required", GATEWAY_TASK_KEYS=str(keys)) as gateway:
        results = {
            name: command("add", path, *at(gateway))
            for name, path in {"plain": plain, "tampered": tampered, **bundles}.items()
        }

    assert {name: done.exit_code for name, done in results.items()} == {
        "plain": 2,
        "tampered": 2,
        "theirs": 2,
        "ours": 0,
    }
    assert command("verify", bundles["ours"], "--keys", keys).exit_code == 0
    assert isinstance(command("verify", bundles["theirs"], "--keys", keys).exception, ConfigError)


@pytest.mark.docker
@pytest.mark.redis
@pytest.mark.needs("image:math")
async def test_a_task_added_at_one_replica_is_played_at_another_immediately_and_after_a_restart(
    driver: Driver, tmp_path: Path
) -> None:
    with (
        serving(STACK, "math") as first,
        contextlib.closing(_another(first, tmp_path)) as second,
    ):
        second.start()
        assert command("add", written(tmp_path, HELLO), *at(first)).exit_code == 0

        async with connected(driver, f"{second.url}/openenv/math") as client:
            await client.reset(task=HELLO["id"])
            assert (await client.step({"answer": "hello"}))["reward"] == 1.0
        second.kill()
        second.restart()
        async with connected(driver, f"{second.url}/openenv/math") as client:
            await client.reset(split="custom", index=0)
            assert (await client.step({"answer": "hello"}))["reward"] == 1.0


class _Replica(Gateway):
    def close(self) -> None:
        self.stop()


def _another(first: Gateway, folder: Path) -> _Replica:
    """Return another gateway on the same store and engine."""
    return _Replica(folder, first.variables)
