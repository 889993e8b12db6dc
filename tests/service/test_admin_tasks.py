"""The operators' HTTP routes for tasks at run time, on a gateway with real sessions and the memory store."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from typer.testing import CliRunner

from gateway.catalog.catalog import Catalog
from gateway.cli.main import app as commands
from gateway.core.environment import Isolation
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.ports.tasks import MAX_TASK_BYTES
from gateway.frontends.admin.replies import ERRORS
from gateway.frontends.admin.tasks import MAX_PROBED, TaskProbe, TaskRoutes
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.runtime import RuntimeTasks
from gateway.tasks.signing import TrustedKeys, make_keys, read_private, read_trusted, sign
from tests.fakes.eventually import until
from tests.service.stack import Replica, Stack, environment, stack, tasks
from tests.service.wire import under_way

ROUTE = "/admin/v1/tasks"
MATH = EnvironmentName("math")
OPERATOR = Owner("operator")
FILES = tasks(train=[{"id": "t0", "tags": ["sum"]}, {"id": "t1"}])
MAX_BODY_BYTES = 4 * 2**20


class World:
    """A replica that serves the operators' routes."""

    def __init__(self, built: Stack, replica: Replica, client: httpx.AsyncClient, run_time: RuntimeTasks) -> None:
        self.built = built
        self.replica = replica
        self.client = client
        self.tasks = run_time

    async def post(self, document: object, path: str = ROUTE, **query: str) -> httpx.Response:
        return await self.client.post(path, json=document, params=query)

    async def listed(self, **query: str) -> list[str]:
        answer = await self.client.get(ROUTE, params=query)
        assert answer.status_code == 200, answer.text
        return [row["id"] for row in answer.json()["tasks"]]


@contextlib.asynccontextmanager
async def world(**routes: Any) -> AsyncIterator[World]:
    environments = (environment("math"), replace(environment("coding"), isolation=Isolation.SANDBOX))
    async with stack(*environments) as built:
        replica = built.first
        registry = TaskRegistry(
            {MATH: FILES}, env_types={one.name: ("sums",) * (one.name == MATH) for one in environments}
        )
        run_time = RuntimeTasks(registry=registry, store=MemoryTaskStore(), catalog=Catalog(environments))
        given = {
            "max_body_bytes": MAX_BODY_BYTES,
            "trusted": TrustedKeys({}),
            "signatures": "optional",
            "instance": "lab-1",
            **routes,
        }
        probe = TaskProbe(replica.sessions, replica.catalog)
        replica.app = Starlette(
            routes=TaskRoutes(tasks=run_time, probe=probe, **given).routes(), exception_handlers=ERRORS
        )
        async with replica.looping(), replica.serving() as client:
            yield World(built, replica, client, run_time)


@pytest.fixture
async def here() -> AsyncIterator[World]:
    async with world() as built:
        yield built


def task(id: str = "custom/a", env_type: str = "math", **more: Any) -> dict[str, Any]:
    return {"id": id, "env_type": env_type, "instruction": "go", **more}


