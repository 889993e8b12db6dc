"""Reads a task of this environment and reports every fault with its path, before a session starts.

``python3 browser_spec.py FILE…`` checks files of tasks, one JSON object per line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from browser_rewards import Condition, InvalidCondition, read_condition
from browser_site import ORIGIN, origin_of
from browser_window import View
from envserver.generic import TaskError, parse_task

Benchmark = Literal["custom", "miniwob"]
BENCHMARKS: tuple[Benchmark, ...] = ("custom", "miniwob")
MAX_PAGES, MAX_PAGE_CHARS = 100, 1_000_000
MAX_STEPS = 200
STEPS = 20
"""The maximum number of steps of a task without its own."""
STEP_S, MAX_STEP_S = 40, 120
"""Default and maximum seconds of a step with its observation; then the browser is killed and the session fails."""
MAX_COOKIES = 50
TEMPLATES = (Path(__file__).resolve().parent / "templates", Path("/opt/openenv/custom_tasks/templates"))
"""The folders of `config.template`. The files beside a folder `templates` are the operator's code and answers."""
_PAGES = frozenset({"start_url", "html", "template", "pages", "cookies", "local_storage"})
_NAMES = frozenset({"benchmark", "task_name", "goal"})
_WAYS = frozenset({"viewport", "max_steps", "screenshot", "settle_ms", "step_timeout_s", "dialogs"})
_COOKIE_KEYS = frozenset({"name", "value", "url", "domain", "path", "httpOnly", "secure", "sameSite", "expires"})


class InvalidTask(ValueError):
    """A task that cannot be played; the message names the fault and its place."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The conditions by which a declarative task is judged."""

    goal: Condition
    fail: Condition | None = None
    """A condition that ends the episode with 0 if it holds."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A task of this environment."""

    benchmark: Benchmark
    name: str
    goal: str
    view: View
    max_steps: int | None
    """The maximum number of steps, or None for the number of the task's class, else `STEPS`."""
    step_s: float
    start_url: str = ""
    pages: Mapping[str, str] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    """The conditions, or None if a class judges: a custom class or a MiniWoB task's."""
    has_view: bool = False
    """True if the task itself sets the size of its window."""


def read_spec(task: Mapping[str, Any], *, variables: Mapping[str, str] = os.environ) -> Spec:
    """Read *task*; *variables* may name the benchmark and the task if the task does not.

    Raises:
        InvalidTask: The task cannot be played.
    """
    try:
        generic = parse_task(task)
    except TaskError as error:
        raise InvalidTask(str(error)) from None
    config = generic.config
    _refuse_unknown(config, _PAGES | _NAMES | _WAYS, "config")
    benchmark, name = _named(generic.id, config, variables)
    goal = generic.instruction or _text(config, "goal", "config.goal", default="")
    is_declarative = benchmark == "custom" and bool(_PAGES & config.keys())
    if benchmark == "miniwob" and (unfit := (_PAGES | {"dialogs"}) & config.keys()):
        raise InvalidTask(f"config.{min(unfit)}: not for MiniWoB tasks, whose pages are their own")
    if not is_declarative and generic.evaluation:
        raise InvalidTask("evaluation: this task is judged by its own class")
    start_url, pages = _read_pages(config) if is_declarative else ("", {})
    spec = Spec(
        benchmark,
        name,
        goal,
        view=_read_view(config, base=origin_of(start_url) or ORIGIN),
        max_steps=_number(config, "max_steps", 1, MAX_STEPS, STEPS) if "max_steps" in config else None,
        step_s=_number(config, "step_timeout_s", 1, MAX_STEP_S, STEP_S),
        start_url=start_url,
        pages=pages,
        evaluation=read_evaluation(generic.evaluation) if is_declarative else None,
        has_view="viewport" in config,
    )
    if is_declarative and not goal.strip():
        raise InvalidTask("instruction: the task has none")
    return spec


