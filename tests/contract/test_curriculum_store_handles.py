"""The seam of curricula, its handles: the draw that an opening gets, on memory and on Redis."""

from __future__ import annotations

import asyncio
import math

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.ports.curricula import MAX_DRAWN_BYTES, CurriculumStore, Drawn, Turn
from tests.contract.curriculum_worlds import GROUP_S, Make, drawn, joined
from tests.contract.store_worlds import World

pytest_plugins = ["tests.contract.store_fixtures", "tests.contract.curriculum_fixtures"]


async def test_all_openings_before_a_draw_get_the_same_turn(curricula: CurriculumStore) -> None:
    assert await joined(curricula, "a") == Turn(0)
    assert await joined(curricula, "b") == Turn(0)
    assert await joined(curricula, "a") == Turn(0)


async def test_the_first_proposal_decides_and_the_others_join_its_draw(curricula: CurriculumStore) -> None:
    turn = await joined(curricula, "a")
    await joined(curricula, "b")
    assert isinstance(turn, Turn)

    first = await curricula.propose("easy", 0, turn, b"1 \x00\xff\n", member="a")
    second = await curricula.propose("easy", 0, turn, b"2", member="b")

    assert first == second == Drawn(0, b"1 \x00\xff\n")


async def test_a_full_group_makes_a_new_draw_due(curricula: CurriculumStore) -> None:
    numbers = [await drawn(curricula, f"m{n}", group_size=3) for n in range(7)]

    assert numbers == [0, 0, 0, 1, 1, 1, 2]


async def test_handles_and_curricula_have_separate_groups(curricula: CurriculumStore) -> None:
    assert [await drawn(curricula, "a"), await drawn(curricula, "b", handle=7), await drawn(curricula, "c")] == [
        0,
        1,
        0,
    ]

    assert await joined(curricula, "a", curriculum="hard") == Turn(0)
    assert await joined(curricula, "d", handle=7) == Drawn(1, b"place 1")


async def test_a_draw_is_due_until_an_opening_makes_it(curricula: CurriculumStore, store_world: World) -> None:
    assert await joined(curricula, "a") == Turn(0)

    store_world.pass_time(10 * GROUP_S)

    assert await joined(curricula, "b") == Turn(0)
    assert await drawn(curricula, "c") == 0


async def test_an_opening_that_joins_again_keeps_its_place(curricula: CurriculumStore) -> None:
    await drawn(curricula, "a")

    assert await joined(curricula, "a") == Drawn(0, b"place 0")

    assert await drawn(curricula, "b") == 0
    assert await drawn(curricula, "a") == 0, "in a full group too"
    assert await joined(curricula, "c") == Turn(1)
    assert await drawn(curricula, "a") == 0, "while the next draw is due"
    assert await drawn(curricula, "c") == 1
    assert await drawn(curricula, "b") == 0, "once there is a newer group"


async def test_an_opening_that_proposes_again_keeps_its_place(curricula: CurriculumStore) -> None:
    for member in "ab":
        await drawn(curricula, member)
    await drawn(curricula, "c")

    assert await curricula.propose("easy", 0, Turn(0), b"x", member="a") == Drawn(0, b"place 0")
    assert await curricula.propose("easy", 0, Turn(1), b"x", member="c") == Drawn(1, b"place 1")
    assert await joined(curricula, "d") == Drawn(1, b"place 1"), "it had one place all the time"


async def test_a_turn_is_over_once_its_group_is_full_or_expired(curricula: CurriculumStore, store_world: World) -> None:
    for member in "ab":
        await drawn(curricula, member)

    assert await curricula.propose("easy", 0, Turn(0), b"late", member="c") is None
    assert await drawn(curricula, "c") == 1
    assert await curricula.propose("easy", 0, Turn(0), b"late", member="d") is None
    store_world.pass_time(GROUP_S + 1)
    assert await curricula.propose("easy", 0, Turn(1), b"late", member="e") is None
    assert await joined(curricula, "e") == Turn(2)
    assert await curricula.propose("easy", 0, Turn(1), b"late", member="e") is None


async def test_a_turn_that_no_opening_got_is_invalid(curricula: CurriculumStore) -> None:
    assert await curricula.propose("easy", 0, Turn(0), b"x", member="a") is None
    await joined(curricula, "a")

    assert await curricula.propose("easy", 0, Turn(1), b"x", member="a") is None
    assert await curricula.propose("easy", 1, Turn(0), b"x", member="a") is None
    assert await curricula.propose("hard", 0, Turn(0), b"x", member="a") is None
    assert await joined(curricula, "a") == Turn(0)


async def test_a_group_expires_after_its_time(curricula: CurriculumStore, store_world: World) -> None:
    await drawn(curricula, "a")
    store_world.pass_time(GROUP_S - 100)
    assert await joined(curricula, "a") == Drawn(0, b"place 0")

    store_world.pass_time(101)

    assert await joined(curricula, "a") == Turn(1)