def problems(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 400, answer.text
    body = answer.json()
    assert body["code"] == "task_invalid"
    assert all(problem["message"] for problem in body["problems"])
    return [problem["path"] for problem in body["problems"]]


# -- adding -------------------------------------------------------------------------------------------------------


async def test_a_task_that_is_added_can_be_looked_at_and_removed(here: World) -> None:
    added = await here.post(task("custom/login-test", tags=["x"]))

    assert added.status_code == 201
    assert added.json() == {
        "tasks": [{"environment": "math", "id": "custom/login-test", "split": "custom", "index": 0, "replaced": False}],
        "signed_by": None,
    }
    found = (await here.client.get(f"{ROUTE}/math/custom/login-test")).json()
    assert found["task"] == task("custom/login-test", tags=["x"])
    assert (found["split"], found["index"], found["source"], found["tags"]) == ("custom", 0, "run time", ["x"])
    assert (await here.client.delete(f"{ROUTE}/math/custom/login-test")).status_code == 204
    gone = await here.client.get(f"{ROUTE}/math/custom/login-test")
    assert (gone.status_code, gone.json()["detail"]) == (404, "Unknown task: custom/login-test")
    assert (await here.client.delete(f"{ROUTE}/math/custom/login-test")).status_code == 404


async def test_several_tasks_are_added_all_or_none(here: World) -> None:
    assert (await here.post({"tasks": [task("a"), task("b", "coding")]})).status_code == 201

    refused = await here.post({"tasks": [task("c"), task("a")]})

    assert (refused.status_code, refused.json()["code"]) == (409, "task_exists")
    assert await here.listed() == ["b", "t0", "t1", "a"]


async def test_an_existing_task_is_replaced_only_on_request(here: World) -> None:
    await here.post(task("a"))

    assert (await here.post(task("a", tags=["new"]))).status_code == 409
    replaced = await here.post(task("a", tags=["new"]), replace="true")

    assert (replaced.status_code, replaced.json()["tasks"][0]["replaced"]) == (200, True)
    assert await here.listed(tag="new") == ["a"]
    assert (await here.post({"tasks": [task("a"), task("b")]}, replace="true")).status_code == 201
    assert (await here.post(task("t0"), replace="true")).status_code == 409, "it stands in a file"


async def test_the_query_may_name_split_and_environment(here: World) -> None:
    added = await here.post({"id": "a"}, split="train", environment="math")

    assert added.json()["tasks"][0] | {"replaced": None} == {
        "environment": "math",
        "id": "a",
        "split": "train",
        "index": 2,
        "replaced": None,
    }


async def test_an_environment_s_other_name_leads_to_its_tasks(here: World) -> None:
    await here.post(task("a", "sums"))

    assert (await here.client.get(f"{ROUTE}/sums/a")).json()["environment"] == "math"
    assert await here.listed(environment="sums", split="custom") == ["a"]
    assert (await here.client.delete(f"{ROUTE}/sums/a")).status_code == 204


async def test_added_and_removed_tasks_are_logged_with_the_operator(
    here: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gateway.frontends.admin.tasks")

    await here.post({"tasks": [task(f"t-{number}") for number in range(12)]})
    await here.client.delete(f"{ROUTE}/math/t-3")

    added, removed = (
        record.getMessage() for record in caplog.records if record.name == "gateway.frontends.admin.tasks"
    )
    assert added.startswith("tasks_added tasks=math/t-0,math/t-1,")
    assert added.endswith("math/t-9+2 by= signed_by=")
    assert removed == "task_removed environment=math id=t-3 by="


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("application/yaml", b"# one\nid: a\nenv_type: math\n---\nid: b\nenv_type: sums\n"),
        ("text/yaml; charset=utf-8", b"tasks:\n- {id: a, env_type: math}\n- {id: b, env_type: math}\n"),
        ("application/x-ndjson", b'{"id":"a","env_type":"math"}\n{"id":"b","env_type":"math"}\n'),
        ("application/json", b'[{"id":"a","env_type":"math"},{"id":"b","env_type":"math"}]'),
        ("application/vnd.tasks+json", b'{"tasks":[{"id":"a","env_type":"math"},{"id":"b","env_type":"math"}]}'),
    ],
)
async def test_tasks_may_come_as_yaml_json_lines_or_json(here: World, kind: str, body: bytes) -> None:
    answer = await here.client.post(ROUTE, content=body, headers={"content-type": kind})

    assert answer.status_code == 201, answer.text
    assert await here.listed(split="custom") == ["a", "b"]


