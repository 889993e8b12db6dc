"""Browses the dashboard in Chromium. Runs in a container of the browser environment's image, with the host's network.

    python3 dashboard_browsing.py URL KEY FOLDER < plan.json

``plan.json`` has the ``pages`` to look at, an ``episode`` that ended and one that ``runs``; or else, in ``drains``, the
name of a machine to drain. Screenshots go to FOLDER.
The program prints one JSON object: ``problems`` of pages, and what each interaction showed.
"""

import importlib
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

sync_api: Any = importlib.import_module("playwright.sync_api")  # of the image
CHROMIUM = "/usr/lib/chromium/chromium-headless-shell"
WAIT_S = 300.0
"""Seconds after which a page counts as one that hangs: less than the whole program has."""
WIDTHS = (1280, 400)
THEMES = ("light", "dark")
REMOTE = "gateway.test"
"""A name for this machine that Chromium does not know as its own: it treats the pages as those of a remote server."""
CONTRAST = """() => {
  const channel = value => { value /= 255; return value <= .03928 ? value / 12.92 : ((value + .055) / 1.055) ** 2.4; };
  const numbers = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => .2126 * channel(r) + .7152 * channel(g) + .0722 * channel(b);
  const ground = element => { for (let one = element; one; one = one.parentElement) {
    const found = numbers(getComputedStyle(one).backgroundColor);
    if (found.length < 4 || found[3] === 1) return found; } return [255, 255, 255]; };
  const low = [];
  for (const element of document.querySelectorAll("main *, header *, footer *")) {
    const hasText = [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim());
    if (!hasText || !element.offsetParent) continue;
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(ground(element))].sort((x, y) => y - x);
    const text = element.textContent.trim().slice(0, 40);
    if ((a + .05) / (b + .05) < 4.5) low.push(`${element.tagName} ${element.className}: ${text}`);
  }
  return low;
}"""
"""Returns the texts whose contrast is below 4.5, the limit of WCAG 2 AA."""