async def test_a_groups_time_starts_with_its_draw(curricula: CurriculumStore, store_world: World) -> None:
    turn = await joined(curricula, "a")
    assert isinstance(turn, Turn)
    store_world.pass_time(GROUP_S)

    await curricula.propose("easy", 0, turn, b"x", member="a")

    store_world.pass_time(GROUP_S - 100)
    assert await joined(curricula, "b") == Drawn(0, b"x")


async def test_a_released_place_goes_to_another_opening(curricula: CurriculumStore) -> None:
    for member in "ab":
        await drawn(curricula, member)

    await curricula.leave("easy", 0, member="a")

    assert await joined(curricula, "c") == Drawn(0, b"place 0")
    assert await joined(curricula, "a") == Turn(1)


async def test_a_released_place_is_taken_before_the_next_draw(curricula: CurriculumStore) -> None:
    for member in "ab":
        await drawn(curricula, member)
    turn = await joined(curricula, "c")

    await curricula.leave("easy", 0, member="b")

    assert await drawn(curricula, "d") == 0
    assert isinstance(turn, Turn)
    assert await curricula.propose("easy", 0, turn, b"place 1", member="c") == Drawn(1, b"place 1")
    assert await drawn(curricula, "e") == 1


async def test_a_draw_whose_only_opening_left_goes_to_the_next_openings(curricula: CurriculumStore) -> None:
    await drawn(curricula, "a")

    await curricula.leave("easy", 0, member="a")

    assert [await drawn(curricula, member) for member in "bac"] == [0, 0, 1]


async def test_a_released_place_in_an_earlier_group_is_not_taken_again(curricula: CurriculumStore) -> None:
    for member in "abc":
        await drawn(curricula, member)

    await curricula.leave("easy", 0, member="a")

    assert [await drawn(curricula, member) for member in "dab"] == [1, 2, 0]


async def test_releasing_a_place_that_the_opening_does_not_have_changes_nothing(curricula: CurriculumStore) -> None:
    await curricula.leave("easy", 0, member="a")
    await drawn(curricula, "a")

    for member, handle in (("b", 0), ("a", 1)):
        await curricula.leave("easy", handle, member=member)
    await curricula.leave("hard", 0, member="a")

    assert await joined(curricula, "b") == Drawn(0, b"place 0")
    assert await joined(curricula, "c") == Turn(1)
    for _ in range(2):
        await curricula.leave("easy", 0, member="a")
    assert await joined(curricula, "c") == Drawn(0, b"place 0")
    assert await joined(curricula, "d") == Turn(1)


async def test_a_released_place_is_not_released_again_by_time(curricula: CurriculumStore, store_world: World) -> None:
    for member in "ab":
        await drawn(curricula, member)
    await curricula.leave("easy", 0, member="a")

    store_world.pass_time(GROUP_S + 1)

    assert [await drawn(curricula, member) for member in "abc"] == [1, 1, 2]


async def test_a_groups_size_is_the_curriculums_present_one(curricula: CurriculumStore) -> None:
    await drawn(curricula, "a", group_size=1)

    assert await drawn(curricula, "b", group_size=2) == 0
    assert await drawn(curricula, "c", group_size=2) == 1


async def test_a_group_has_the_size_and_time_of_the_last_request_before_its_draw(
    curricula: CurriculumStore, store_world: World
) -> None:
    await joined(curricula, "a", group_size=1, group_s=100.0)
    await joined(curricula, "b", group_size=3, group_s=500.0)

    proposed = [await curricula.propose("easy", 0, Turn(0), b"x", member=member) for member in "abcd"]

    assert proposed == [Drawn(0, b"x")] * 3 + [None]
    store_world.pass_time(400)
    assert await joined(curricula, "a") == Drawn(0, b"x")
    store_world.pass_time(101)
    assert await joined(curricula, "a") == Turn(1)


async def test_openings_may_have_any_names(curricula: CurriculumStore) -> None:
    names = ["", "a:b", "a\nb 0", "\ud800", "x" * 10_000]

    assert [await drawn(curricula, name, group_size=9) for name in names] == [0] * 5
    assert [await drawn(curricula, name, group_size=1) for name in names] == [0] * 5


async def test_numbers_and_turns_share_one_sequence_of_draws(curricula: CurriculumStore) -> None:
    assert await curricula.numbers("easy", 3) == 0
    assert await joined(curricula, "a") == Turn(3)
    assert await curricula.numbers("easy", 0) == 4
    assert await curricula.numbers("easy", 2) == 4
    assert await joined(curricula, "a", handle=1) == Turn(6)
    assert await joined(curricula, "b") == Turn(3)
    assert await curricula.numbers("hard", 1) == 0


async def test_many_concurrent_openings_each_have_a_place_in_a_full_group(curricula: CurriculumStore) -> None:
    numbers = await asyncio.gather(*(drawn(curricula, f"m{n}", group_size=4) for n in range(40)))

    assert sorted(numbers) == [number for number in range(10) for _ in range(4)]


