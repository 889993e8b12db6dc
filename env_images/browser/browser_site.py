"""The pages of a task, given to the browser from memory or from a folder: no server listens anywhere.

Every request of the browser passes through here (`Site.answer`), whatever address it names; what no page is behind is
refused. So a task may name any address for its pages, `http://localhost:8000/login` too.
"""

from __future__ import annotations

import mimetypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ORIGIN = "http://task.test"
"""Of pages that are named by a path alone; `.test` is nobody's (RFC 6761)."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What is at an address."""

    body: bytes
    content_type: str
    status: int = 200


REFUSED = Resource(b"<!doctype html><title>Refused</title><p>This address is not part of the task.", "text/html", 403)
NOT_FOUND = Resource(b"<!doctype html><title>Not found</title><h1>Not found</h1>", "text/html", 404)
Source = Callable[[str], Resource | None]
"""Finds what is at a path of its origin; None: nothing."""


class Site:
    """What the browser of one session can reach."""

    def __init__(self, *, base: str = ORIGIN) -> None:
        """*base*: the origin of pages that are named by a path."""
        self.base = base
        self._pages: dict[str, Resource] = {}
        self._sources: dict[str, Source] = {}
        self._origins = {base}

    def url(self, address: str) -> str:
        """Make a path of the site a whole URL; a whole one stays."""
        return self.base + address if address.startswith("/") else address

    def put(self, address: str, body: str | bytes, content_type: str = "") -> None:
        """Serve *body* at *address*, a path or a URL; the path's suffix says the type where none is given."""
        url = _without_fragment(self.url(address))
        data = body.encode("utf-8") if isinstance(body, str) else body
        self._pages[url] = Resource(data, content_type or guessed_type(urlsplit(url).path))
        self._origins.add(origin_of(url))

    def mount(self, origin: str, source: Source) -> None:
        """Let *source* answer what is asked of *origin*."""
        self._sources[origin] = source
        self._origins.add(origin)

    def may_open(self, url: str) -> bool:
        """Whether *url* is of one of the site's origins; an empty tab is open to all."""
        return url == "about:blank" or origin_of(url) in self._origins

    def find(self, url: str) -> Resource | None:
        """Give what is at *url*: with its query, else without. A missing page of our origins is a 404 page."""
        whole = _without_fragment(url)
        if (found := self._pages.get(whole) or self._pages.get(whole.partition("?")[0])) is not None:
            return found
        origin = origin_of(url)
        if (source := self._sources.get(origin)) is not None and (given := source(urlsplit(url).path)) is not None:
            return given
        if origin in self._origins:
            return NOT_FOUND
        return None

    def answer(self, route: Any) -> None:
        """Answer one request of the browser: Playwright's handler of routes."""
        found = self.find(route.request.url)
        if found is None and route.request.is_navigation_request() and origin_of(route.request.url):
            found = REFUSED  # a frame that shows an error of the browser's own cannot be looked into: that never ends
        if found is None:
            route.abort("blockedbyclient")
        else:
            headers = {"content-type": found.content_type, "cache-control": "no-store"}
            route.fulfill(status=found.status, body=found.body, headers=headers)


def folder_source(root: Path) -> Source:
    """Serve the files below *root*."""

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
    """Give scheme, host and port of an http(s) URL; empty for anything else."""
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
    """Guess a content type by a path's suffix; without one it is HTML."""
    guessed, _ = mimetypes.guess_type(path)
    if guessed is None or guessed == "text/html":
        return "text/html; charset=utf-8"
    return f"{guessed}; charset=utf-8" if guessed.startswith("text/") else guessed


def _without_fragment(url: str) -> str:
    whole = url.partition("#")[0]
    parts = urlsplit(whole)
    return whole + "/" if not parts.path and not parts.query else whole
