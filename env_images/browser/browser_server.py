"""The browser environment: one window of a real browser, controlled by BrowserGym's actions.

A session is a separate browser context in a Chromium that was started before the server was ready. `browser_engine`
runs the browser and `browser_launch` isolates it from this server. `browser_spec` reads tasks, `browser_plays` judges.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
from typing import Any, ClassVar

import browser_builtin  # noqa: F401  # registers its tasks
from browser_actions import Actions, unfenced
from browser_engine import BrowserLost, Engine
from browser_plays import Play, Verdict, class_of, play_of, register_miniwob
from browser_spec import Spec, read_spec
from browser_window import Look, Window
from envserver import (
    Environment,
    ImageBlock,
    Prompt,
    SessionFailed,
    SessionLost,
    StepResult,
    Task,
    TextBlock,
    ToolCall,
    serve,
    tool,
)

OPEN_S = 45.0
"""Seconds for a new window and its first page; the gateway gives an opening 60 s."""
CLOSE_S = 5.0


class Browser(Environment):
    """A session is one task; it ends when the task says so, or with its last step."""

    name = "browser"
    env_types: ClassVar[tuple[str, ...]] = ("browsergym", "browsergym_env")
    default_tool = "act"
    engine: ClassVar[Engine | None] = None
    """The worker's browser. Each session has its own context in it; the next session replaces a lost browser."""
    actions: ClassVar[Actions]

    _spec: Spec
    _play: Play
    _window: Window | None = None
    _engine: Engine
    _goal: str
    _steps = 0
    _reward = 0.0

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        """Open the task's pages. *seed* determines MiniWoB's tasks; all other tasks are fixed.

        Raises:
            InvalidTask: The task cannot be played; no session starts.
            SessionLost: The browser is lost.
        """
        self._spec = read_spec(task)
        self._engine = await running_engine()
        # Chosen on the engine's thread: custom tasks and MiniWoB's are code that may import more.
        try:
            look = await self._engine.run(self._open, seed, timeout_s=OPEN_S)
        except BrowserLost as error:
            raise SessionLost(str(error)) from error
        self._tell_state(look)
        return self._shown(look, "", is_first=True)

    @classmethod
    def check_task(cls, task: Task) -> None:
        """Refuse a task that cannot be played, or whose class is not known."""
        class_of(read_spec(task))

    async def close(self) -> None:
        """Close the window; kill a browser that does not close it."""
        if self._window is not None and not self._engine.is_lost():
            try:
                await self._engine.run(self._window.close, timeout_s=CLOSE_S)
            except BrowserLost:
                return  # and the window with it

    @tool
    async def act(self, action_str: str) -> StepResult:
        """Act on the page with a BrowserGym action, such as click('12') or fill('a5', 'text')."""
        action = unfenced(action_str)
        try:
            verdict, look, error = await self._engine.run(
                self._step, action, self.step_left_s, timeout_s=self._spec.step_s
            )
        except BrowserLost as lost:
            raise SessionLost(str(lost)) from lost
        self._reward += verdict.reward or 0.0
        self._tell_state(look)
        return StepResult(
            self._shown(look, error),
            reward=verdict.reward,
            finished=verdict.is_done,
            metadata=self._metadata() | verdict.info,
            data=self._observation(look, error),
        )

    def parse_text(self, text: str) -> ToolCall:
        """Treat a free text as an action, with or without a code fence around it."""
        return ToolCall("act", {"action_str": text})

    def _open(self, seed: int) -> Look:
        self._play = play_of(self._spec, seed=seed)
        window = Window(
            self._engine.browser,
            site=self._play.site,
            view=self._play.view,
            actions=self.actions,
            crashed=lambda: self._engine.kill("a page has crashed"),
        )
        self._window = window
        self._goal = self._play.begin(window)
        window.settle()
        return window.look()

    def _step(self, action: str, left_s: float) -> tuple[Verdict, Look, str]:
        window = self._window
        assert window is not None  # `reset` has opened it
        self._steps += 1
        within_s = min(self._spec.step_s, left_s) / 2  # the rest is for the verdict and the look
        error = window.act(action, within_s=within_s)
        try:
            verdict = self._play.judge(window, action, error)
            if not verdict.is_done and self._steps >= self._play.max_steps:
                verdict = self._play.at_the_end(window, verdict)
                verdict.info["truncated"] = True
        except Exception as broken:  # a task's class may raise too: no reward is better than an invented reward
            raise SessionFailed(f"the task cannot be judged: {type(broken).__name__}: {broken}"[:2000]) from broken
        try:
            return verdict, window.look(), error
        except Exception as broken:
            raise SessionFailed(f"the page cannot be looked at: {type(broken).__name__}: {broken}"[:2000]) from broken

    def _shown(self, look: Look, error: str, *, is_first: bool = False) -> Prompt:
        lines = [f"Goal: {self._goal}", f"URL: {look.url}"]
        if len(look.titles) > 1:
            tabs = (f"{place}: {title}" for place, title in enumerate(look.titles))
            lines.append(f"Tabs: {'; '.join(tabs)} (active: {look.active})")
        if error:
            lines.append(f"Error of the last action: {error}")
        lines.append(f"Page:\n{look.axtree}")
        if is_first:
            lines.append(f"Act with the tool `act`, one or a few of these calls at a time:\n{self.actions.describe()}")
        detail = {"observation": self._observation(look, error)} if is_first else None
        text = TextBlock("\n".join(lines), detail)
        return [text] if look.screenshot is None else [text, ImageBlock(look.screenshot, "image/png")]

    def _observation(self, look: Look, error: str) -> dict[str, Any]:
        """Return the observation with BrowserGym's fields; the image block next to it has the picture."""
        return {
            "text": look.axtree,
            "url": look.url,
            "screenshot": pixels(look.screenshot) if look.screenshot and self._spec.view.wants_pixels else None,
            "goal": self._goal,
            "axtree_txt": look.axtree,
            "pruned_html": look.html,
            "error": error,
            "last_action_error": bool(error),
            "open_pages_titles": list(look.titles),
            "active_page_index": look.active,
            "metadata": self._metadata(),
        }

    def _tell_state(self, look: Look) -> None:
        """Set the state for OpenEnv's `state()`, with the fields of BrowserGym's typed state."""
        told = self._metadata()
        self.client_state = {
            **{key: told[key] for key in ("benchmark", "task_name", "max_steps")},
            "goal": self._goal,
            "current_url": look.url,
            "cum_reward": self._reward,
        }

    def _metadata(self) -> dict[str, Any]:
        return {
            "benchmark": self._spec.benchmark,
            "task_name": self._spec.name,
            "step": self._steps,
            "max_steps": self._play.max_steps,
        }


async def running_engine() -> Engine:
    """Return the worker's browser; start a new browser if the last was lost.

    Raises:
        SessionLost: No browser can be started.
    """
    engine = Browser.engine
    if engine is None or engine.is_lost() or engine.is_gone():
        if engine is not None:
            engine.kill("it ended between sessions")
        try:
            engine = await asyncio.to_thread(Engine().wait_ready)
        except BrowserLost as error:
            raise SessionLost(str(error)) from error
        Browser.engine = engine
    return engine


def pixels(picture: str) -> list[list[list[int]]]:
    """Return a PNG in base64 as rows of pixels, each with red, green and blue."""
    array: Any = importlib.import_module("numpy").asarray
    image: Any = importlib.import_module("PIL.Image")
    opened = image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    rows: list[list[list[int]]] = array(opened).tolist()
    return rows


if __name__ == "__main__":
    # Before the server is ready: no session waits for a browser, or for the imports of BrowserGym and Playwright.
    Browser.engine = Engine()
    Browser.actions = Actions()
    register_miniwob()
    for module in ("browsergym.core.observation", "browsergym.utils.obs"):
        importlib.import_module(module)
    Browser.engine.wait_ready()
    serve(Browser)
