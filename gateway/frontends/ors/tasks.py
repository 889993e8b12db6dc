"""Tasks in ORS' words: discovery, and what a create's task source means.

Creates by split and index that name no environment, kept until their first request does.

In this replica's memory only, for a minute: the SDK that needs it sends its next request at once, over the same
connection pool. Their secrets must not go to the store.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import InvalidRequest, PoolExhausted, UnknownTask
from gateway.core.ids import Owner
from gateway.core.json_text import dump
from gateway.core.session import Group, SessionSetup
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.task_ref import TaskRef, seeded
from gateway.upstreams.ors_bodies import CreateSession, OfRange, OfSplit, OfTask, validate, without_platform_keys


class OrsTasks:
    """Answers questions about tasks, and finds the one of a create."""

    def __init__(self, lookup: TaskLookup, *, catalog: Catalog, strip_platform_keys: bool) -> None:
        self._lookup = lookup
        self._catalog = catalog
        self._strip_platform_keys = strip_platform_keys

    async def discover(
        self, name: str, environment: Environment, env_name: str, body: bytes, content_type: str | None
    ) -> bytes:
        """Answer a question about tasks. Raises ``UnknownTask``."""
        tail = b',"env_name":' + dump(env_name) + b"}"
        if name == "num_tasks":
            count = await self._lookup.count(environment, validate(OfSplit, body, content_type).split)
            return dump({"num_tasks": count})
        if name == "task":
            one = validate(OfTask, body, content_type)
            return b'{"task":' + await self._lookup.raw(environment, one.split, one.index) + tail
        if name == "tasks":
            tasks = await self._lookup.range(environment, validate(OfSplit, body, content_type).split, None, None)
        else:
            some = validate(OfRange, body, content_type)
            tasks = await self._lookup.range(environment, some.split, some.start, some.stop)
        return b'{"tasks":[' + b",".join(tasks) + b"]" + tail

    def refuse_nowhere(self, wish: CreateSession) -> None:
        """Refuse a split or index that no environment has, as far as that is known without asking their workers."""
        refusal: UnknownTask | None = None
        for environment in self._catalog:
            error = self._lookup.why_not(environment, wish.split or "", wish.index or 0)
            if error is None:
                return
            # "Invalid index" says more than "Invalid split": some environment has the split.
            refusal = error if refusal is None or type(error) is UnknownTask else refusal
        if refusal is not None:
            raise refusal

    async def setup(self, pending: Pending, environment: Environment) -> tuple[SessionSetup, str]:
        """Resolve the task; returns what the worker needs and the task's name for people.

        Whoever gets a ticket in it gives that back, unless a session is opened with it.

        Raises:
            UnknownTask: no such split, or index in it.
            InvalidRequest: a toolset is asked for, which only standard ORS servers have.
        """
        wish = pending.wish
        if wish.toolset_name is not None and environment.wire is not UpstreamKind.ORS:
            raise InvalidRequest(f"unknown toolset {wish.toolset_name!r}; valid options are []")
        if wish.task_spec is not None:
            offer = await self._given(wish.task_spec, environment)
            task = str(wish.task_spec.get("id", ""))[:200]
        else:
            assert wish.split is not None
            assert wish.index is not None
            offer = await self._lookup.at(environment, wish.split, wish.index)
            task = f"{wish.split}/{wish.index}"
        if offer.handle is not None:
            offer = await self._lookup.drawn(environment, offer)
            task = offer.place
        # The fingerprint covers all secrets as they came; what is left out is the environment's matter.
        is_kept = environment.platform_keys or not self._strip_platform_keys
        secrets = pending.secrets if is_kept else without_platform_keys(pending.secrets)
        setup = offer.setup(
            seed=wish.seed,
            config=wish.config,
            secrets=secrets,
            toolset=wish.toolset_name or "",
            policy=pending.policy,
            group=pending.group,
        )
        return seeded(environment, setup), task

    async def _given(self, spec: dict[str, Any], environment: Environment) -> TaskRef:
        """The task that a spec is: itself, or the one of its id where it says no more, if there is one."""
        name = spec.get("id")
        if spec.keys() != {"id"} or not isinstance(name, str):
            return await self._lookup.recognised(environment, spec)
        try:
            return await self._lookup.get(environment, name)
        except UnknownTask:
            if environment.wire in (UpstreamKind.OWN, UpstreamKind.ORS):
                # The environment may know it by itself, or its tasks may be no more than that.
                return TaskRef(spec=spec)
            offer = await self._lookup.images_own(environment, name) or await self._lookup.recognised(environment, spec)
            if not offer.is_images:
                raise
            return offer


KEPT_S = 60.0
KEPT_MAX = 10_000


@dataclass(slots=True, kw_only=True, eq=False)
class Pending:
    """What a create asked for."""

    environment: Environment | None
    wish: CreateSession
    secrets: Mapping[str, str] = field(repr=False)
    fingerprint: str
    policy: str = ""
    """The trainer's tag of the policy that is to play."""
    group: Group | None = None
    """Those that it should begin with."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    added_at: float = field(default_factory=time.monotonic)


class PendingCreates:
    """The creates that wait for their environment's name, oldest first."""

    def __init__(self) -> None:
        self._creates: OrderedDict[tuple[Owner, str], Pending] = OrderedDict()

    def add(self, owner: Owner, sid: str, pending: Pending) -> bool:
        """Keep *pending*; an identical one may be there already. False if another one is.

        Raises:
            PoolExhausted: too many wait.
        """
        self._drop_old()
        known = self._creates.get((owner, sid))
        if known is not None:
            return known.fingerprint == pending.fingerprint
        if len(self._creates) >= KEPT_MAX:
            raise PoolExhausted("too many sessions wait for the name of their environment")
        self._creates[owner, sid] = pending
        return True

    def get(self, owner: Owner, sid: str) -> Pending | None:
        """Look one up."""
        self._drop_old()
        return self._creates.get((owner, sid))

    def pop(self, owner: Owner, sid: str) -> Pending | None:
        """Take one away."""
        return self._creates.pop((owner, sid), None)

    def _drop_old(self) -> None:
        limit = time.monotonic() - KEPT_S
        while self._creates and next(iter(self._creates.values())).added_at < limit:
            self._creates.popitem(last=False)
