"""How a request finds its environment: paths with and without the environment's name, deployments, spellings."""

import httpx
import ors.client
import pytest
from openreward import AsyncOpenReward

from tests.wire.raw import create, episode, new_sid, parse
from tests.wire.sdks import ORS, names, text
from tests.wire.targets import ALL, ONE_GATEWAY, OURS, Target, on, tasks_of

pytestmark = pytest.mark.wire


@on("openreward-server", *OURS)
@pytest.mark.parametrize("name", ["probe", "local/probe", "Owner/Probe", "finqa", "http://elsewhere:9/x"])
async def test_a_client_without_a_variant_talks_to_the_default_environment(target: Target, name: str) -> None:
    # The client's paths then name no environment. The client sends its name only as X-Deployment.
    client = AsyncOpenReward(api_key=target.key)
    try:
        environment = client.environments.get(name, base_url=target.url)
        task = await environment.get_task("train", 0)
        async with environment.session(task=task) as inline, environment.session(split="train", index=0) as referred:
            prompt = await inline.get_prompt()
            assert await referred.get_prompt() == prompt
            output = text(await inline.call_tool("echo", {"text": "bare"}))
    finally:
        await client.environments.aclose()

    assert task.environment_name == "probe"
    assert prompt[0].text == next(tasks_of("probe", "train"))["question"]
    assert output == "bare"


@on(*ONE_GATEWAY)
@pytest.mark.parametrize("deployment", ["counter", "Owner/Counter", "local/counter"])
async def test_a_deployment_with_the_name_of_an_environment_selects_that_environment(
    target: Target, deployment: str
) -> None:
    client = AsyncOpenReward(api_key=target.key)
    try:
        environment = client.environments.get(deployment, base_url=target.url)
        tools = await environment.list_tools()
        async with environment.session(split="train", index=2) as session:
            prompt = await session.get_prompt()
            total = text(await session.call_tool("add", {"n": 5}))
    finally:
        await client.environments.aclose()

    assert names(tools) == ["add", "stop"]
    assert prompt[0].text == "The counter stands at 2."
    assert total == "7"


@on("openreward-server", *OURS)
async def test_a_base_url_with_a_trailing_slash_works_with_the_openreward_client(target: Target) -> None:
    # With such a base URL the openreward client pings //ping.
    client = AsyncOpenReward(api_key=target.key)
    try:
        environment = client.environments.get("probe", variant="probe", base_url=f"{target.url}/")
        async with environment.session(split="train", index=0) as session:
            assert text(await session.call_tool("echo", {"text": "slash"})) == "slash"
    finally:
        await client.environments.aclose()


@on(*OURS)
async def test_a_ping_with_two_slashes_is_a_ping(http: httpx.AsyncClient) -> None:
    async with episode(http) as opened:
        response = await http.post(f"{str(http.base_url).rstrip('/')}//ping", headers=opened.headers)

    assert (response.status_code, response.text) == (200, '{"status":"ok"}')


@on("ors-server", *OURS)
async def test_a_base_url_with_a_trailing_slash_works_with_the_ors_client(target: Target) -> None:
    async with ORS.connect(f"{target.url}/", target.key) as client:
        environment = client.environment("probe")
        async with environment.session(task=ORS.task("probe", {})) as session:
            assert text(await session.call_tool("echo", {"text": "slash"})) == "slash"


@on(*ALL)
async def test_the_name_of_an_environment_is_case_insensitive(target: Target, http: httpx.AsyncClient) -> None:
    sid = new_sid()

    tools = await http.get("/CoUnTeR/tools")
    created = await create(http, sid, env_name="COUNTER", task_spec={"start": 4})
    prompt = await http.get("/Counter/prompt", headers={"X-Session-ID": sid})
    deleted = await http.post("/delete", headers={"X-Session-ID": sid})

    assert [tool["name"] for tool in tools.json()["tools"]] == ["add", "stop"]
    assert created.status_code == 200
    assert prompt.json()[0]["text"] == "The counter stands at 4."
    assert deleted.status_code == 200


