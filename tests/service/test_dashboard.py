"""The dashboard of a whole gateway: who sees which page, what the pages show, and what cookies are good for."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.core.environment import TaskView
from gateway.core.ids import EnvironmentName
from gateway.core.ports.step_log import REFERENCE
from gateway.core.session import CloseReason
from gateway.frontends.dashboard.app import POLICY
from gateway.frontends.dashboard.sign_in import COOKIE
from gateway.stores.step_log.reader import StepLogReader
from tests.fakes.eventually import eventually
from tests.fakes.workers import Start
from tests.service.stack import environment, running, tasks
from tests.service.test_curricula import curriculum
from tests.service.test_step_log import LOG, OPERATOR, listed, logging
from tests.service.wire import call, create, delete

TRAINER_KEY, OPERATOR_KEY = LOG["trainers"]["alice"], LOG["operators"]["boss"]
PAGES = ("now", "environments/math", "episodes", "curricula", "doctor")
PAGE = {"Sec-Fetch-Site": "same-origin", "HX-Request": "true"}


async def signed_in(client: httpx.AsyncClient, key: str, path: str = "") -> httpx.Response:
    """Give *key* in the form, as a browser does; later requests of *client* have the cookie and no key."""
    client.headers.pop("X-API-Key", None)
    return await client.post("/dashboard/sign-in", data={"key": key, "path": path})


async def played(client: httpx.AsyncClient, sid: str = "one", **task: Any) -> None:
    headers = {"X-API-Key": TRAINER_KEY}
    client.headers.update(headers)
    await create(client, sid, **task)
    await client.get("/math/prompt", headers={"X-Session-ID": sid})
    await call(client, sid=sid)
    await delete(client, sid)
    client.headers.pop("X-API-Key")


async def test_an_operator_sees_every_page_also_as_json(tmp_path: Path) -> None:
    kind = curriculum(handles=5)
    async with logging(tmp_path, curricula=kind, tasks_math=tasks(train=[{"id": "a", "question": "1"}])) as (
        _,
        _,
        client,
    ):
        await played(client, question="<script>alert(1)</script>", tags=["easy"])
        (line,) = await listed(client)
        assert (await signed_in(client, OPERATOR_KEY, "/dashboard/episodes")).headers[
            "location"
        ] == "/dashboard/episodes"
        for page in (*PAGES, f"episodes/{line['id']}", "curricula/mine"):
            shown = await client.get(f"/dashboard/{page}")
            plain = await client.get(f"/dashboard/{page}.json")

            assert (shown.status_code, plain.status_code) == (200, 200), (page, shown.text, plain.text)
            assert shown.headers["content-type"].startswith("text/html")
            assert shown.headers["content-security-policy"] == POLICY
            assert isinstance(plain.json(), dict)
            assert "<script>alert" not in shown.text
            assert f'href="/dashboard/{page}.json"' in shown.text
        found = (await client.get("/dashboard/episodes", params={"tag": "easy"})).text
        other = (await client.get("/dashboard/episodes", params={"tag": "hard"})).text

    assert f"/dashboard/episodes/{line['id']}" in found
    assert "No recorded episode matches tag hard. Filters compare whole texts." in other


async def test_a_trainer_sees_its_own_episodes_only_and_changes_nothing(tmp_path: Path) -> None:
    keys = {"alice": TRAINER_KEY, "bob": "bob-key-456789"}
    async with running(step_log=tmp_path, **{**LOG, "trainers": keys}) as (_, gateway, client):
        await played(client)
        client.headers["X-API-Key"] = keys["bob"]
        await create(client, "bobs")
        (mine,) = await listed(client, owner="alice")
        (theirs,) = await listed(client, owner="bob")
        begin = await signed_in(client, TRAINER_KEY)
        home = await client.get("/dashboard/")
        episodes = (await client.get("/dashboard/episodes.json", params={"owner": "bob"})).json()["episodes"]
        own = await client.get(f"/dashboard/episodes/{mine['id']}")
        other = await client.get(f"/dashboard/episodes/{theirs['id']}")
        closed = {page: (await client.get(f"/dashboard/{page}")).status_code for page in PAGES if page != "episodes"}
        ended = await client.delete(f"/admin/v1/sessions/{theirs['id']}", headers=PAGE)
        await gateway.sessions.end("bob", "bobs", CloseReason.OPERATOR, wait_s=5)  # type: ignore[arg-type]

    assert (begin.status_code, home.headers["location"]) == (303, "/dashboard/episodes")
    assert [episode["id"] for episode in episodes] == [mine["id"]]
    assert (own.status_code, other.status_code) == (200, 404)
    assert set(closed.values()) == {403}
    assert ended.status_code == 401


async def test_without_a_key_there_is_only_the_form(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        client.headers.pop("X-API-Key")
        pages = {page: await client.get(f"/dashboard/{page}") for page in PAGES}
        plain = await client.get("/dashboard/now.json")
        wrong = await signed_in(client, "wrong-key-12345")
        file = await client.get("/dashboard/static/dashboard.css")
        missing = await client.get("/dashboard/static/../pages.py")

    assert {page.status_code for page in pages.values()} == {401}
    assert all('name="key"' in page.text for page in pages.values())
    assert (plain.status_code, plain.json()) == (401, {"detail": "sign in with a key of this gateway"})
    assert (wrong.status_code, "not known here" in wrong.text, COOKIE in wrong.headers.get("set-cookie", "")) == (
        401,
        True,
        False,
    )
    assert (file.status_code, missing.status_code) == (200, 404)


async def test_a_cookie_is_for_pages_of_this_server_only(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, gateway, client):
        await create(client)
        answer = await signed_in(client, OPERATOR_KEY)
        cookie = answer.headers["set-cookie"]
        (line,) = await listed(client)
        path = f"/admin/v1/sessions/{line['id']}"
        refused = [
            (await client.delete(path)).status_code,
            (await client.delete(path, headers={"Sec-Fetch-Site": "same-origin"})).status_code,
            (await client.delete(path, headers={**PAGE, "Sec-Fetch-Site": "cross-site"})).status_code,
            (await client.post("/create", json={}, headers=PAGE)).status_code,
            (await client.get("/admin/v1/workers")).status_code,
            (await client.get("/admin/v1/workers", headers={"Sec-Fetch-Site": "none"})).status_code,
        ]
        # Over plain HTTP from another machine, browsers do not state the site.
        remote = await client.get("/admin/v1/workers", headers={"HX-Request": "true"})
        log = await client.get(f"/admin/v1/workers/{line['worker']}/log", headers={"Sec-Fetch-Site": "same-origin"})
        ended = await client.delete(path, headers=PAGE)
        await gateway.eventually_used(0)
        out = await client.post("/dashboard/sign-out")
        after = await client.get("/dashboard/now")

    assert all(word in cookie for word in ("HttpOnly", "SameSite=strict"))
    assert OPERATOR_KEY not in cookie
    assert refused == [401] * 6
    assert (remote.status_code, log.status_code, ended.status_code) == (200, 200, 200)
    assert (out.status_code, after.status_code) == (303, 401)


@pytest.mark.parametrize(
    "path",
    ["https://evil.example/", "//evil.example", "/dashboard//evil.example", "/admin/v1/tasks", "/dashboard/\\evil"],
)
async def test_signing_in_leads_to_no_other_site(tmp_path: Path, path: str) -> None:
    async with logging(tmp_path) as (_, _, client):
        answer = await signed_in(client, OPERATOR_KEY, path)

    assert answer.headers["location"] == "/dashboard/"


async def test_a_gateway_without_keys_shows_everything_to_its_own_machine() -> None:
    async with running() as (_, _, client):
        shown = await client.get("/dashboard/now")
        foreign = await client.get("/dashboard/now", headers={"Host": "evil.example"})

    assert (shown.status_code, foreign.status_code) == (200, 403)
    assert "Sign out" not in shown.text


async def test_an_episode_that_failed_looks_different_by_its_cause(tmp_path: Path) -> None:
    async with logging(tmp_path) as (built, gateway, client):
        await played(client, "agent")
        client.headers["X-API-Key"] = TRAINER_KEY
        await create(client, "author", on_create="fail")
        await create(client, "machine")
        await built.backend.only.die()
        await gateway.eventually_used(0)
        await signed_in(client, OPERATOR_KEY)
        now = await client.get("/dashboard/now")
        rows = {row["name"]: row for row in (await client.get("/dashboard/episodes.json")).json()["episodes"]}
        listed_page = (await client.get("/dashboard/episodes")).text

    assert (rows["agent"]["outcome"], rows["machine"]["outcome"]) == ("finished", "infrastructure")
    assert re.search(r'class="outcome infrastructure">infrastructure', listed_page)
    assert re.search(r'class="outcome finished">finished', listed_page)
    assert "machine" in now.text


async def test_an_environment_whose_workers_do_not_start_shows_the_reason(tmp_path: Path) -> None:
    async with logging(tmp_path) as (stack, _, client):
        stack.backend.starts[EnvironmentName("math")] = Start.REFUSED
        await signed_in(client, OPERATOR_KEY)

        async def is_shown() -> None:  # after several failed starts
            refused = await client.post("/create", json={"task_spec": {}}, headers={"X-API-Key": TRAINER_KEY})
            assert refused.status_code == 503
            shown = await client.get("/dashboard/environments/math")
            assert '<pre class="error">' in shown.text
            assert "the engine has no such image" in shown.text

        await eventually(is_shown)
        assert "starts fail" in (await client.get("/dashboard/now")).text


async def test_an_episode_is_downloaded_and_copied(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        await played(client, seed=3)
        (line,) = await listed(client)
        await signed_in(client, TRAINER_KEY)
        answer = await client.get(f"/dashboard/episodes/{line['id']}.jsonl")
        page = (await client.get(f"/dashboard/episodes/{line['id']}.json")).json()
        again = await client.post("/admin/v1/replays", json=json.loads(answer.text), headers=OPERATOR)

    assert answer.headers["content-disposition"] == f'attachment; filename="{line["id"]}.jsonl"'
    assert again.json()["differs_in"] == []
    assert '"task_spec": {"question": "1+1", "seed": 3}' in page["curl"]
    assert TRAINER_KEY not in page["curl"]


async def test_the_link_to_a_group_leads_to_it_whatever_its_name(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        client.headers.update({"X-Group-ID": "a#1? b%/c", "X-Group-Size": "1"})
        await played(client)
        await signed_in(client, OPERATOR_KEY)
        link = re.search(r'href="(/dashboard/groups/[^"]+)"', (await client.get("/dashboard/episodes")).text)
        assert link is not None
        shown = await client.get(link[1])

    assert shown.status_code == 200
    assert "a#1? b%/c" in shown.text


@pytest.mark.parametrize("query", ["reward_min=x", "before=x", "since=x"])
async def test_a_wrong_filter_is_a_page_with_the_reason(tmp_path: Path, query: str) -> None:
    async with logging(tmp_path) as (_, _, client):
        await signed_in(client, OPERATOR_KEY)
        answer = await client.get(f"/dashboard/episodes?{query}")

    assert answer.status_code == 400
    assert query.partition("=")[0] in answer.text


async def test_an_episode_begins_with_its_evaluation_and_a_line_for_each_step(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        await played(client, instruction="1+1", evaluation={"expected": "3"}, other="field")
        (line,) = await listed(client)
        await signed_in(client, OPERATOR_KEY)
        page = (await client.get(f"/dashboard/episodes/{line['id']}")).text

    places = [page.index(text) for text in ("<h2>Instruction", "<h2>Evaluation", "Other fields", '<a href="#step-1">')]
    assert places == sorted(places)
    assert page.index('<a href="#step-1">') < page.index('id="step-1"')
    assert re.search(r"<code>echo {&#34;x&#34;: 1}</code></td><td>{&#34;x&#34;: 1}</td>", page)


async def test_the_search_field_leads_to_an_episode_or_to_the_episodes_of_a_task(tmp_path: Path) -> None:
    async with logging(tmp_path, tasks_math=tasks(train=[{"id": "sum/1", "question": "1"}])) as (_, _, client):
        await played(client, "named one")
        (line,) = await listed(client)

        async def found(wanted: str) -> str:
            answer = await client.get("/dashboard/find", params={"q": wanted})
            return str(answer.headers["location"])

        unknown = await client.get("/dashboard/find", params={"q": "named one"})
        await signed_in(client, OPERATOR_KEY)
        by_name, by_id, by_task = await found("named one"), await found(f" {line['id']} "), await found("sum/1&x")

    assert (unknown.status_code, 'name="key"' in unknown.text) == (401, True)
    assert by_name == by_id == f"/dashboard/episodes/{line['id']}"
    assert by_task == "/dashboard/episodes?task=sum%2F1%26x"


async def test_a_trainer_sees_no_answer_of_a_task_of_the_gateway(tmp_path: Path) -> None:
    task = {"id": "a", "instruction": "1+1", "evaluation": {"expected": "SECRET-2"}}
    math = replace(environment(), task_view=TaskView.PUBLIC)
    async with logging(tmp_path, math, tasks_math=tasks(train=[task])) as (_, _, client):
        client.headers["X-API-Key"] = TRAINER_KEY
        for sid, body in (
            ("listed", {"split": "train", "index": 0}),
            ("own", {"task_spec": {**task, "instruction": "1 + 1"}}),
        ):
            group = {"X-Session-ID": sid, "X-Group-ID": f"of {sid}", "X-Group-Size": "1"}
            opened = await client.post("/create", json={"env_name": "math", **body}, headers=group)
            assert opened.status_code == 200, opened.text
            await delete(client, sid)
        ids = {row["name"]: row["id"] for row in await listed(client)}
        suffixes = ("", ".json", ".jsonl")
        places = [f"episodes/{ids['listed']}{suffix}" for suffix in suffixes] + ["groups/math/of listed.json"]
        seen = {}
        for key in (TRAINER_KEY, OPERATOR_KEY):
            await signed_in(client, key)
            seen[key] = ["SECRET-2" in (await client.get(f"/dashboard/{place}")).text for place in places]
        await signed_in(client, TRAINER_KEY)
        own = (await client.get(f"/dashboard/episodes/{ids['own']}")).text

    assert seen == {TRAINER_KEY: [False] * 4, OPERATOR_KEY: [True] * 4}
    assert "SECRET-2" in own, "the trainer sent it"


async def test_a_trainer_gets_no_long_task_by_its_digest(tmp_path: Path) -> None:
    task = {"id": "a", "instruction": "1+1", "evaluation": {"expected": "2", "hidden": "x" * 5000}}
    math = replace(environment(), task_view=TaskView.PUBLIC)
    async with logging(tmp_path, math, tasks_math=tasks(train=[task])) as (_, _, client):
        client.headers["X-API-Key"] = TRAINER_KEY
        body = {"env_name": "math", "split": "train", "index": 0}
        assert (await client.post("/create", json=body, headers={"X-Session-ID": "one"})).status_code == 200
        (line,) = await listed(client)
        stored = await StepLogReader(tmp_path).episode(line["id"])
        assert stored is not None
        digest = stored["begin"]["spec"].removeprefix(REFERENCE)
        found = {}
        for key in (TRAINER_KEY, OPERATOR_KEY):
            await signed_in(client, key)
            found[key] = (await client.get(f"/dashboard/blobs/{digest}")).status_code

    assert found == {TRAINER_KEY: 404, OPERATOR_KEY: 200}


async def test_a_lone_surrogate_of_an_agent_spoils_no_page(tmp_path: Path) -> None:
    async with logging(tmp_path) as (_, _, client):
        client.headers["X-API-Key"] = TRAINER_KEY
        await create(client)
        content = b'{"name": "echo", "input": {"x": "\\ud800"}}'
        await client.post("/math/call", content=content, headers={"X-Session-ID": "one"})
        (line,) = await listed(client)
        await signed_in(client, OPERATOR_KEY)
        shown = [await client.get(f"/dashboard/episodes/{line['id']}{suffix}") for suffix in ("", ".json", ".jsonl")]

    assert [answer.status_code for answer in shown] == [200] * 3
    assert "\\ud800" in shown[0].text
