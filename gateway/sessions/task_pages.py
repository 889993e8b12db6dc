"""Tasks of foreign images, kept page by page: as many as fit, the oldest dropped first."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

from gateway.core.environment import TaskSpec

PAGE: Final = 64
"""Tasks in a page: some servers make all tasks anew for each one that they hand out."""
PAGES_MAX: Final = 256
BYTES_MAX: Final = 64 * 2**20
"""Of one environment's pages, as compact JSON."""

Page = tuple[bytes, ...]
"""Tasks as compact JSON: a tenth of what they are as objects."""


class TaskPages:
    """The pages of one environment's splits."""

    def __init__(self, *, pages_max: int = PAGES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._pages_max = pages_max
        self._bytes_max = bytes_max
        self._pages: OrderedDict[tuple[str, int], Page] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return self._bytes

    def look_up(self, split: str, start: int, stop: int) -> tuple[dict[int, Page], list[int]]:
        """The pages that hold tasks from *start* up to, not including, *stop*, by number; and the missing ones.

        No page after the last one is missing: a page that is not full is the last.
        """
        found: dict[int, Page] = {}
        missing: list[int] = []
        for number in range(start // PAGE, -(-stop // PAGE) if stop > start else 0):
            page = self._pages.get((split, number))
            if page is None:
                missing.append(number)
                continue
            self._pages.move_to_end((split, number))
            found[number] = page
            if len(page) < PAGE:
                break
        return found, missing

    def keep(self, split: str, number: int, tasks: Sequence[TaskSpec]) -> Page:
        """Keep a page, dropping the oldest ones beyond the bounds; returns it, kept or not."""
        page = tuple(json.dumps(task, separators=(",", ":")).encode() for task in tasks[:PAGE])
        size = sum(map(len, page))
        self._drop((split, number))
        if size > self._bytes_max:
            return page
        self._pages[split, number] = page
        self._bytes += size
        while len(self._pages) > self._pages_max or self._bytes > self._bytes_max:
            self._drop(next(iter(self._pages)))
        return page

    @staticmethod
    def cut(pages: Mapping[int, Page], start: int, stop: int) -> list[TaskSpec]:
        """The tasks from *start* up to, not including, *stop* that *pages* hold."""
        return [
            json.loads(page[index - number * PAGE])
            for number, page in sorted(pages.items())
            for index in range(max(start, number * PAGE), min(stop, number * PAGE + len(page)))
        ]

    def _drop(self, key: tuple[str, int]) -> None:
        self._bytes -= sum(map(len, self._pages.pop(key, ())))
