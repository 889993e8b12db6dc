"""One problem of an environment, as data."""

from collections.abc import Iterator, Mapping
from typing import Any


class Task(Mapping[str, Any]):
    """A frozen, mapping-like view of a task's JSON object: ``task["question"]``, ``task.get("hint")``.

    The values are the environment author's own; the server never looks into them but for the id.
    """

    __slots__ = ("_id", "_spec")

    def __init__(self, spec: Mapping[str, Any], *, task_id: str | None = None) -> None:
        named = spec.get("id", spec.get("task_id"))
        self._spec = dict(spec)
        self._id = str(named) if isinstance(named, str | int) else task_id

    @property
    def id(self) -> str | None:
        """The object's own ``id`` or ``task_id``; else ``<split>-<index>`` where it was opened by reference."""
        return self._id

    @property
    def spec(self) -> dict[str, Any]:
        """The task as a new plain dict."""
        return dict(self._spec)

    def __getitem__(self, key: str) -> Any:
        return self._spec[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._spec)

    def __len__(self) -> int:
        return len(self._spec)

    def __repr__(self) -> str:
        return f"<Task {self._id}>"
