"""From a ``sample_id`` to a task."""

from __future__ import annotations

from gateway.core.environment import Environment
from gateway.core.errors import UnknownSplit, UnknownTask
from gateway.tasks.curricula.indices import Offer, is_index
from gateway.tasks.lookup import Offers


async def find_sample(offers: Offers, environment: Environment, sample: str) -> Offer:
    """Find the task that *sample* means: an id or alias in any split, else an index in the environment's AReaL split.

    Of a foreign image that has no such split it is its first one.

    Raises:
        UnknownTask: there is none.
    """
    try:
        return await offers.find(environment, sample, prefer=environment.areal.split)
    except UnknownTask:
        if not is_index(sample):
            offer = await offers.images_own(environment, sample)
            if offer is None:
                raise
            return offer
    split, index = await split_of(offers, environment), int(sample)
    try:
        return await offers.at(environment, split, index)
    except UnknownTask as error:
        if isinstance(error, UnknownSplit):
            raise UnknownTask(f"{environment.name!r} has no split {split!r}, which integers would mean") from error
        count = await offers.count(environment, split)
        raise UnknownTask(f"split {split!r} of {environment.name!r} has the indices 0 to {count - 1}") from error


async def split_of(offers: Offers, environment: Environment) -> str:
    """The split that integers mean, and that is counted."""
    if not offers.asks(environment):
        return environment.areal.split
    return offers.usual([split.name for split in await offers.splits(environment)], environment.areal.split)