async def test_every_problem_is_reported_with_its_path_and_no_task_is_kept(here: World) -> None:
    wrong = [task("a"), task("b", "nosuch"), {"instruction": 3}, task("d", evaluation={"script": "x", "module": "y"})]

    answer = await here.post({"tasks": wrong})

    assert problems(answer) == [
        "tasks[1].env_type",
        "tasks[2].env_type",
        "tasks[2].id",
        "tasks[2].instruction",
        "tasks[3].evaluation.module",
        "tasks[3].evaluation.script",
    ]
    assert await here.listed(split="custom") == []
    assert problems(await here.post(task("a", tags=[3]))) == ["tags[0]"]


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (b"{", "application/json", "not JSON"),
        (b"[" * 100_000, "application/json", "not JSON"),
        (b"\xff", "application/json", "not UTF-8"),
        (b"a: !!python/name:os.system", "application/yaml", "not YAML"),
        (b"a: &x 1\nb: *x", "application/yaml", "aliases"),
        (b"[]", "application/json", "no task"),
        (b"", "application/yaml", "no task"),
        (b'["a"]', "application/json", "a task is an object"),
        (json.dumps([task(f"t{n}") for n in range(2001)]).encode(), "application/json", "2001 tasks in one request"),
    ],
)
async def test_a_malformed_body_is_refused_with_the_reason(here: World, body: bytes, kind: str, said: str) -> None:
    answer = await here.client.post(ROUTE, content=body, headers={"content-type": kind})

    assert answer.status_code == 400
    assert said in answer.json()["detail"]


