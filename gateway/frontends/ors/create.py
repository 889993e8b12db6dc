"""Opens the sessions of ORS creates: finds the task, and the environment, which a later request may name.

A create by split and index may name no environment. This replica then keeps it in memory for 60 s, until the session's
first request names one. The SDK that needs this sends its next request immediately over the same connection pool.
The store does not hold such creates, because they contain secrets.
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

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.errors import BodyTooLarge, InvalidRequest, PoolExhausted, SessionExists, UnknownTask
from gateway.core.ids import Owner
from gateway.core.session import EpisodeRequest, Group, SessionSetup
from gateway.frontends.asgi import Attended, FrontendParts, HeldBytes, HungUp, catalog_of, group_of, header, policy_tag
from gateway.tasks.resolver import TaskRequest, session_setup
from gateway.upstreams.ors_bodies import CreateSession, read_secrets, without_platform_keys

KEPT_S = 60.0
KEPT_MAX = 10_000
KEPT_MAX_BYTES = 64 * 2**10
"""Maximum size of a create that waits for the name of its environment, mainly of its secrets and configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Body and headers of a create."""

    environment: Environment | None
    """Requested environment. None: the session's first request names it."""
    body: CreateSession
    secrets: Mapping[str, str] = field(repr=False)
    policy: str
    """The trainer's tag of the policy that plays the episode."""
    group: Group | None
    """Group of openings that start together."""

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for identical creates. It covers all secrets as received."""
        return hashlib.sha256(self._text()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """Number of bytes of the create as JSON text."""
        return len(self._text())

    def _text(self) -> bytes:
        text = json.dumps([self.body.model_dump(exclude={"secrets"}), sorted(self.secrets.items())], sort_keys=True)
        return text.encode("utf-8", "surrogatepass")

    @property
    def task(self) -> TaskRequest:
        """The requested task."""
        body = self.body
        return TaskRequest(spec=body.task_spec, split=body.split, index=body.index, passes_unknown=True)


@dataclass(slots=True, eq=False)
class PendingCreate:
    """A create that waits for the name of its environment."""

    create: Create
    held: HeldBytes
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock that the request holds while it opens the session."""
    added_at: float = field(default_factory=time.monotonic)


