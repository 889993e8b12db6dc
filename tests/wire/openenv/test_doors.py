"""Entry points for clients: URL prefixes, keys in headers and in paths, and routes that need no key."""

import pytest

from tests.wire.gateways import OPERATOR_KEY
from tests.wire.openenv.clients import NEWEST, OLDEST, ClientError, Driver, DriverOf, connected, run_cli
from tests.wire.openenv.servers import ALICE, ALL, BOB, EMBEDDED, OFFICIAL, Place, on

pytestmark = [pytest.mark.wire]


@on(EMBEDDED)
@pytest.mark.parametrize("slash", ["", "/"])
@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_base_url_works_with_and_without_a_trailing_slash(
    place: Place, newest: Driver, slash: str, scheme: str
) -> None:
    async with connected(newest, place.url().replace("http", scheme, 1) + slash) as client:
        reset = await client.reset(index=0)

    assert reset["observation"]["text"] == "ready"


@on(EMBEDDED)
@pytest.mark.parametrize("headers", [{"Authorization": f"Bearer {ALICE}"}, {"X-API-Key": ALICE}])
@pytest.mark.parametrize("kind", ["generic", "mcp"])
async def test_a_client_sends_its_key_in_a_header(
    place: Place, newest: Driver, headers: dict[str, str], kind: str
) -> None:
    url = f"{place.root}/openenv/counting"
    async with connected(newest, url, kind=kind, headers=headers) as client:
        reset = await client.reset(index=0)

    assert reset["observation"]["text"] == "ready"
    assert ALICE not in place.behind().log


@on(EMBEDDED)
async def test_a_client_that_sends_no_headers_has_its_key_in_the_path(place: Place, driver_of: DriverOf) -> None:
    async with connected(driver_of(OLDEST), place.url(), kind="typed", mode="direct") as client:
        reset = await client.reset(index=0)

    assert reset["observation"]["text"] == "ready"
    assert ALICE not in place.behind().log


@on(EMBEDDED)
@pytest.mark.parametrize("key", ["not-the-key", OPERATOR_KEY])
@pytest.mark.parametrize(("version", "kind", "mode"), [(NEWEST, "generic", "async"), (OLDEST, "typed", "direct")])
async def test_a_wrong_key_is_refused_on_the_upgrade(
    place: Place, driver_of: DriverOf, key: str, version: str, kind: str, mode: str
) -> None:
    with pytest.raises(ClientError) as refused:
        async with connected(driver_of(version), place.url(key=key), kind=kind, mode=mode):
            pass

    assert refused.value.kind == "ConnectionError"
    assert "HTTP 401" in refused.value.message


@on(EMBEDDED)
async def test_an_unknown_environment_is_refused_on_the_upgrade(place: Place, newest: Driver) -> None:
    with pytest.raises(ClientError) as refused:
        async with connected(newest, place.url("nosuch")):
            pass

    assert refused.value.kind == "ConnectionError"
    assert "HTTP 40" in refused.value.message


@on(EMBEDDED)
async def test_a_session_of_another_key_is_not_found(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url(), kind="mcp") as client:
        await client.reset(index=0)
        (session,) = await place.behind().sessions()
        stranger = f"{place.url(key=BOB)}/mcp"
        async with place.http() as http:
            listing = {"session_id": session["name"], "name": "act", "arguments": {"op": "inc"}}
            body = {"jsonrpc": "2.0", "method": "tools/call", "params": listing, "id": 1}
            answer = (await http.post(stranger, json=body)).json()
        state = await client.state()

    assert answer["error"]["code"] == -32602
    assert "Unknown session_id" in answer["error"]["message"]
    assert state["step_count"] == 0


@on(*ALL)
async def test_health_needs_no_key(place: Place) -> None:
    path = "/health" if place.name == OFFICIAL else f"{place.root}/openenv/counting/health"

    async with place.http() as http:
        answer = await http.get(path)

    assert (answer.status_code, answer.json()) == (200, {"status": "healthy"})


@on(EMBEDDED)
async def test_health_needs_no_worker(place: Place, newest: Driver) -> None:
    """Clients give up after 2 s, and a worker may take longer to start or to become free."""
    async with connected(newest, place.url("lonely")) as client:
        await client.reset(index=0)  # takes the environment's only worker
        async with place.http("lonely") as http:
            answer = await http.get("/health")
        state = await client.state()

    assert (answer.status_code, answer.json()) == (200, {"status": "healthy"})
    assert state["step_count"] == 0


@on(EMBEDDED)
async def test_the_official_openenv_validator_passes(place: Place) -> None:
    outcome = run_cli("validate", "--url", place.url(), "--timeout", "30")

    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "FAIL" not in outcome.stdout