def read_evaluation(given: Mapping[str, Any]) -> Evaluation:
    """Read a declarative task's ``evaluation``: a condition, and optionally ``fail``, which ends the task with 0.

    Raises:
        InvalidTask: The task cannot be judged.
    """
    if "script" in given:
        raise InvalidTask("evaluation.script: this environment runs none; name a reward_function, all or any")
    rest = {key: value for key, value in given.items() if key != "fail"}
    try:
        fail = read_condition(given["fail"], "evaluation.fail") if "fail" in given else None
        return Evaluation(read_condition(rest, "evaluation"), fail)
    except InvalidCondition as error:
        raise InvalidTask(str(error)) from None


def _named(task_id: str, config: Mapping[str, Any], variables: Mapping[str, str]) -> tuple[Benchmark, str]:
    """Return the benchmark and its task: from the configuration, else from the id, else from the variables."""
    head, _, tail = task_id.partition("/")
    by_id = (head, tail) if head in BENCHMARKS and tail else ("", "")
    benchmark = _text(config, "benchmark", "config.benchmark", default="") or by_id[0]
    name = _text(config, "task_name", "config.task_name", default="")
    if not benchmark and not name and not (_PAGES & config.keys()):
        benchmark, name = variables.get("BROWSERGYM_BENCHMARK", ""), variables.get("BROWSERGYM_TASK_NAME", "")
    benchmark = benchmark or "custom"
    if benchmark not in BENCHMARKS:
        raise InvalidTask(f"config.benchmark: {benchmark!r:.80} is not one of {', '.join(BENCHMARKS)}")
    name = name or (by_id[1] if by_id[0] == benchmark else "") or task_id
    if not name and not (_PAGES & config.keys()):
        raise InvalidTask("config.task_name: the task names neither a registered task nor pages of its own")
    return benchmark, name