async def test_one_opening_that_joins_many_times_concurrently_has_one_place(curricula: CurriculumStore) -> None:
    numbers = await asyncio.gather(*(drawn(curricula, "a") for _ in range(20)))

    assert set(numbers) == {0}
    assert await drawn(curricula, "b") == 0
    assert await drawn(curricula, "c") == 1


async def test_concurrently_taken_numbers_are_all_different(curricula: CurriculumStore) -> None:
    taken = await asyncio.gather(
        *(curricula.numbers("easy", 3) for _ in range(20)), *(drawn(curricula, f"m{n}", handle=n) for n in range(20))
    )

    numbers = [first + n for first in taken[:20] for n in range(3)] + taken[20:]
    assert sorted(numbers) == list(range(80))


# -- limits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("handle", [-1, 5, 10**30])
async def test_a_handle_out_of_range_is_refused(make: Make, handle: int) -> None:
    store = make(max_handles=5)
    assert await joined(store, "a", handle=4) == Turn(0)

    with pytest.raises(InvalidRequest, match=f"'easy' has no handle {handle}: handles are 0 to 4"):
        await joined(store, "a", handle=handle)
    with pytest.raises(InvalidRequest, match=f"no handle {handle}"):
        await store.propose("easy", handle, Turn(0), b"x", member="a")

    assert await store.numbers("easy", 0) == 1


@pytest.mark.parametrize(
    ("group_size", "group_s", "reason"),
    [(0, 1.0, "a group of 0"), (1, 0.0, "a group of 0.0 seconds"), (1, math.nan, "a group of nan seconds")],
)
async def test_a_group_without_size_or_time_is_refused(
    curricula: CurriculumStore, group_size: int, group_s: float, reason: str
) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        await joined(curricula, "a", group_size=group_size, group_s=group_s)

    assert await curricula.numbers("easy", 1) == 0


async def test_a_group_may_last_for_ever(curricula: CurriculumStore) -> None:
    turn = await joined(curricula, "a", group_s=math.inf)
    assert isinstance(turn, Turn)

    await curricula.propose("easy", 0, turn, b"x", member="a")

    assert await joined(curricula, "b", group_s=math.inf) == Drawn(0, b"x")


async def test_a_draw_has_a_maximum_size(curricula: CurriculumStore) -> None:
    turn = await joined(curricula, "a")
    assert isinstance(turn, Turn)

    with pytest.raises(InvalidRequest, match="a draw of 4097 bytes; the maximum is 4096"):
        await curricula.propose("easy", 0, turn, b"x" * (MAX_DRAWN_BYTES + 1), member="a")

    place = b"x" * MAX_DRAWN_BYTES
    assert await curricula.propose("easy", 0, turn, place, member="a") == Drawn(0, place)


async def test_a_negative_number_of_draws_is_refused(curricula: CurriculumStore) -> None:
    with pytest.raises(InvalidRequest, match="-1 draw numbers"):
        await curricula.numbers("easy", -1)


# -- hanging up ---------------------------------------------------------------------------------------------------

TURNS = [*range(100), *range(100, 10_000, 100)]
"""Turns of the event loop. An answer of Redis takes about twenty, and more on a loaded machine."""


async def test_a_join_that_is_cancelled_at_any_turn_releases_its_place(curricula: CurriculumStore) -> None:
    await drawn(curricula, "first")
    for turns in TURNS:
        task = asyncio.create_task(joined(curricula, f"gone {turns}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            assert task.result() == Drawn(0, b"place 0")
            break
        assert await joined(curricula, "next") == Drawn(0, b"place 0")
        await curricula.leave("easy", 0, member="next")
    else:
        raise AssertionError("the join was never done")

    assert await joined(curricula, "next") == Turn(1)


async def test_a_proposal_that_is_cancelled_at_any_turn_releases_its_place(curricula: CurriculumStore) -> None:
    for number, turns in enumerate(TURNS):
        assert await joined(curricula, "gone", handle=number) == Turn(number)
        task = asyncio.create_task(curricula.propose("easy", number, Turn(number), b"place %d" % number, member="gone"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            assert task.result() == Drawn(number, b"place %d" % number)
            break
        assert [await drawn(curricula, member, handle=number) for member in "ab"] == [number, number]
    else:
        raise AssertionError("the proposal was never done")


async def test_a_cancelled_join_keeps_the_place_of_an_opening_that_joined_again(curricula: CurriculumStore) -> None:
    for turns in range(40):
        assert await drawn(curricula, f"first {turns}", handle=turns) == turns
        gone = asyncio.create_task(joined(curricula, "again", handle=turns))
        again = asyncio.create_task(joined(curricula, "again", handle=turns))
        for _ in range(turns):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait({gone, again})

        assert again.result() == Drawn(turns, b"place %d" % turns)
        assert await joined(curricula, "other", handle=turns) == Turn(turns + 1), "the group is full"
        assert await joined(curricula, "again", handle=turns) == again.result()
        await curricula.reset("easy")
        await curricula.numbers("easy", turns + 1)