class SessionCreator:
    """Opens the sessions of creates."""

    def __init__(self, parts: FrontendParts, *, lazy_binding: bool, strip_platform_keys: bool) -> None:
        self._sessions = parts.sessions
        self._resolver = parts.resolver
        self._catalog = parts.catalog
        self._strip_platform_keys = strip_platform_keys
        self.binds_late = lazy_binding and len(parts.catalog) > 1
        """True if a session's first request may name the environment of its create."""
        self._pending: OrderedDict[tuple[Owner, str], PendingCreate] = OrderedDict()
        """Creates that wait for the name of their environment, oldest first."""

    def read(self, body: CreateSession, scope: Scope, usual: Environment) -> Create:
        """Read body and headers of a create. *usual* serves a create that names no environment and is not bound later.

        Raises:
            UnknownEnvironment: There is no environment of that name.
            InvalidRequest: A header is invalid.
        """
        environment: Environment | None
        if body.env_name is not None:
            catalog = catalog_of(scope, self._catalog)
            environment = catalog.offered.get(body.env_name.lower())
            if environment is None:
                raise catalog.unknown(body.env_name)
        elif self.binds_late and body.task_spec is None and header(scope, b"x-deployment") is None:
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

    async def resolve(self, create: Create) -> SessionSetup:
        """Find the task of a create. Return the setup for the worker.

        If no session is opened with the setup, the caller must release its curriculum group membership.

        Raises:
            UnknownTask: The split or the index does not exist.
            InvalidRequest: The create requests a toolset, and the environment is not a standard ORS server.
        """
        body, environment = create.body, create.environment
        assert environment is not None
        if body.toolset_name is not None and environment.wire is not UpstreamKind.ORS:
            raise InvalidRequest(f"unknown toolset {body.toolset_name!r}; valid options are []")
        task = await self._resolver.resolve(environment, create.task)
        is_kept = environment.platform_keys or not self._strip_platform_keys
        return session_setup(
            environment,
            task,
            seed=body.seed,
            config=body.config,
            secrets=create.secrets if is_kept else without_platform_keys(create.secrets),
            toolset=body.toolset_name or "",
            policy=create.policy,
            group=create.group,
        )

    async def open(
        self, owner: Owner, sid: str, create: Create, setup: SessionSetup, trainer: Attended | None = None
    ) -> None:
        """Open the session of a create. If *trainer* disconnected meanwhile, close it again and raise ``HungUp``."""
        assert create.environment is not None
        async with self._resolver.admitted(create.environment, setup):
            await self._sessions.open(
                EpisodeRequest(
                    owner=owner,
                    name=sid,
                    environment=create.environment,
                    setup=setup,
                    fingerprint=create.fingerprint,
                    protocol="ors",
                )
            )
            if trainer is not None and trainer.left:
                await self._sessions.close(owner, sid)
                raise HungUp

    async def keep(self, owner: Owner, sid: str, create: Create, held: HeldBytes) -> None:
        """Keep a create that names no environment, unless an identical create waits. Its size counts in *held*.

        Raises:
            UnknownTask: No environment has the split or index.
            SessionExists: A different create of this id waits.
            PoolExhausted: Too many creates wait.
            BodyTooLarge: The create is too large to wait.
            TooManyBytes: The requests of this key, or of all keys, hold too many bytes.
        """
        await self._resolver.lookup.sure(lambda: self._refuse_unknown(create))
        known = self.kept(owner, sid)
        if known is not None:
            if known.create.fingerprint != create.fingerprint:
                raise SessionExists(sid)
            return
        if len(self._pending) >= KEPT_MAX:
            raise PoolExhausted("too many sessions wait for the name of their environment")
        size = create.size_bytes
        if size > KEPT_MAX_BYTES:
            raise BodyTooLarge(
                f"a create without env_name has {size} bytes, and the limit is {KEPT_MAX_BYTES}: name the environment "
                "in env_name, or send less secrets and config"
            )
        held.add(size)
        self._pending[owner, sid] = PendingCreate(create, held)

    def kept(self, owner: Owner, sid: str) -> PendingCreate | None:
        """Return the waiting create of this id, if any, after dropping expired creates."""
        limit = time.monotonic() - KEPT_S
        while self._pending and next(iter(self._pending.values())).added_at < limit:
            self._pending.popitem(last=False)[1].held.close()
        return self._pending.get((owner, sid))

    async def bind(self, owner: Owner, sid: str, environment: Environment) -> None:
        """Open the session of a waiting create in *environment*, which the session's first request names."""
        pending = self.kept(owner, sid)
        if pending is None:
            return
        async with pending.lock:
            if self.kept(owner, sid) is not pending:
                return  # another request opened the session meanwhile
            create = replace(pending.create, environment=environment)
            await self.open(owner, sid, create, await self.resolve(create))
            self.drop(owner, sid)

    def drop(self, owner: Owner, sid: str) -> bool:
        """Drop the create of this id. Return False if no create waits."""
        found = self._pending.pop((owner, sid), None)
        if found is not None:
            found.held.close()
        return found is not None

    def _refuse_unknown(self, create: Create) -> None:
        """Refuse a split or index that no environment has, without a query to workers."""
        refusal: UnknownTask | None = None
        for environment in self._catalog:
            error = self._resolver.lookup.why_not(environment, create.body.split or "", create.body.index or 0)
            if error is None:
                return
            # Prefer "Invalid index" to "Invalid split": it shows that an environment has the split.
            refusal = error if refusal is None or type(error) is UnknownTask else refusal
        if refusal is not None:
            raise refusal
