"""Every kind of client plays on every kind of image. Both the image and the client are unmodified.

A row is an image, a column is a client. Each cell lists what the image offers, wins an episode and loses another. On
containers, one client of each protocol plays on each image: two clients of the same protocol alternate between the
images. An image that has no local process is played there by all clients.
"""

from typing import Any

import pytest

from tests.wire.any.cases import CASES
from tests.wire.any.places import EMBEDDED, STACK, Place, on, on_rows
from tests.wire.any.players import TRAINERS, at_gateway, plays_both
from tests.wire.openenv.clients import FIRST_ASYNC, NEWEST, DriverOf, connected
from tests.wire.sdks import SDKS, names, text

pytestmark = [pytest.mark.wire]

OF_TURN = (("ors", "areal", "openenv-0.10.0"), ("openreward", "areal", "openenv-0.2.0"))
"""Clients of all protocols: first for images with an even number, then for images with an odd number."""
CELLS = [
    *((EMBEDDED, name, client) for name, case in CASES.items() if case.is_local for client in TRAINERS),
    *(
        (STACK, name, client)
        for number, (name, case) in enumerate(CASES.items())
        for client in (OF_TURN[number % 2] if case.is_local else TRAINERS)
    ),
]


@on_rows("image client", *CELLS)
async def test_every_client_plays_on_every_image(place: Place, image: str, client: str, driver_of: DriverOf) -> None:
    case = CASES[image]
    await plays_both(TRAINERS[client](driver_of), case, at_gateway(place.url, case.environment))


@on(EMBEDDED)
@pytest.mark.parametrize("version", [NEWEST, FIRST_ASYNC])
async def test_a_tool_client_uses_the_tools_of_an_mcp_image(place: Place, version: str, driver_of: DriverOf) -> None:
    async with connected(driver_of(version), place.openenv("openenv-mcp"), kind="mcp") as client:
        reset = await client.reset(seed=1)
        state = await client.state()
        tools = await client.call("list_tools")
        echoed = await client.call("call_tool", "echo_message", message="hi")
        last = await client.step({"$call_tool": {"tool_name": "finish", "arguments": {"word": "candle"}}})

    assert reset["done"] is False  # the older client shows only this part of a first observation
    assert state["step_count"] == 0
    assert sorted(tool["name"] for tool in tools) == ["echo_message", "finish", "wait"]
    assert echoed == "hi"
    assert (last["reward"], last["done"]) == (1.0, True)


@on(EMBEDDED)
@pytest.mark.parametrize("environment", ["openenv-counter", "openenv-counter-020"])
async def test_a_client_of_the_images_own_protocol_sees_the_images_own_observations_and_state(
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


@on(EMBEDDED)
async def test_a_toolset_that_the_openreward_client_requests_comes_from_the_server(place: Place) -> None:
    async with SDKS["openreward"].connect(place.url, None) as client:
        riddles: Any = client.environment("openreward")  # the other package has no toolsets
        async with riddles.session(split="train", index=0, toolset="codex") as session:
            tools = names(await session.list_tools())
            ran = await session.call_tool("bash", {"command": "ls"})
            answered = await session.call_tool("answer", {"text": "river"})

    assert "bash" in tools
    assert text(ran).startswith("told to run ls")
    assert (answered.reward, answered.finished) == (1.0, True)


# -- secrets ---------------------------------------------------------------------------------------------------------


@on(EMBEDDED)
@pytest.mark.parametrize("sdk", list(SDKS))
@pytest.mark.parametrize("environment", ["ors-sdk", "openreward"])
async def test_a_secret_from_either_ors_client_reaches_either_ors_server(
    place: Place, sdk: str, environment: str
) -> None:
    async with (
        SDKS[sdk].connect(place.url, None) as client,
        client.environment(environment).session(
            split="test", index=0, secrets=SDKS[sdk].secrets({"TOKEN": "s3cret-5521"})
        ) as session,
    ):
        given = text(await session.call_tool("has_secret", {"name": "TOKEN"}))
        absent = text(await session.call_tool("has_secret", {"name": "OTHER"}))

    assert (given, absent) == ("yes", "no")
    assert "s3cret-5521" not in place.gateway.log


@on(EMBEDDED)
@pytest.mark.parametrize("environment", ["openenv-counter", "areal-guess"])
async def test_a_secret_for_an_environment_that_cannot_receive_it_is_refused(place: Place, environment: str) -> None:
    sdk = SDKS["ors"]
    async with sdk.connect(place.url, None) as client:
        offered = client.environment(environment)
        async with offered.session(split="train", index=0, secrets={"TOKEN": "s3cret"}) as session:
            with pytest.raises(RuntimeError, match=r"400, .*secrets") as refused:
                await session.get_prompt()

    assert "s3cret" not in str(refused.value)
