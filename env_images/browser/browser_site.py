"""The pages of a task, which the browser gets from memory or from a folder: no server listens anywhere.

Every request of the browser passes through `Site.answer`, whatever its address; a request without a page is refused.
Therefore a task may use any address for its pages, even `http://localhost:8000/login`.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MAX_MISSING = 1_000
"""Remembered addresses without a page; an episode has at most 200 steps, but a page may open many."""

ORIGIN = "http://task.test"
"""The origin of pages that are named only by a path; the domain `.test` has no owner (RFC 6761)."""


@dataclass(frozen=True, slots=True)
class Resource:
    """The content at an address."""

    body: bytes
    content_type: str
    status: int = 200


REFUSED = Resource(b"<!doctype html><title>Refused</title><p>This address is not part of the task.", "text/html", 403)
NOT_FOUND = Resource(b"<!doctype html><title>Not found</title><h1>Not found</h1>", "text/html", 404)
Source = Callable[[str], Resource | None]
"""Returns the resource at a path of its origin, or None."""


class Site:
    """The pages that the browser of one session can reach."""

    def __init__(self, *, base: str = ORIGIN) -> None:
        """Create an empty site; *base* is the origin of pages that are named by a path."""
        self.base = base
        self._pages: dict[str, Resource] = {}
        self._sources: dict[str, Source] = {}
        self._origins = {base}
        self._missing: set[str] = set()
        """Addresses that were opened and have no page."""

    def url(self, address: str) -> str:
        """Return the whole URL of a path of the site; return a URL unchanged."""
        return self.base + address if address.startswith("/") else address

    def put(self, address: str, body: str | bytes, content_type: str = "") -> None:
        """Serve *body* at *address*, a path or a URL; by default, the path's suffix determines the type."""
        url = _without_fragment(self.url(address))
        data = body.encode("utf-8") if isinstance(body, str) else body
        self._pages[url] = Resource(data, content_type or guessed_type(urlsplit(url).path))
        self._origins.add(origin_of(url))

    def mount(self, origin: str, source: Source) -> None:
        """Answer requests to *origin* from *source*."""
        self._sources[origin] = source
        self._origins.add(origin)

    def may_open(self, url: str) -> bool:
        """Return True if *url* has an origin of the site; an empty tab is always allowed."""
        return url == "about:blank" or origin_of(url) in self._origins

    def find(self, url: str) -> Resource | None:
        """Return the resource at *url*, with or without its query; a missing page of a known origin is a 404 page."""
        whole = _without_fragment(url)
        if (found := self._pages.get(whole) or self._pages.get(whole.partition("?")[0])) is not None:
            return found
        origin = origin_of(url)
        if (source := self._sources.get(origin)) is not None and (given := source(urlsplit(url).path)) is not None:
            return given
        if origin in self._origins:
            return NOT_FOUND
        return None

    def has_opened(self, url: str) -> bool:
        """Return False if a tab that shows *url* has a page of an error there. Scripts may show any address."""
        return _without_fragment(url) not in self._missing

    def answer(self, route: Any) -> None:
        """Answer one request of the browser; this is Playwright's handler of routes."""
        found = self.find(route.request.url)
        if route.request.is_navigation_request() and (found is None or found.status != 200):
            if len(self._missing) >= MAX_MISSING:
                self._missing.pop()
            self._missing.add(_without_fragment(route.request.url))
        if found is None and route.request.is_navigation_request() and origin_of(route.request.url):
            found = REFUSED  # a read of a frame with the browser's own error page never ends
        if found is None:
            route.abort("blockedbyclient")
        else:
            headers = {"content-type": found.content_type, "cache-control": "no-store"}
            route.fulfill(status=found.status, body=found.body, headers=headers)


def folder_source(root: Path) -> Source:
    """Return a source that serves the files below *root*."""

    def read(path: str) -> Resource | None:
        try:
            file = (root / unquote(path).lstrip("/")).resolve(strict=True)
        except (OSError, ValueError):
            return None
        if not file.is_relative_to(root) or not file.is_file():
            return None
        return Resource(file.read_bytes(), guessed_type(file.name))

    return read


def origin_of(url: str) -> str:
    """Return scheme, host and port of an http(s) URL, or an empty text for any other URL."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port is not None else ""
    except ValueError:
        return ""
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        return ""
    is_default = port == (":80" if parts.scheme == "http" else ":443")
    return f"{parts.scheme}://{parts.hostname}{'' if is_default else port}"


def guessed_type(path: str) -> str:
    """Guess a content type from a path's suffix; without a known suffix it is HTML."""
    guessed, _ = mimetypes.guess_type(path)
    if guessed is None or guessed == "text/html":
        return "text/html; charset=utf-8"
    return f"{guessed}; charset=utf-8" if guessed.startswith("text/") else guessed


def _without_fragment(url: str) -> str:
    whole = url.partition("#")[0]
    parts = urlsplit(whole)
    return whole + "/" if not parts.path and not parts.query else whole
