"""Secrets reach the two official ORS servers, each in its own way; where they can't arrive, that is said."""

import pytest

from tests.wire.any.places import GATEWAYS, Place, on
from tests.wire.sdks import SDKS, text

pytestmark = [pytest.mark.wire, pytest.mark.parallel]


@on(*GATEWAYS)
@pytest.mark.parametrize("sdk", list(SDKS))
@pytest.mark.parametrize("environment", ["ors-sdk", "openreward"])
async def test_a_secret_of_either_client_reaches_either_server(place: Place, sdk: str, environment: str) -> None:
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


@on(*GATEWAYS)
@pytest.mark.parametrize("environment", ["openenv-counter", "areal-guess"])
async def test_a_secret_that_cannot_arrive_is_refused(place: Place, environment: str) -> None:
    sdk = SDKS["ors"]
    async with sdk.connect(place.url, None) as client:
        offered = client.environment(environment)
        async with offered.session(split="train", index=0, secrets={"TOKEN": "s3cret"}) as session:
            with pytest.raises(RuntimeError, match=r"400, .*secrets") as refused:
                await session.get_prompt()

    assert "s3cret" not in str(refused.value)