def _read_pages(config: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Return the start address and the pages by address."""
    given = config.get("pages", {})
    if not isinstance(given, Mapping) or len(given) > MAX_PAGES:
        raise InvalidTask(f"config.pages: must be an object of at most {MAX_PAGES} pages")
    pages: dict[str, str] = {}
    for address, html in given.items():
        _check_address(address, f"config.pages[{address!r:.80}]")
        pages[address] = _checked_page(html, f"config.pages[{address!r:.80}]")
    start = _text(config, "start_url", "config.start_url", default="")
    if start:
        _check_address(start, "config.start_url")
    sources = [key for key in ("html", "template") if key in config]
    if len(sources) == 2:
        raise InvalidTask("config.template: either html or template, not both")
    if sources:
        text = config["html"] if sources == ["html"] else read_template(config["template"])
        start = start or "/"
        pages[_bare(start)] = _checked_page(text, f"config.{sources[0]}")
    if not pages:
        raise InvalidTask("config.pages: nothing is there to be opened: give html, template or pages")
    start = start or next(iter(pages))
    base = origin_of(start) or ORIGIN
    whole = {_bare(address if origin_of(address) else base + address) for address in pages}
    if _bare(start if origin_of(start) else base + start) not in whole:
        raise InvalidTask("config.start_url: no page is there; pages, html or template must serve it")
    return start, pages


def _bare(address: str) -> str:
    return address.partition("#")[0].partition("?")[0]


def _check_address(address: object, path: str) -> None:
    if not isinstance(address, str) or len(address) > 500 or not (address.startswith("/") or origin_of(address)):
        raise InvalidTask(f"{path}: must be a path such as /login, or an http address")


def _checked_page(html: object, path: str) -> str:
    if not isinstance(html, str) or not 0 < len(html) <= MAX_PAGE_CHARS:
        raise InvalidTask(f"{path}: must be a text of 1 to {MAX_PAGE_CHARS} characters")
    return html


def read_template(name: object, folders: tuple[Path, ...] = TEMPLATES) -> str:
    """Read a page from a folder `templates`.

    Raises:
        InvalidTask: The name leads out of the folders or is not an HTML file's, or there is no such page.
    """
    if not isinstance(name, str) or len(name) > 200 or name[:1] == "/" or ".." in Path(name).parts or "\0" in name:
        raise InvalidTask("config.template: must be the name of a file in templates, without ..")
    if not name.endswith(".html"):
        raise InvalidTask(f"config.template: must be the name of an .html file, not {name!r:.100}")
    for folder in folders:
        file = (folder / name.removeprefix("templates/")).resolve()
        if file.is_relative_to(folder.resolve()) and file.suffix == ".html" and file.is_file():
            return _page_of(file, name)
    raise InvalidTask(f"config.template: there is no file {name!r:.100}")


def _page_of(file: Path, name: str) -> str:
    try:
        with file.open(encoding="utf-8") as page:
            return page.read(MAX_PAGE_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidTask(f"config.template: {name!r:.100} cannot be read: {error}") from error


def _read_view(config: Mapping[str, Any], *, base: str) -> View:
    size = config.get("viewport", {})
    if not isinstance(size, Mapping):
        raise InvalidTask("config.viewport: must be an object with width and height")
    _refuse_unknown(size, frozenset({"width", "height"}), "config.viewport")
    dialogs = config.get("dialogs", "dismiss")
    if dialogs not in ("dismiss", "accept"):
        raise InvalidTask("config.dialogs: must be dismiss or accept")
    screenshot = config.get("screenshot", True)
    if screenshot != "pixels" and not isinstance(screenshot, bool):
        raise InvalidTask("config.screenshot: must be true, false or pixels")
    plain = View()
    return View(
        width=_number(size, "width", 160, 1600, plain.width, "config.viewport"),
        height=_number(size, "height", 120, 1200, plain.height, "config.viewport"),
        settle_ms=_number(config, "settle_ms", 0, 3_000, plain.settle_ms),
        accept_dialogs=dialogs == "accept",
        cookies=_read_cookies(config.get("cookies", []), base),
        local_storage=_read_storage(config.get("local_storage", {}), base),
        wants_screenshot=screenshot is not False,
        wants_pixels=screenshot == "pixels",
    )


def _read_cookies(given: object, base: str) -> tuple[Mapping[str, Any], ...]:
    """Read a list of cookies in Playwright's form, or an object of names and values, for the start's origin."""
    if isinstance(given, Mapping):
        given = [{"name": name, "value": value} for name, value in given.items()]
    if not isinstance(given, list | tuple) or len(given) > MAX_COOKIES:
        raise InvalidTask(f"config.cookies: must be a list of at most {MAX_COOKIES} cookies")
    cookies = []
    for place, cookie in enumerate(given):
        path = f"config.cookies[{place}]"
        if not isinstance(cookie, Mapping):
            raise InvalidTask(f"{path}: must be an object with name and value")
        _refuse_unknown(cookie, _COOKIE_KEYS, path)
        if not all(isinstance(cookie.get(key), str) for key in ("name", "value")):
            raise InvalidTask(f"{path}: name and value are texts")
        host = base.partition("//")[2].partition(":")[0]
        cookies.append({"domain": host, "path": "/", **cookie} if "url" not in cookie else dict(cookie))
    return tuple(cookies)


def _read_storage(given: object, base: str) -> dict[str, dict[str, str]]:
    """Read an object of keys and values for the start's origin, or such objects by origin."""
    if not isinstance(given, Mapping):
        raise InvalidTask("config.local_storage: must be an object")
    if given and all(isinstance(values, Mapping) and origin_of(origin) for origin, values in given.items()):
        found = {origin_of(origin): dict(values) for origin, values in given.items()}
    else:
        found = {base: dict(given)} if given else {}
    for values in found.values():
        for key, value in values.items():
            if not isinstance(value, str):
                raise InvalidTask(f"config.local_storage.{key}: must be a text, as storage holds nothing else")
    return found


def _refuse_unknown(given: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    if unknown := sorted(given.keys() - known):
        raise InvalidTask(f"{path}.{unknown[0]}: no such key; there are {', '.join(sorted(known))}")


def _text(given: Mapping[str, Any], key: str, path: str, *, default: str) -> str:
    value = given.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidTask(f"{path}: must be a text")
    return value or default


def _number(given: Mapping[str, Any], key: str, least: int, most: int, default: int, path: str = "config") -> int:
    value = given.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise InvalidTask(f"{path}.{key}: must be a whole number from {least} to {most}")
    return value


def check_file(path: Path) -> list[str]:
    """Return the faults of a file's tasks, with their lines."""
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            read_spec(json.loads(line), variables={})
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    return problems


if __name__ == "__main__":
    found = [problem for name in sys.argv[1:] for problem in check_file(Path(name))]
    sys.exit("\n".join(found) if found else 0)
