"""Every kind of client plays on every kind of image: the image is unmodified, and so is the client.

A row is an image, a column a client; each cell looks at what is on offer, wins an episode and loses another one.
"""

import pytest

from tests.wire.any.cases import CASES, Case
from tests.wire.any.places import EMBEDDED, GATEWAYS, STACK, Place, marks, on
from tests.wire.any.players import TRAINERS, at_gateway, plays_both
from tests.wire.openenv.clients import FIRST_ASYNC, NEWEST, DriverOf, connected

pytestmark = [pytest.mark.wire, pytest.mark.parallel, pytest.mark.timeout(240)]

CELLS = [
    pytest.param(place, case, client, id=f"{place}-{name}-by-{client}", marks=marks(place))
    for place in GATEWAYS
    for name, case in CASES.items()
    for client in TRAINERS
    if place == STACK or case.is_local
]


@pytest.mark.parametrize(("place", "case", "client"), CELLS, indirect=["place"])
async def test_every_client_plays_on_every_image(place: Place, case: Case, client: str, driver_of: DriverOf) -> None:
    await plays_both(TRAINERS[client](driver_of), case, at_gateway(place.url, case.environment))


@on(*GATEWAYS)
@pytest.mark.parametrize("version", [NEWEST, FIRST_ASYNC])
async def test_a_tool_client_uses_the_tools_of_an_mcp_image(place: Place, version: str, driver_of: DriverOf) -> None:
    async with connected(driver_of(version), place.openenv("openenv-mcp"), kind="mcp") as client:
        reset = await client.reset(seed=1)
        state = await client.state()
        tools = await client.call("list_tools")
        echoed = await client.call("call_tool", "echo_message", message="hi")
        last = await client.step({"$call_tool": {"tool_name": "finish", "arguments": {"word": "candle"}}})

    assert reset["done"] is False  # the older one shows no more of a first observation
    assert state["step_count"] == 0
    assert sorted(tool["name"] for tool in tools) == ["echo_message", "finish", "wait"]
    assert echoed == "hi"
    assert (last["reward"], last["done"]) == (1.0, True)


@on(EMBEDDED, STACK)
@pytest.mark.parametrize("environment", ["openenv-counter", "openenv-counter-020"])
async def test_a_client_of_the_images_own_protocol_sees_what_the_image_says(
    place: Place, environment: str, driver_of: DriverOf
) -> None:
    async with connected(driver_of(NEWEST), place.openenv(environment)) as client:
        reset = await client.reset(seed=1, episode_id="mine")
        stepped = await client.step({"op": "inc", "by": 2})
        state = await client.state()
        again = await client.reset(seed=2)

    assert reset["observation"].items() >= {"value": 0, "target": 4, "text": "Count to 4."}.items()
    assert (stepped["observation"]["value"], stepped["reward"], stepped["done"]) == (2, 0.0, False)
    assert state == {"episode_id": "mine", "step_count": 1}
    assert again["observation"]["target"] == 5