def watched(page: Any, problems: list[str]) -> Any:
    page.on("console", lambda line: problems.append(f"{page.url}: {line.text}") if line.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    return page


def look(page: Any, url: str, paths: list[str], folder: str, problems: list[str]) -> int:
    """Open each page in both themes and at both widths. Return the number of screenshots."""
    count = 0
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            for path in paths:
                answer = page.goto(f"{url}/dashboard/{path}")
                if answer is None or not answer.ok:
                    problems.append(f"{path}: {answer and answer.status}")
                page.wait_for_load_state("networkidle") if path != "now" else page.wait_for_selector(".chart canvas")
                if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    problems.append(f"{path} at {width}: wider than the window")
                problems += [f"{path}, {theme}: low contrast: {one}" for one in page.evaluate(CONTRAST)]
                name = path.split("?")[0].replace("/", "-")[:40]
                page.screenshot(path=f"{folder}/{name}-{theme}-{width}.png", full_page=True)
                count += 1
    page.set_viewport_size({"width": WIDTHS[0], "height": 900})
    return count


def until(page: Any, expression: str, argument: object = None) -> None:
    """Wait until *expression* is true, also across pages. Playwright's own wait needs ``eval``, which pages forbid."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if page.evaluate(expression, argument):
                return
        except sync_api.Error:
            pass  # the page is just replaced by the next
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.wait_for_timeout(100)


def use_keys(page: Any, url: str, episode: str) -> dict[str, object]:
    """Go from the page Now to an episode, to the next, and to the search, without a mouse."""
    page.goto(f"{url}/dashboard/now")
    page.keyboard.press("e")
    page.wait_for_url(lambda now: now.endswith("/dashboard/episodes"))
    page.keyboard.press("/")
    focused = page.evaluate("document.activeElement.name")
    page.keyboard.type("probed")
    page.keyboard.press("Enter")
    page.wait_for_url(lambda now: "task=probed" in now)
    searched = page.url
    page.goto(f"{url}/dashboard/episodes")
    page.locator("#episodes td a").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#episode")
    first = page.url
    page.keyboard.press("ArrowRight")
    page.wait_for_url(lambda now: now != first)
    second = page.url
    page.keyboard.press("ArrowLeft")
    page.wait_for_url(first)
    before = page.evaluate("document.documentElement.dataset.theme || ''")
    page.keyboard.press("t")
    after = page.evaluate("document.documentElement.dataset.theme")
    page.reload()
    kept = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    return {"focused": focused, "searched": searched, "second": second != first, "themes": [before, after, kept]}


def follow_live(page: Any, url: str) -> bool:
    """Return whether the page Now shows that another page replaces workers, without being opened again."""
    other = page.context.new_page()
    other.on("dialog", lambda dialog: dialog.accept())
    other.goto(f"{url}/dashboard/environments/unsteady")
    page.goto(f"{url}/dashboard/now")
    page.evaluate("document.body.dataset.mark = 'same page'")
    before = page.locator("#live").inner_text()
    other.get_by_role("button", name="Replace its workers").click()
    until(page, "text => document.querySelector('#live').innerText !== text", before)
    return bool(page.evaluate("document.body.dataset.mark === 'same page'"))


def change(page: Any, url: str, plan: dict[str, str]) -> dict[str, object]:
    """Replay an episode, and end a session: not at all if the question is answered with no, and not twice."""
    page.goto(f"{url}/dashboard/episodes/{plan['episode']}")
    page.get_by_role("button", name="Replay").click()
    until(page, "document.querySelector('#replay').textContent !== ''")
    replayed = page.locator("#replay").inner_text()
    page.get_by_role("button", name="Copy as curl").click()
    until(page, "navigator.clipboard.readText().then(text => text !== '')")
    copied = page.evaluate("navigator.clipboard.readText()")
    questions: list[str] = []
    answers = iter((False, True))

    def answer(dialog: Any) -> None:
        questions.append(dialog.message)
        dialog.accept() if next(answers) else dialog.dismiss()

    page.on("dialog", answer)
    stale = page.context.new_page()
    messages: list[str] = []

    def agree(dialog: Any) -> None:
        messages.append(dialog.message)
        dialog.accept()

    stale.on("dialog", agree)
    for one in (stale, page):
        one.goto(f"{url}/dashboard/episodes/{plan['runs']}")
    end = page.get_by_role("button", name="End the session")
    end.click()
    page.reload()
    kept = end.count()
    end.click()
    over = "document.body && !document.body.innerText.includes('End the session')"
    until(page, over)
    stale.get_by_role("button", name="End the session").click()
    until(stale, over)
    return {
        "replayed": replayed,
        "copied": copied,
        "questions": questions,
        "kept": kept,
        "end": page.locator("dl").inner_text(),
        "again": messages,
    }


def act_remotely(page: Any, url: str, episode: str, key: str) -> dict[str, str]:
    """Use the buttons of an episode over plain HTTP under the name of another machine."""
    page.goto(f"{url.replace('127.0.0.1', REMOTE)}/dashboard/episodes/{episode}")
    sign_in(page, key)
    page.wait_for_selector("#episode")
    for button, place in (("Replay", "#replay"), ("Worker's log", "#log")):
        page.get_by_role("button", name=button).click()
        until(page, "place => document.querySelector(place).textContent !== ''", place)
    page.get_by_role("button", name="Copy as curl").click()
    until(page, "document.querySelector('[data-copy]').textContent === 'Copied'")
    page.keyboard.press("/")
    page.keyboard.press("Control+V")
    until(page, "document.activeElement.value !== ''")
    return {
        "replayed": page.locator("#replay").inner_text(),
        "log": page.locator("#log").inner_text(),
        "copied": page.evaluate("document.activeElement.value"),
    }


def sign_in(page: Any, key: str) -> None:
    until(page, "document.activeElement.name === 'key'")
    page.keyboard.type(key)
    page.keyboard.press("Enter")
    page.wait_for_selector("nav")


def drain(page: Any, url: str, machine: str, folder: str) -> dict[str, object]:
    """Drain a machine and end the drain. Return its state, as the page shows it, before, between and afterwards."""
    questions: list[str] = []

    def accept(dialog: Any) -> None:
        questions.append(dialog.message)
        dialog.accept()

    page.on("dialog", accept)
    page.goto(f"{url}/dashboard/now")
    row = page.locator("#nodes tbody tr", has_text=machine)
    state = """name => [...document.querySelectorAll("#nodes tbody tr")].find(row => row.innerText.includes(name))
        ?.cells[1].innerText"""
    states = [row.locator("td").nth(1).inner_text()]
    for button, wanted in (("Drain", "live, draining"), ("End the drain", "live")):
        row.get_by_role("button", name=button, exact=True).click()
        until(page, f"([name, wanted]) => ({state})(name) === wanted", [machine, wanted])
        states.append(row.locator("td").nth(1).inner_text())
        page.screenshot(path=f"{folder}/nodes-{len(states)}.png", full_page=True)
    return {"states": states, "questions": questions}


@contextmanager
def telling(problems: list[str]) -> Iterator[None]:
    """Print the problems of pages if the block fails: they may be its cause."""
    try:
        yield
    except BaseException:
        print(problems, file=sys.stderr)
        raise


def main() -> None:
    url, key, folder = sys.argv[1:]
    plan = json.load(sys.stdin)
    problems: list[str] = []
    with sync_api.sync_playwright() as playwright, telling(problems):
        options = ["--no-sandbox", f"--host-resolver-rules=MAP {REMOTE} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        context.set_default_timeout(1000 * WAIT_S)
        page = watched(context.new_page(), problems)
        page.goto(f"{url}/dashboard/")
        problems.clear()  # the answer 401 to a page without a key is logged as an error
        sign_in(page, key)
        if "drains" in plan:
            print(json.dumps(drain(page, url, plan["drains"], folder) | {"problems": problems}))
            return
        found = {
            "screenshots": look(page, url, plan["pages"], folder, problems),
            "keys": use_keys(page, url, plan["episode"]),
            "changes": change(page, url, plan),
            "remote": act_remotely(context.new_page(), url, plan["episode"], key),
            "live": follow_live(page, url),
        }
        report = watched(context.new_page(), problems)
        report.goto(f"file://{folder}/report.html")
        report.screenshot(path=f"{folder}/report.png", full_page=True)
        found["report"] = report.locator("main").inner_text()
        browser.close()
    print(json.dumps(found | {"problems": problems}))


main()
