"""Serves the dashboard at ``/dashboard``: pages, the same as JSON, static files, and signing in and out.

Pages have no scripts and styles of their own, and the content security policy allows none. What a page changes goes to
``/admin/v1``, which accepts the dashboard's cookie from the dashboard's own pages only (`auth`).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from gateway.core.errors import GatewayError, UnknownEpisode
from gateway.core.json_text import dump
from gateway.core.ports.step_log import StepLogQueries
from gateway.frontends.admin.episodes import blob_response
from gateway.frontends.asgi import HungUp, read_body
from gateway.frontends.dashboard.pages import Pages
from gateway.frontends.dashboard.rendering import render, static_files
from gateway.frontends.dashboard.sign_in import COOKIE, VALID_S, SignIn, Viewer
from gateway.frontends.errors import status_of
from gateway.metrics import Metrics

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
}
FORM_BYTES: Final = 4096
_TYPES: Final = {"js": "text/javascript", "css": "text/css", "LICENSE": "text/plain", "toml": "text/plain"}
_JSON: Final = ".json"
_JSONL: Final = ".jsonl"

Content = Callable[[Viewer, Request], Awaitable[dict[str, Any]]]
"""Returns the content of a page for a viewer."""


class Dashboard:
    """The pages as an ASGI application."""

    def __init__(self, pages: Pages, *, sign_in: SignIn, queries: StepLogQueries, metrics: Metrics) -> None:
        self._pages = pages
        self._sign_in = sign_in
        self._queries = queries
        self._metrics = metrics
        self._static = static_files()

    def app(self) -> Starlette:
        """Return the application."""
        pages = self._pages
        operators: dict[str, tuple[str, Content]] = {
            "now": ("now.html", lambda _, request: pages.now()),
            "environments/{name}": (
                "environment.html",
                lambda _, request: pages.environment(request.path_params["name"]),
            ),
            "curricula": ("curricula.html", lambda _, request: pages.curricula()),
            "curricula/{name}": ("curriculum.html", lambda _, request: pages.curriculum(request.path_params["name"])),
            "doctor": ("doctor.html", lambda _, request: pages.doctor()),
        }
        everyone: dict[str, tuple[str, Content]] = {
            "episodes": ("episodes.html", lambda viewer, request: pages.episodes(viewer, request.query_params)),
            "episodes/{id}": ("episode.html", lambda viewer, request: pages.episode(viewer, request.path_params["id"])),
            "groups/{environment}/{group:path}": (
                "group.html",
                lambda viewer, request: pages.group(
                    viewer, request.path_params["environment"], request.path_params["group"]
                ),
            ),
        }
        routes = [
            Route("/dashboard", self._begin),
            Route("/dashboard/", self._begin),
            Route("/dashboard/sign-in", self._form, methods=["GET"]),
            Route("/dashboard/sign-in", self._signed_in, methods=["POST"]),
            Route("/dashboard/sign-out", self._signed_out, methods=["POST"]),
            Route("/dashboard/static/{file}", self._file),
            Route("/dashboard/blobs/{digest}", self._blob),
            Route("/dashboard/find", self._find),
            Route("/dashboard/episodes/{id}.jsonl", self._download),
        ]
        for role, known in ((True, operators), (False, everyone)):
            for path, (template, content) in known.items():
                shown = self._page(template, content, needs_operator=role)
                routes += [Route(f"/dashboard/{path}{_JSON}", shown), Route(f"/dashboard/{path}", shown)]
        return Starlette(routes=routes)

    # -- pages ----------------------------------------------------------------------------------------------------

    def _page(
        self, template: str, content: Content, *, needs_operator: bool
    ) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            is_json = request.url.path.endswith(_JSON)
            viewer: Viewer | None = request.scope.get("gateway.viewer")
            if viewer is None:
                return self._refused(request, 401, "sign in with a key of this gateway", None, is_json=is_json)
            if needs_operator and not viewer.is_operator:
                detail = "this page needs an operator's key; a trainer's key shows its own episodes"
                return self._refused(request, 403, detail, viewer, is_json=is_json)
            try:
                found = await content(viewer, request)
            except GatewayError as error:
                return self._refused(request, status_of(error), error.detail, viewer, is_json=is_json)
            if is_json:
                return Response(dump(found), media_type="application/json", headers=HEADERS)
            return _html(render(template, viewer=viewer, page=found, path=request.url.path, query=request.url.query))

        return show

    def _refused(self, request: Request, status: int, detail: str, viewer: Viewer | None, *, is_json: bool) -> Response:
        if is_json:
            return Response(dump({"detail": detail}), status, media_type="application/json", headers=HEADERS)
        if status == 401:
            return _html(render("sign_in.html", viewer=None, error="", path=request.url.path), 401)
        return _html(render("refused.html", viewer=viewer, detail=detail, path=request.url.path), status)

    async def _begin(self, request: Request) -> Response:
        viewer: Viewer | None = request.scope.get("gateway.viewer")
        page = "episodes" if viewer is not None and not viewer.is_operator else "now"
        return RedirectResponse(f"{_root(request)}/{page}", 303, headers=HEADERS)

    async def _file(self, request: Request) -> Response:
        name = request.path_params["file"]
        data = self._static.get(name)
        if data is None:
            return Response("not found", 404, headers=HEADERS)
        kind = _TYPES.get(name.rpartition(".")[2], "application/octet-stream")
        return Response(data, media_type=kind, headers={**HEADERS, "cache-control": "private, max-age=3600"})

    async def _blob(self, request: Request) -> Response:
        """Return an image of a step. Operators also get other stored data: a long task has its answers."""
        viewer: Viewer | None = request.scope.get("gateway.viewer")
        if viewer is None:
            return Response("sign in first", 401, headers=HEADERS)
        digest = request.path_params["digest"]
        data = await self._queries.blob(digest) if re.fullmatch(r"[0-9a-f]{64}", digest) else None
        answer = None if data is None else blob_response(data)
        if answer is None or not (viewer.is_operator or str(answer.media_type).startswith("image/")):
            return Response("not found", 404, headers=HEADERS)
        return answer

    async def _find(self, request: Request) -> Response:
        """Lead to the episode with this id or of this session, or else to the list of the episodes of this task."""
        viewer: Viewer | None = request.scope.get("gateway.viewer")
        if viewer is None:
            return self._refused(request, 401, "", None, is_json=False)
        wanted = request.query_params.get("q", "").strip()
        try:
            found = (await self._pages.episode(viewer, wanted))["id"]
            return RedirectResponse(f"{_root(request)}/episodes/{found}", 303, headers=HEADERS)
        except UnknownEpisode:
            query = urlencode({"task": wanted})
            return RedirectResponse(f"{_root(request)}/episodes?{query}", 303, headers=HEADERS)

    async def _download(self, request: Request) -> Response:
        """Return an episode as one line, as `gateway replay` reads it."""
        viewer: Viewer | None = request.scope.get("gateway.viewer")
        if viewer is None:
            return Response("sign in first", 401, headers=HEADERS)
        try:
            found = await self._pages.episode(viewer, request.path_params["id"])
        except GatewayError as error:
            return Response(error.detail, status_of(error), headers=HEADERS)
        del found["curl"]
        name = re.sub(r"[^0-9A-Za-z]", "", found["id"])
        headers = {**HEADERS, "content-disposition": f'attachment; filename="{name}.jsonl"'}
        return Response(dump(found) + b"\n", media_type="application/jsonl", headers=headers)

    # -- signing in -----------------------------------------------------------------------------------------------

    async def _form(self, request: Request) -> Response:
        return _html(render("sign_in.html", viewer=None, error="", path=f"{_root(request)}/"))

    async def _signed_in(self, request: Request) -> Response:
        try:
            body = await read_body(request.scope, request.receive, FORM_BYTES)
        except (GatewayError, HungUp):
            return Response("the form is too long", 413, headers=HEADERS)
        form = parse_qs(body.decode("utf-8", "replace"))
        token = self._sign_in.token(form.get("key", [""])[0].strip())
        if token is None:
            self._metrics.turned_away("wrong_key")
            error = "This key is not known here."
            return _html(render("sign_in.html", viewer=None, error=error, path=f"{_root(request)}/"), 401)
        wanted = form.get("path", [""])[0]
        is_own = wanted.startswith(f"{_root(request)}/") and "//" not in wanted and "\\" not in wanted
        answer = RedirectResponse(wanted if is_own else f"{_root(request)}/", 303, headers=HEADERS)
        answer.set_cookie(
            COOKIE, token, max_age=int(VALID_S), httponly=True, samesite="strict", secure=_is_secure(request)
        )
        return answer

    async def _signed_out(self, request: Request) -> Response:
        answer = RedirectResponse(f"{_root(request)}/sign-in", 303, headers=HEADERS)
        answer.delete_cookie(COOKIE)
        return answer


def _html(text: str, status: int = 200) -> Response:
    content = text.encode(errors="backslashreplace")  # an agent may write a lone surrogate
    return Response(content, status, media_type="text/html", headers=HEADERS)


def _root(request: Request) -> str:
    return f"{request.scope.get('root_path', '')}/dashboard"


def _is_secure(request: Request) -> bool:
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