async def test_tasks_that_are_too_large_are_refused(here: World) -> None:
    large = task("a", config={"x": "x" * MAX_TASK_BYTES})
    many = {"tasks": [task(str(n), config={"x": "x" * (MAX_TASK_BYTES // 2)}) for n in range(10)]}

    for document in (large, many):
        answer = await here.post(document)
        assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    assert await here.listed(split="custom") == []


@pytest.mark.parametrize(
    "query", [{"limit": "0"}, {"limit": "x"}, {"limit": "1001"}, {"after": "x"}, {"tags": "x"}, {"replace": "true"}]
)
async def test_an_invalid_query_is_refused_with_the_name_of_the_parameter(here: World, query: dict[str, str]) -> None:
    answer = await here.client.get(ROUTE, params=query)

    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_request")
    assert next(iter(query)) in answer.json()["detail"]
    assert (await here.post(task(), replace="perhaps")).status_code == 400
    assert (await here.post(task(), split="a b")).status_code == 400


async def test_a_listing_comes_in_pages_and_can_be_narrowed_down(here: World) -> None:
    await here.post({"tasks": [task("a", tags=["sum"]), task("b", "coding")]})

    first = (await here.client.get(ROUTE, params={"limit": "2"})).json()
    second = (await here.client.get(ROUTE, params={"limit": "2", "after": first["next"]})).json()

    assert [row["id"] for row in (*first["tasks"], *second["tasks"])] == ["b", "t0", "t1", "a"]
    assert second["next"] is None
    assert [row["source"] for row in second["tasks"]] == ["file", "run time"]
    assert await here.listed(tag="sum") == ["t0", "a"]
    assert await here.listed(environment="coding") == ["b"]
    assert await here.listed(environment="nosuch") == []


# -- trying -------------------------------------------------------------------------------------------------------


async def test_each_task_is_tried_in_an_episode_that_leaves_nothing_behind(here: World) -> None:
    document = {"tasks": [task("good"), task("bad", on_create="refuse"), task("other", "coding")]}

    answer = await here.post(document, f"{ROUTE}/validate")

    results = answer.json()["results"]
    assert [(row["environment"], row["id"], row["ok"]) for row in results] == [
        ("math", "good", True),
        ("math", "bad", False),
        ("coding", "other", True),
    ]
    assert results[1]["code"] == "invalid_request"
    assert results[1]["detail"]
    assert await here.listed(split="custom") == []
    assert [await here.replica.used(name) for name in ("math", "coding")] == [0, 0]
    assert await here.replica.store.sessions() == []


async def test_tasks_that_fail_the_requested_trial_are_not_added(here: World) -> None:
    refused = await here.post({"tasks": [task("good"), task("bad", on_create="refuse")]}, validate="true")

    assert (refused.status_code, refused.json()["code"]) == (400, "task_refused")
    assert [row["id"] for row in refused.json()["results"]] == ["bad"]
    assert await here.listed(split="custom") == []
    assert (await here.post(task("good"), validate="true")).status_code == 201
    assert await here.listed(split="custom") == ["good"]


async def test_an_operator_that_hangs_up_ends_the_trial(here: World) -> None:
    document = {"tasks": [task(f"t{n}", on_create="gate") for n in range(3)]}

    async with under_way(here.post(document, f"{ROUTE}/validate")) as (request,):
        await until(lambda: here.built.backend.workers and here.built.backend.only.waiting)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    await here.replica.eventually_used(0)
    assert here.built.backend.only.created == 0, "the gate stayed shut: nothing but the hang-up ended it"
    assert await here.listed(split="custom") == []


async def test_trials_are_bounded(here: World) -> None:
    many = {"tasks": [task(f"t{n}") for n in range(MAX_PROBED + 1)]}

    assert (await here.post(many, f"{ROUTE}/validate")).status_code == 400
    assert here.built.backend.workers == {}


# -- signatures ---------------------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Make a folder with the trusted key ``lab``, and next to it a key ``other``."""
    (tmp_path / "trusted").mkdir()
    make_keys(tmp_path / "trusted" / "lab")
    make_keys(tmp_path / "other")
    return tmp_path / "trusted"


@pytest.mark.parametrize("signatures", ["optional", "required"])
async def test_a_bundle_signed_with_a_trusted_key_is_accepted_and_shown_as_signed(keys: Path, signatures: str) -> None:
    bundle = sign([task("a")], read_private(keys / "lab"))
    async with world(trusted=read_trusted(keys), signatures=signatures) as here:
        answer = await here.post(bundle)

        assert (answer.status_code, answer.json()["signed_by"]) == (201, bundle["key"])
        assert (await here.client.get(f"{ROUTE}/math/a")).json()["signed_by"] == bundle["key"]


@pytest.mark.parametrize("signatures", ["optional", "required"])
async def test_a_bundle_that_was_changed_is_always_refused(keys: Path, signatures: str) -> None:
    bundle = sign([task("a")], read_private(keys / "lab"))
    bundle["tasks"][0]["instruction"] = "go elsewhere"
    async with world(trusted=read_trusted(keys), signatures=signatures) as here:
        for path in (ROUTE, f"{ROUTE}/validate"):
            answer = await here.post(bundle, path)
            assert (answer.status_code, answer.json()["code"]) == (403, "bad_signature")
        assert await here.listed(split="custom") == []


async def test_if_signatures_are_required_unsigned_and_untrusted_tasks_are_refused(keys: Path) -> None:
    foreign = sign([task("a")], read_private(keys.parent / "other"))
    async with world(trusted=read_trusted(keys), signatures="required") as here:
        for document in (task("a"), {"tasks": [task("a")]}, foreign):
            answer = await here.post(document)
            assert (answer.status_code, answer.json()["code"]) == (403, "not_signed")
        lines = {"content-type": "application/x-ndjson"}
        assert (await here.client.post(ROUTE, content=json.dumps(task("a")), headers=lines)).status_code == 403
        assert await here.listed(split="custom") == []


async def test_if_signatures_are_optional_a_bundle_of_an_unknown_key_counts_as_unsigned(keys: Path) -> None:
    foreign = sign([task("a")], read_private(keys.parent / "other"))
    async with world(trusted=read_trusted(keys)) as here:
        answer = await here.post(foreign)

        assert (answer.status_code, answer.json()["signed_by"]) == (201, None)
        assert problems(await here.post({**foreign, "key": 3})) == ["key"]
        assert (await here.post(foreign, replace="true", split="train")).json()["code"] == "bundle_refused"


NOW = datetime.now(UTC)
DAY = timedelta(days=1)


async def refusal(here: World, bundle: object, path: str = ROUTE, **query: str) -> str:
    """Return why a bundle is refused; it adds no task."""
    before = await here.listed()
    answer = await here.post(bundle, path, **query)
    assert (answer.status_code, answer.json()["code"]) == (403, "bundle_refused"), answer.text
    assert await here.listed() == before
    return str(answer.json()["detail"])


async def test_an_older_bundle_does_not_come_back_over_a_newer_one(keys: Path) -> None:
    key = read_private(keys / "lab")
    old, mended = (
        sign([task("a", tags=[tag])], key, made_at=NOW - age) for tag, age in (("old", 2 * DAY), ("new", DAY))
    )
    async with world(trusted=read_trusted(keys)) as here:
        assert (await here.post(old)).status_code == 201
        assert (await here.post(mended, replace="true")).status_code == 200

        said = await refusal(here, old, replace="true")

        assert old["made_at"] in said
        assert mended["made_at"] in said
        assert await here.listed(tag="new") == ["a"]
        assert (await here.post(mended, replace="true")).status_code == 200, "an operator may repeat an upload"
        assert (await here.client.delete(f"{ROUTE}/math/a")).status_code == 204
        await refusal(here, old)


async def test_a_bundle_that_is_only_tried_or_refused_bars_no_other(keys: Path) -> None:
    key = read_private(keys / "lab")
    older = sign([task("a")], key, made_at=NOW - DAY)
    newer = sign([task("a")], key)
    unplayable = sign([task("b", on_create="refuse")], key)
    async with world(trusted=read_trusted(keys)) as here:
        assert (await here.post(older)).status_code == 201
        assert (await here.post(newer, f"{ROUTE}/validate")).status_code == 200
        assert (await here.post(unplayable, validate="true")).status_code == 400
        assert (await here.post(newer)).status_code == 409

        assert (await here.post(older, replace="true")).status_code == 200


async def test_bundles_for_two_environments_may_come_in_any_order(keys: Path) -> None:
    key = read_private(keys / "lab")
    math, coding = (
        sign([{"id": "a", "instruction": "go"}], key, environment=name, made_at=NOW - age)
        for name, age in (("sums", 2 * DAY), ("coding", DAY))
    )
    async with world(trusted=read_trusted(keys)) as here:
        for bundle in (coding, math):
            assert (await here.post(bundle)).status_code == 201

        older = sign([task("b")], key, environment="math", made_at=NOW - 3 * DAY)
        assert math["made_at"] in await refusal(here, older), "an environment's other name is the same environment"


@pytest.mark.parametrize("signatures", ["optional", "required"])
async def test_a_bundle_that_is_not_for_this_time_or_gateway_is_refused(keys: Path, signatures: str) -> None:
    key = read_private(keys / "lab")
    async with world(trusted=read_trusted(keys), signatures=signatures) as here:
        for path in (ROUTE, f"{ROUTE}/validate"):
            assert "expired at" in await refusal(here, sign([task("a")], key, made_at=NOW - 31 * DAY), path)
            assert "clocks" in await refusal(here, sign([task("a")], key, made_at=NOW + DAY), path)
            assert "--instance lab-1" in await refusal(here, sign([task("a")], key, instance="lab-2"), path)
        assert (await here.post(sign([task("a")], key, instance="lab-1"))).status_code == 201


async def test_the_query_cannot_change_the_signed_environment_and_split(keys: Path) -> None:
    key = read_private(keys / "lab")
    bare = {"id": "a", "instruction": "go"}
    async with world(trusted=read_trusted(keys)) as here:
        signed = sign([{**bare, "split": "own"}], key, environment="math", split="train")
        for query in ({"environment": "coding"}, {"split": "test"}):
            (name,) = query
            assert f"names the {name} {query[name]!r}, but the bundle is signed for" in await refusal(
                here, signed, **query
            )
        for query in ({"environment": "math"}, {"split": "train"}):
            assert "that of each task" in await refusal(here, sign([task("b")], key), **query)

        added = await here.post(signed, environment="sums", split="train")

        assert added.json()["tasks"] == [
            {"environment": "math", "id": "a", "split": "train", "index": 2, "replaced": False}
        ]
        assert problems(await here.post(sign([task("c", "coding")], key, environment="math"))) == ["tasks[0].env_type"]
        assert problems(await here.post(sign([bare], key))) == ["tasks[0].env_type"]


async def test_a_bundle_of_the_former_format_is_refused_with_the_remedy(keys: Path) -> None:
    bundle = sign([task("a")], read_private(keys / "lab"))
    old = {name: bundle[name] for name in ("tasks", "key", "signature")} | {"format": "env-gateway-tasks/1"}
    async with world(trusted=read_trusted(keys)) as here:
        answer = await here.post(old)

        assert problems(answer) == ["format"]
        assert "sign the tasks again with gateway tasks sign" in answer.json()["detail"]


async def test_a_bundle_in_yaml_with_other_keys_than_the_signed_ones_is_refused(keys: Path) -> None:
    bundle = sign([task("a", config={"1": "x"})], read_private(keys / "lab"))
    headers = {"content-type": "application/yaml"}
    async with world(trusted=read_trusted(keys)) as here:
        text = json.dumps(bundle)
        forged = await here.client.post(ROUTE, content=text.replace('{"1": "x"}', '{1: "x"}'), headers=headers)

        assert problems(forged) == ["tasks"]
        assert (await here.client.post(ROUTE, content=text, headers=headers)).status_code == 201


# -- the command --------------------------------------------------------------------------------------------------


async def command(here: World, *arguments: object) -> Any:
    words = ["tasks", *map(str, arguments), "--url", str(here.client.base_url)]
    return await asyncio.to_thread(CliRunner().invoke, commands, words)


async def test_the_commands_sign_validate_and_add_a_bundle_where_signatures_are_required(
    keys: Path, tmp_path: Path
) -> None:
    file, bundle = tmp_path / "a.yaml", tmp_path / "a.bundle.json"
    file.write_text(
        "- {id: a, instruction: go}\n- {id: b, instruction: go, on_create: refuse}\n- {id: c, instruction: go}\n"
    )
    words = ["tasks", "sign", file, "--key", keys / "lab", "-o", bundle, "-e", "math", "--instance", "lab-1"]
    signed = await asyncio.to_thread(CliRunner().invoke, commands, list(map(str, words)))
    assert signed.exit_code == 0, signed.output
    async with world(trusted=read_trusted(keys), signatures="required") as here:
        assert "not_signed" in (await command(here, "validate", file, "-e", "math")).output
        tried = await command(here, "validate", bundle)
        assert (tried.exit_code, tried.output.count("\n")) == (2, 1)
        assert f"{bundle}: tasks[1]: invalid_request: " in tried.output
        misplaced = await command(here, "add", bundle, "--split", "train")
        assert (misplaced.exit_code, "bundle_refused" in misplaced.output) == (2, True)

        added = await command(here, "add", bundle)

        assert added.output.splitlines()[0] == "added math a (custom/0)"


async def test_the_commands_validate_add_replace_list_and_remove_tasks(here: World, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("- {id: custom/a, env_type: math, tags: [x]}\n- {id: custom/b, env_type: coding}\n")
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(task("custom/bad", on_create="refuse")))

    async def run(*arguments: object) -> Any:
        return await command(here, *arguments)

    assert (await run("validate", file)).exit_code == 0
    refused = await run("validate", file, bad)
    assert refused.exit_code == 2
    assert f"{bad}: invalid_request: " in refused.output
    added = await run("add", file)
    assert added.output.splitlines() == [
        "added math custom/a (custom/0)",
        "added coding custom/b (custom/0)",
    ]
    again = await run("add", file)
    assert (again.exit_code, "task_exists" in again.output) == (2, True)
    assert (await run("add", file, "--replace", "--validate")).output.startswith("replaced math custom/a")
    assert (await run("add", bad, "--validate")).exit_code == 2
    listed = await run("list", "--json")
    assert [json.loads(line)["id"] for line in listed.output.splitlines()] == ["custom/b", "t0", "t1", "custom/a"]
    assert "custom/a" in (await run("list", "--tag", "x")).output
    assert (await run("remove", "math", "custom/a")).exit_code == 0
    assert (await run("remove", "math", "custom/a")).exit_code == 2
    assert await here.listed(split="custom") == ["custom/b"]