@on(*OURS)
async def test_bare_paths_are_served_without_a_redirect(http: httpx.AsyncClient) -> None:
    tools = await http.get("/tools")
    task = await http.post("/task", json={"split": "train", "index": 0})
    async with episode(http) as opened:
        prompt = await http.get("/prompt", headers=opened.headers)
        called = await http.post("/call", headers=opened.headers, json={"name": "echo", "input": {"text": "bare"}})

    assert tools.status_code == prompt.status_code == 200
    assert task.json()["env_name"] == "probe"
    assert parse(called.text).text == "bare"


@on("ors-server", "openreward-server", *OURS)
async def test_bare_paths_reach_the_default_environment_after_redirects(http: httpx.AsyncClient) -> None:
    tools = await http.get("/tools?a=b%20c", follow_redirects=True)
    splits = await http.get("/splits", follow_redirects=True)
    tasks = await http.post("/num_tasks", json={"split": "test"}, follow_redirects=True)

    assert tools.json() == (await http.get("/probe/tools")).json()
    assert [split["name"] for split in splits.json()] == ["train", "test"]
    assert tasks.json() == {"num_tasks": 2}


@on(*ALL)
@pytest.mark.parametrize("path", ["/nosuch/tools", "/probe/nosuch", "/probe/tools/more"])
async def test_an_unknown_path_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(path, follow_redirects=True)

    assert response.status_code == 404
    assert response.json()["detail"].startswith("Not Found")


@on("openreward-server", *OURS)
async def test_a_path_with_a_trailing_slash_redirects_to_the_path_without_it(http: httpx.AsyncClient) -> None:
    response = await http.get("/probe/tools/")
    followed = await http.get("/probe/tools/", follow_redirects=True)

    assert response.status_code == 307
    assert response.headers["location"].endswith("/probe/tools")
    assert followed.status_code == 200


@on(*OURS)
@pytest.mark.parametrize("host", ["sessions.example.org", "api.localhost", "gateway:8080"])
async def test_any_host_header_is_accepted(http: httpx.AsyncClient, host: str) -> None:
    assert (await http.get("/health", headers={"Host": host})).status_code == 200
    assert (await http.get("/probe/splits", headers={"Host": host})).status_code == 200


@on(*ONE_GATEWAY)
async def test_a_path_that_contradicts_the_session_is_a_conflict(http: httpx.AsyncClient) -> None:
    async with episode(http, {"start": 1}, environment="counter") as opened:
        response = await http.get("/probe/prompt", headers=opened.headers)
        right = await opened.get("prompt")

    assert response.status_code == 409
    assert isinstance(response.json()["detail"], str)
    assert right.status_code == 200


@on(*ONE_GATEWAY)
async def test_a_session_whose_create_names_no_environment_takes_it_from_the_first_path(
    http: httpx.AsyncClient,
) -> None:
    sid = new_sid()

    created = await create(http, sid, split="train", index=1)
    prompt = await http.get("/counter/prompt", headers={"X-Session-ID": sid})
    other = await http.get("/probe/prompt", headers={"X-Session-ID": sid})
    await http.post("/delete", headers={"X-Session-ID": sid})

    assert created.status_code == 200
    assert prompt.json()[0]["text"] == "The counter stands at 1."
    assert other.status_code == 409


@on(*ONE_GATEWAY)
async def test_a_create_with_a_split_that_no_environment_has_is_refused_immediately(http: httpx.AsyncClient) -> None:
    response = await create(http, new_sid(), split="nowhere", index=0)

    assert response.status_code == 400
    assert response.json()["detail"].startswith("Invalid split: there is no 'nowhere'; there are ")


@on("ors-server", *OURS)
def test_one_blocking_client_reaches_several_environments(target: Target) -> None:
    with ors.client.ORS(base_url=target.url, api_key=target.key) as client:
        listed = [names(client.environment(name).list_tools()) for name in ("counter", "slowsetup")]

    assert listed == [["add", "stop"], ["count"]]


@on(*ONE_GATEWAY)
async def test_health_and_readiness_need_no_key(target: Target) -> None:
    async with target.http(key="") as http:
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200
