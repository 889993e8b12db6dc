"""The official clients of each release play the Gym loop, on the gateway and on the official server."""

import asyncio

import pytest

from tests.wire.openenv.clients import FIRST_ASYNC, NEWEST, OLDEST, ClientError, Driver, DriverOf, connected
from tests.wire.openenv.servers import ALL, EMBEDDED, Place, on

pytestmark = [pytest.mark.wire]

WAYS = pytest.mark.parametrize(
    ("version", "kind", "mode"),
    [
        pytest.param(version, kind, mode, id=f"{version}-{kind}-{mode}")
        for version, modes in ((NEWEST, ("async", "sync", "direct")), (FIRST_ASYNC, ("async", "sync")))
        for kind in ("generic", "typed")
        for mode in modes
    ]
    + [pytest.param(OLDEST, "typed", "direct", id=f"{OLDEST}-typed-direct")],
)


@on(*ALL)
@WAYS
async def test_an_episode_is_played_to_its_end(
    place: Place, driver_of: DriverOf, version: str, kind: str, mode: str
) -> None:
    async with connected(driver_of(version), place.url(), kind=kind, mode=mode) as client:
        first = await client.reset(split="test", index=0, episode_id="e-1")
        began = await client.state()
        steps = [await client.act("inc"), await client.act("noop"), await client.act("inc")]
        ended = await client.state()
        again = await client.reset(split="test", index=1)
        anew = await client.state()

    seen = [dict(result["observation"]) for result in (first, *steps, again)]
    assert [(it["value"], it["target"], it["text"]) for it in seen] == [
        (0, 2, "ready"),
        (1, 2, "value=1"),
        (1, 2, "value=1"),
        (2, 2, "value=2"),
        (0, 3, "ready"),
    ]
    assert [(result["reward"], result["done"]) for result in (first, *steps, again)] == [
        (None, False),
        (0.0, False),
        (0.0, False),
        (1.0, True),
        (None, False),
    ]
    assert (began["episode_id"], began["step_count"]) == ("e-1", 0)
    assert (ended["episode_id"], ended["step_count"]) == ("e-1", 3)
    assert anew["episode_id"] not in (None, "e-1")
    assert anew["step_count"] == 0


@on(*ALL)
async def test_a_typed_action_plays_like_a_generic_action(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url(), kind="typed") as client:
        await client.reset(index=0)
        result = await client.step({"$move": {"op": "inc", "by": 3}})

    assert (result["observation"]["value"], result["reward"], result["done"]) == (3, 1.0, True)


@on(*ALL)
async def test_two_clients_share_no_episode(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url()) as one, connected(newest, place.url()) as other:
        await asyncio.gather(one.reset(index=0, episode_id="one"), other.reset(index=1, episode_id="other"))
        for _ in range(2):
            await asyncio.gather(one.act("inc"), other.act("dec", 5))
        last = await one.act("inc")
        states = await asyncio.gather(one.state(), other.state())

    assert (last["observation"]["value"], last["done"]) == (3, True)
    assert [(state["episode_id"], state["step_count"]) for state in states] == [("one", 3), ("other", 2)]


@on(*ALL)
async def test_a_second_session_of_a_client_is_independent_of_its_first(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url()) as parent:
        await parent.reset(index=0, episode_id="parent")
        child = await parent.child()
        await child.reset(index=0, episode_id="child")
        await child.act("inc", 2)
        await parent.act("inc")
        states = [await parent.state(), await child.state()]
        seen = [(await each.act("noop"))["observation"]["value"] for each in (parent, child)]

    assert [(state["episode_id"], state["step_count"]) for state in states] == [("parent", 1), ("child", 1)]
    assert seen == [1, 2]


@on(*ALL)
@pytest.mark.parametrize("version", [NEWEST, FIRST_ASYNC])
async def test_an_error_is_reported_to_the_client_and_the_episode_goes_on(
    place: Place, driver_of: DriverOf, version: str
) -> None:
    async with connected(driver_of(version), place.url()) as client:
        await client.reset(index=0)
        await client.act("inc")
        errors = []
        for action in ({"op": "inc", "by": 1, "nosuch": 2}, {"op": "fly"}, {}, {"op": "raise"}):
            with pytest.raises(ClientError) as failed:
                await client.step(action)
            errors.append(failed.value)
        after = await client.act("inc", 2)

    assert [error.kind for error in errors] == ["RuntimeError"] * 4
    assert ["VALIDATION_ERROR" in error.message for error in errors] == [True, True, True, False]
    # An own worker names the type of an exception that its author did not expect.
    assert errors[3].message.replace("RuntimeError: ", "") == "Server error: boom from env (code: EXECUTION_ERROR)"
    assert (after["observation"]["value"], after["reward"], after["done"]) == (3, 1.0, True)


@on(*ALL)
async def test_the_same_seed_chooses_the_same_task_again(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url()) as client:
        targets = [(await client.reset(seed=seed))["observation"]["target"] for seed in (7, 27, 8, 7)]

    assert targets[0] == targets[1] == targets[3] == 3 + 7 % 5
    assert targets[2] == 3 + 8 % 5


@on(*ALL)
async def test_the_result_of_a_reset_names_its_task(place: Place, newest: Driver) -> None:
    async with connected(newest, place.url()) as client:
        named = await client.reset(split="test", index=4)
        seeded = await client.reset(seed=3)

    assert named["metadata"]["task_id"] == named["observation"]["metadata"]["task_id"] == "test-4"
    assert seeded["metadata"]["task_id"] == "train-3"


@on(EMBEDDED)
async def test_a_large_action_and_a_large_observation_pass(place: Place, newest: Driver) -> None:
    mib = 2**20
    async with connected(newest, place.url()) as client:
        await client.reset(index=0)
        counted = await client.tool("count", text={"$text": 15 * mib})
        seen = await client.step({"op": "inc", "padding": 90 * mib})
        after = await client.act("inc")

    assert counted["result"]["data"] == str(15 * mib)
    assert seen["observation"]["text"] == {"$length": len("value=1") + 90 * mib}
    assert after["observation"]["value"] == 2
