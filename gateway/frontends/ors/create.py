"""The sessions that ORS' creates ask for: their task, and their environment, which a first request may name later.

A create by split and index that names no environment is kept until its first request names it: in this replica's
memory only, for a minute. The SDK that needs it sends its next request at once, over the same connection pool. Its
secrets must not go to the store.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from starlette.types import Scope

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import InvalidRequest, PoolExhausted, SessionExists, UnknownTask
from gateway.core.ids import Owner
from gateway.core.session import Group, SessionSetup
from gateway.frontends.asgi import Attended, HungUp, group_of, header, policy_tag
from gateway.sessions.opening import EpisodeRequest
from gateway.sessions.service import Sessions
from gateway.tasks.lookup import TaskLookup
from gateway.tasks.resolver import TaskRequest, TaskResolver, session_setup
from gateway.tasks.task_ref import LABEL_MAX
from gateway.upstreams.ors_bodies import CreateSession, read_secrets, without_platform_keys

KEPT_S = 60.0
KEPT_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """What a create asks for, with what its headers say."""

    environment: Environment | None
    """None: its first request names it."""
    body: CreateSession
    secrets: Mapping[str, str] = field(repr=False)
    policy: str
    """The trainer's tag of the policy that is to play."""
    group: Group | None
    """The openings that the session begins together with."""

    @property
    def fingerprint(self) -> str:
        """The same for identical creates. It covers all secrets as they came."""
        text = json.dumps([self.body.model_dump(exclude={"secrets"}), sorted(self.secrets.items())], sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def task(self) -> TaskRequest:
        """The task that it asks for."""
        body = self.body
        return TaskRequest(spec=body.task_spec, split=body.split, index=body.index, passes_unknown=True)


@dataclass(slots=True, eq=False)
class PendingCreate:
    """A create that waits for its environment's name."""

    create: Create
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the request that opens the session."""
    added_at: float = field(default_factory=time.monotonic)


class PendingCreates:
    """The creates that wait for their environment's name, oldest first."""

    def __init__(self, *, lookup: TaskLookup, catalog: Catalog) -> None:
        self._lookup = lookup
        self._catalog = catalog
        self._creates: OrderedDict[tuple[Owner, str], PendingCreate] = OrderedDict()

    async def add(self, owner: Owner, sid: str, create: Create) -> None:
        """Keep *create*. An identical one may be there already.

        Raises:
            UnknownTask: No environment has its split or index.
            SessionExists: Another create of this id waits.
            PoolExhausted: Too many wait.
        """
        await self._lookup.sure(lambda: self._refuse_unknown(create))
        known = self.get(owner, sid)
        if known is not None:
            if known.create.fingerprint != create.fingerprint:
                raise SessionExists(sid)
            return
        if len(self._creates) >= KEPT_MAX:
            raise PoolExhausted("too many sessions wait for the name of their environment")
        self._creates[owner, sid] = PendingCreate(create)

    def get(self, owner: Owner, sid: str) -> PendingCreate | None:
        """Return the create of this id, if one waits."""
        limit = time.monotonic() - KEPT_S
        while self._creates and next(iter(self._creates.values())).added_at < limit:
            self._creates.popitem(last=False)
        return self._creates.get((owner, sid))

    def pop(self, owner: Owner, sid: str) -> PendingCreate | None:
        """Take one away."""
        return self._creates.pop((owner, sid), None)

    def _refuse_unknown(self, create: Create) -> None:
        """Refuse a split or index that no environment has, as far as that is known without a query to workers."""
        refusal: UnknownTask | None = None
        for environment in self._catalog:
            error = self._lookup.why_not(environment, create.body.split or "", create.body.index or 0)
            if error is None:
                return
            # "Invalid index" says more than "Invalid split": some environment has the split.
            refusal = error if refusal is None or type(error) is UnknownTask else refusal
        if refusal is not None:
            raise refusal


class SessionCreator:
    """Opens the sessions that creates ask for."""

    def __init__(
        self,
        *,
        sessions: Sessions,
        resolver: TaskResolver,
        catalog: Catalog,
        lazy_binding: bool = True,
        strip_platform_keys: bool = True,
    ) -> None:
        self._sessions = sessions
        self._resolver = resolver
        self._catalog = catalog
        self._strip_platform_keys = strip_platform_keys
        self.binds_late = lazy_binding and len(catalog) > 1
        """Whether a create's first request may name its environment."""
        self._pending = PendingCreates(lookup=resolver.lookup, catalog=catalog) if self.binds_late else None

    def read(self, body: CreateSession, scope: Scope, usual: Environment) -> Create:
        """Read what a create asks for. *usual* is the environment of one that names none.

        Raises:
            UnknownEnvironment, InvalidRequest
        """
        environment: Environment | None
        if body.env_name is not None:
            environment = self._catalog.offered.get(body.env_name.lower())
            if environment is None:
                raise self._catalog.unknown(body.env_name)
        elif self._pending is not None and body.task_spec is None and header(scope, b"x-deployment") is None:
            environment = None
        else:
            environment = usual
        return Create(
            environment=environment,
            body=body,
            secrets=read_secrets(header(scope, b"x-secrets"), body.secrets),
            policy=policy_tag(scope),
            group=group_of(scope),
        )

    async def resolve(self, create: Create) -> tuple[SessionSetup, str]:
        """Find the task of a create; returns what the worker gets and the task's name for people.

        The caller gives back a curriculum's group membership in it unless a session is opened with it.

        Raises:
            UnknownTask: There is no such split, or index in it.
            InvalidRequest: The create asks for a toolset, which only standard ORS servers have.
        """
        body, environment = create.body, create.environment
        assert environment is not None
        if body.toolset_name is not None and environment.wire is not UpstreamKind.ORS:
            raise InvalidRequest(f"unknown toolset {body.toolset_name!r}; valid options are []")
        task = await self._resolver.resolve(environment, create.task)
        is_kept = environment.platform_keys or not self._strip_platform_keys
        setup = session_setup(
            environment,
            task,
            seed=body.seed,
            config=body.config,
            secrets=create.secrets if is_kept else without_platform_keys(create.secrets),
            toolset=body.toolset_name or "",
            policy=create.policy,
            group=create.group,
        )
        if setup.ticket is not None:
            name = task.place
        elif body.task_spec is not None:
            name = str(body.task_spec.get("id", ""))[:LABEL_MAX]
        else:
            name = f"{body.split}/{body.index}"
        return setup, name

    async def open(
        self, owner: Owner, sid: str, create: Create, setup: SessionSetup, task: str, trainer: Attended | None = None
    ) -> None:
        """Open the session of a create; nothing is left of it if its *trainer* has left."""
        assert create.environment is not None
        async with self._resolver.admitted(create.environment, setup):
            await self._sessions.open(
                EpisodeRequest(
                    owner=owner,
                    name=sid,
                    environment=create.environment,
                    setup=setup,
                    fingerprint=create.fingerprint,
                    task=task,
                )
            )
            if trainer is not None and trainer.left:
                await self._sessions.close(owner, sid)
                raise HungUp

    async def keep(self, owner: Owner, sid: str, create: Create) -> None:
        """Keep a create that names no environment; see `PendingCreates.add`."""
        if self._pending is not None:
            await self._pending.add(owner, sid, create)

    def is_kept(self, owner: Owner, sid: str) -> bool:
        """Return True if the create of this id waits for its environment's name."""
        return self._pending is not None and self._pending.get(owner, sid) is not None

    async def bind(self, owner: Owner, sid: str, environment: Environment) -> None:
        """Open a session whose create named no environment, now that its first request does."""
        pending = self._pending.get(owner, sid) if self._pending is not None else None
        if pending is None or self._pending is None:
            return
        async with pending.lock:
            if self._pending.get(owner, sid) is not pending:
                return  # another request has bound it meanwhile
            create = replace(pending.create, environment=environment)
            await self.open(owner, sid, create, *await self.resolve(create))
            self._pending.pop(owner, sid)

    def drop(self, owner: Owner, sid: str) -> bool:
        """Drop the create of this id; returns False if none waited."""
        return self._pending is not None and self._pending.pop(owner, sid) is not None
