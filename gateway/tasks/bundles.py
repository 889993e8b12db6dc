"""The form of a signed bundle of tasks, and the rules that say which gateway accepts it, when, and for what.

A bundle is one JSON document with the members of `Bundle`. The signature covers a canonical encoding of all other
members instead of the bundle's bytes, so that tools may reformat a bundle.

Times are ISO 8601 texts in UTC with microseconds. People can read them. Each time has one text only, so the canonical
encoding stays unambiguous. The order of the texts is the order of the times, for Python and for Redis. And bundles that
a script signs within one second have different times.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal

from envserver.generic.task import is_name
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from gateway.core.errors import TaskInvalid
from gateway.core.ports.tasks import BundleRefused, BundleStamp
from gateway.core.validation import reason_of

FORMAT: Final = "env-gateway-tasks/2"
_FORMATS: Final = "env-gateway-tasks/"
"""The beginning of each format's name."""
VALID: Final = timedelta(days=30)
"""Time after which a bundle expires, unless its signer chooses another."""
CLOCKS: Final = timedelta(seconds=300)
"""Largest difference between the clocks of signer and gateway for which neither refuses a bundle."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", re.ASCII)
_AGAIN: Final = "sign the tasks again with gateway tasks sign"


def _checked_time(text: str) -> str:
    if _TIME.fullmatch(text) is None:
        raise ValueError(f"it must be a time such as 2030-01-31T09:30:00.000000Z, not {text!r:.60}")
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"there is no such time: {text}: {error}") from None
    return text


def _checked_environment(text: str) -> str:
    if text and not is_name("env_type", text):
        raise ValueError(f"it must be empty or an environment's name, not {text!r:.60}")
    return text


def _checked_split(text: str) -> str:
    if text and not is_name("split", text):
        raise ValueError(f"it must be empty or a split's name, not {text!r:.60}")
    return text


Time = Annotated[str, AfterValidator(_checked_time)]


class Bundle(BaseModel):
    """A bundle in the right form. `TrustedKeys.verify` checks its signature, and `check_use` its time and place."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: Literal["env-gateway-tasks/2"]
    tasks: list[Any]
    key: str
    """The id of the key that signed the bundle."""
    made_at: Time
    """The time of signing."""
    expires: Time
    """The time after which no gateway accepts the bundle."""
    instance: str
    """``GATEWAY_INSTANCE`` of the gateways that the bundle is for; empty: all gateways."""
    environment: Annotated[str, AfterValidator(_checked_environment)]
    """The environment of all tasks; empty: each task's own ``env_type``."""
    split: Annotated[str, AfterValidator(_checked_split)]
    """The split of all tasks; empty: each task's own."""
    signature: str

    def canonical(self) -> bytes:
        """Encode the signed content: the format's name, a line feed, and UTF-8 JSON, sorted keys, no white space.

        Numbers have Python's notation, which is the shortest text that parses to the same number. Raises
        ``TaskInvalid`` for values that JSON does not have.
        """
        members = {name: getattr(self, name) for name in type(self).model_fields if name != "signature"}
        try:
            text = json.dumps(members, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
            encoded = f"{self.format}\n{text}".encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TaskInvalid([("tasks", f"not JSON: {error}")], where="bundle") from None
        _refuse_other_keys(self.tasks)
        return encoded

    def stamp(self, environment: str) -> BundleStamp:
        """Return what the store remembers of this bundle. *environment* is the catalog's name of the signed one."""
        digest = hashlib.sha256(self.canonical()).hexdigest()
        return BundleStamp(key=self.key, made_at=self.made_at, digest=digest, environment=environment, split=self.split)

    def check_time(self, now: datetime) -> None:
        """Raise ``BundleRefused`` if the bundle has expired at *now*, or is from the future."""
        if now - CLOCKS > datetime.fromisoformat(self.expires):
            raise BundleRefused(
                f"the bundle was signed at {self.made_at} and expired at {self.expires}; the time here is "
                f"{time_text(now)}: {_AGAIN}"
            )
        if now + CLOCKS < datetime.fromisoformat(self.made_at):
            raise BundleRefused(
                f"the bundle was signed at {self.made_at}, but the time here is {time_text(now)}: set the clocks of "
                f"both machines, and {_AGAIN}"
            )

    def check_use(self, *, instance: str, now: datetime) -> None:
        """Raise ``BundleRefused`` if the gateway *instance* must not accept the bundle at *now*."""
        self.check_time(now)
        if self.instance not in ("", instance):
            raise BundleRefused(
                f"the bundle is for the gateway instance {self.instance[:100]!r}, and this one is {instance!r} "
                f"(GATEWAY_INSTANCE): {_AGAIN} --instance {instance}"
            )


def is_bundle(document: object) -> bool:
    """Return True if *document* has the name of a bundle's format, or both ``tasks`` and ``signature``."""
    if not isinstance(document, Mapping):
        return False
    form = document.get("format")
    return (isinstance(form, str) and form.startswith(_FORMATS)) or {"tasks", "signature"} <= set(document)


def read_bundle(document: object) -> Bundle:
    """Check the form of a bundle, and nothing else. Raises ``TaskInvalid`` with all problems."""
    try:
        return Bundle.model_validate(document)
    except ValidationError as error:
        entries = error.errors(include_url=False)
        problems = [(".".join(map(str, one["loc"])), reason_of(one, Bundle)) for one in entries]
    found = document.get("format") if isinstance(document, Mapping) else None
    if isinstance(found, str) and found != FORMAT:
        # Format 1 had no dates, so a bundle could be replayed for ever.
        problems = [("format", f"the format {found[:60]!r} is not accepted, only {FORMAT!r}: {_AGAIN}")]
    raise TaskInvalid(problems, where="bundle")


def time_text(at: datetime) -> str:
    """Return *at*, which has a time zone, in a bundle's notation."""
    return at.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _refuse_other_keys(value: object) -> None:
    """Raise ``TaskInvalid`` for keys that are no text, which YAML has: JSON would write 1 and "1" alike."""
    todo = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            for key in one:
                if not isinstance(key, str):
                    raise TaskInvalid([("tasks", f"not JSON: the key {key!r:.60} is not a text")], where="bundle")
            todo += one.values()
        elif isinstance(one, list):
            todo += one
