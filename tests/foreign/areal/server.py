"""A task server for AReaL: guess the number.

One file serves AReaL's Task Server API under ``/api``, as a task author writes it from the API's description. It has
100 samples, each with a hidden number. The agent has a few turns to find the number, for a reward of 1.0.

    python server.py --host 0.0.0.0 --port 5000

Each option can also be set by a variable: ``--max-turns 8`` is ``GUESS_MAX_TURNS=8``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import uvicorn
from pydantic import BaseModel, Field, StrictInt, StrictStr, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

NAME = "guess-the-number"
LOW, HIGH = 1, 100
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "</s>", "<|eot_id|>")
SWEEP_S = 1.0
POLL_S = 0.02
INSTRUCTIONS = (
    "Find a hidden number. In each turn think first, then act once, in this form:\n"
    "Think: a line of reasoning\nAct: guess(50)\n"
    "After each guess you are told whether the number is higher or lower. Act: stop gives up."
)
REMINDER = "Error: no action was found. Write one line 'Think: ...' and one line 'Act: guess(NUMBER)' or 'Act: stop'."

Json = dict[str, Any]
Body = TypeVar("Body", bound=BaseModel)


class Options(argparse.Namespace):
    """The options of the command line."""

    host: str
    port: int
    prefix: str
    samples: int
    names: str
    max_turns: int
    idle_s: float
    capacity: int
    observation: Literal["text", "messages", "json"]
    action: Literal["text", "structured"]
    knobs: bool
    slow_step_file: str
    slow_start_file: str


class ApiError(Exception):
    """Ends a request with the API's error body."""

    def __init__(self, status: int, error: str, detail: str, *, episode: str = "", word: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.body: Json = {"error": error, "detail": detail}
        if episode:
            self.body["episode_id"] = episode
        if word:
            self.body["status"] = word


# -- request bodies -------------------------------------------------------------------------------------------------


class Config(BaseModel):
    """Settings of one episode."""

    seed: StrictInt | None = None


class StartBody(BaseModel):
    """The body of ``/episode/start``."""

    sample_id: StrictInt | StrictStr
    config: Config | None = None


class TextAction(BaseModel):
    """A model's text."""

    type: Literal["text"]
    content: StrictStr


class StructuredAction(BaseModel):
    """An action ``{"guess": 42}`` or ``{"stop": true}``."""

    type: Literal["structured"]
    content: dict[str, Any]


class StepBody(BaseModel):
    """The body of ``/episode/step``."""

    episode_id: StrictStr = Field(min_length=1)
    action: TextAction | StructuredAction = Field(discriminator="type")


class CancelBody(BaseModel):
    """The body of ``/episode/cancel``."""

    episode_id: StrictStr = Field(min_length=1)


async def read(request: Request, kind: type[Body]) -> Body:
    """Read a body as *kind*; raise a 400 with the faults and their places."""
    episode = ""
    try:
        value = json.loads(await request.body() or b"null")
        if isinstance(value, dict) and isinstance(value.get("episode_id"), str):
            episode = value["episode_id"]
        return kind.model_validate(value)
    except ValidationError as error:
        told = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors())
        raise ApiError(400, "bad request", told, episode=episode) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(400, "bad request", f"the body is not JSON: {error}") from error


# -- the task -------------------------------------------------------------------------------------------------------


def hidden_number(sample: str, seed: int | None) -> int:
    """Return the number to be found: the same for the same sample and seed on every machine."""
    if seed is None:
        seed = int.from_bytes(hashlib.sha256(sample.encode()).digest()[:4], "big")
    return random.Random(f"{sample}:{seed}").randint(LOW, HIGH)


@dataclass
class Move:
    """A parsed action. Its *verb* is None for a text without an action."""

    verb: str | None = None
    value: float | None = None
    thought: str | None = None

    @property
    def shown(self) -> Json:
        """The action in the form of ``info.parsed_action``."""
        content = None if self.verb is None else f"{self.value:g}" if self.value is not None else ""
        return {"thought": self.thought, "action": self.verb, "content": content}


def parse_text(text: str) -> Move:
    """Read ``Think: ...`` and the last valid ``Act: ...`` of a model's text."""
    text = text.rstrip()
    while token := next((token for token in END_TOKENS if text.endswith(token)), None):
        text = text.removesuffix(token).rstrip()
    thought = "\n".join(re.findall(r"Think:\s*(.+)", text)) or None
    for act in reversed(re.findall(r"Act:\s*(.+)", text)):
        if found := re.match(r"(guess|sleep)\(\s*(-?\d{1,9}(?:\.\d{1,3})?)\s*\)", act):
            return Move(found[1], float(found[2]), thought)
        if found := re.match(r"(stop|crash)\b", act):
            return Move(found[1], None, thought)
    return Move()


def parse_object(content: Mapping[str, Any]) -> Move:
    """Read a structured action."""
    guess = content.get("guess")
    if isinstance(guess, (int, float)) and not isinstance(guess, bool):
        return Move("guess", float(guess))
    return Move("stop") if content.get("stop") is True else Move()


@dataclass
class Episode:
    """One game."""

    sample: str
    number: int
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    turn: int = 0
    answer: str = ""
    quiet_since: float = field(default_factory=time.monotonic)
    steps: int = 0
    """The number of running and waiting requests, during which the episode does not expire."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class Game:
    """The running episodes."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.episodes: dict[str, Episode] = {}
        self.starting = 0
        self.expired = 0

    def info(self) -> Json:
        """Return the answer of ``/task/info``."""
        return {
            "name": NAME,
            "num_samples": self.options.samples,
            "max_episode_length": self.options.max_turns,
            "observation_type": "json" if self.options.observation == "json" else "text",
            "action_type": self.options.action,
            "description": f"Find a number from {LOW} to {HIGH}",
        }

    async def start(self, body: StartBody) -> Json:
        """Start an episode."""
        sample = str(body.sample_id)
        if self.options.names:
            names = {self.options.names.format(number): str(number) for number in range(self.options.samples)}
            sample = names.get(sample, "")
        if not (sample.isascii() and sample.isdigit() and len(sample) < 10 and int(sample) < self.options.samples):
            raise ApiError(404, "sample not found", f"there are the samples 0 to {self.options.samples - 1}")
        sample = str(int(sample))
        if self.options.capacity and len(self.episodes) + self.starting >= self.options.capacity:
            detail = f"this server plays {self.options.capacity} episodes at once"
            raise ApiError(503, "no capacity", detail, word="capacity")
        self.starting += 1
        try:
            await self._until_there(self.options.slow_start_file)
        finally:
            self.starting -= 1
        episode = Episode(sample, hidden_number(sample, body.config.seed if body.config else None))
        self.episodes[episode.id] = episode
        problem = f"A number from {LOW} to {HIGH} is hidden. Which one is it?"
        info = {"max_turns": self.options.max_turns, "turn": 0, "sample_id": body.sample_id}
        return {
            "episode_id": episode.id,
            "observation": self._first(problem),
            "info": info | {"task_description": problem},
            "reward": 0.0,
            "done": False,
        }

    async def step(self, body: StepBody) -> Json:
        """Play one turn; concurrent steps of an episode run one after the other."""
        episode = self._found(body.episode_id)
        episode.steps += 1
        try:
            async with episode.lock:
                self._found(episode.id)
                return await self._play(episode, body.action)
        finally:
            episode.steps -= 1
            episode.quiet_since = time.monotonic()

    def cancel(self, body: CancelBody) -> Json:
        """End an episode; a running step is answered with 404."""
        episode = self._found(body.episode_id)
        self._forget(episode)
        return {"status": "cancelled", "episode_id": episode.id}

    def health(self) -> Json:
        """Return the answer of ``/health``."""
        return {
            "status": "healthy",
            "active_episodes": len(self.episodes),
            "task_name": NAME,
            "running_steps": sum(episode.steps for episode in self.episodes.values()),
            "starting": self.starting,
            "expired": self.expired,
        }

    async def sweep(self) -> None:
        """Remove idle episodes until cancelled."""
        while True:
            late = time.monotonic() - self.options.idle_s
            for episode in [*self.episodes.values()]:
                if not episode.steps and episode.quiet_since < late:
                    self.expired += 1
                    self._forget(episode)
            await asyncio.sleep(min(SWEEP_S, self.options.idle_s / 2))

    async def _play(self, episode: Episode, action: TextAction | StructuredAction) -> Json:
        if isinstance(action, StructuredAction) and self.options.action != "structured":
            detail = "action.type: this server takes 'text'"
            raise ApiError(400, "bad request", detail, episode=episode.id)
        move = parse_text(action.content) if isinstance(action, TextAction) else parse_object(action.content)
        if move.verb in ("crash", "sleep") and not self.options.knobs:
            move = Move()
        if move.verb == "crash":
            os._exit(137)  # a kill signal has no effect on the first process of a container
        await self._until_there(self.options.slow_step_file, episode)
        if move.verb == "sleep":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(move.value or 0.0):
                    await episode.is_over.wait()
        self._found(episode.id)  # a request may have cancelled it meanwhile
        episode.turn += 1
        if move.verb == "guess" and move.value is not None:
            episode.answer = f"{move.value:g}"
            if move.value == episode.number:
                return self._end(episode, success=True, status="completed")
            seen = f"The number is {'higher' if episode.number > move.value else 'lower'} than {move.value:g}."
        elif move.verb == "stop":
            return self._end(episode, success=False, status="completed")
        else:
            seen = REMINDER if move.verb is None else "You slept."
        if episode.turn >= self.options.max_turns:
            return self._end(episode, success=False, status="task limit reached")
        return {
            "episode_id": episode.id,
            "observation": self._observation(seen, episode.turn),
            "reward": 0.0,
            "done": False,
            "info": {"turn": episode.turn, "parsed_action": move.shown},
        }

    def _end(self, episode: Episode, *, success: bool, status: str) -> Json:
        self._forget(episode)
        info = {"success": success, "num_turns": episode.turn, "answer": episode.answer, "status": status}
        reward = 1.0 if success else 0.0
        return {"episode_id": episode.id, "observation": None, "reward": reward, "done": True, "info": info}

    def _first(self, problem: str) -> Json:
        if self.options.observation == "messages":
            said = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": problem}]
            return {"type": "messages", "content": said}
        return self._observation(f"{INSTRUCTIONS}\n\n{problem}", 0)

    def _observation(self, text: str, turn: int) -> Json:
        if self.options.observation == "json":
            return {"type": "json", "content": {"message": text, "turns_left": self.options.max_turns - turn}}
        return {"type": "text", "content": text}

    def _found(self, id: str) -> Episode:
        if id not in self.episodes:
            detail = f"cancelled, already done, expired after {self.options.idle_s:g} s idle, or never begun"
            raise ApiError(404, "episode not found", detail, episode=id)
        return self.episodes[id]

    def _forget(self, episode: Episode) -> None:
        self.episodes.pop(episode.id, None)
        episode.is_over.set()

    async def _until_there(self, path: str, episode: Episode | None = None) -> None:
        """Wait until the file *path* exists, if a path is set, or until *episode* ends."""
        while True:
            if not path or _exists(path) or (episode and episode.is_over.is_set()):
                return
            await asyncio.sleep(POLL_S)


def _exists(path: str) -> bool:
    return os.path.exists(path)


# -- the server -----------------------------------------------------------------------------------------------------


def application(options: Options) -> Starlette:
    """Return the API as an ASGI application."""
    game = Game(options)

    async def info(request: Request) -> JSONResponse:
        return JSONResponse(game.info())

    async def health(request: Request) -> JSONResponse:
        return JSONResponse(game.health())

    async def start(request: Request) -> JSONResponse:
        return JSONResponse(await game.start(await read(request, StartBody)))

    async def step(request: Request) -> JSONResponse:
        return JSONResponse(await game.step(await read(request, StepBody)))

    async def cancel(request: Request) -> JSONResponse:
        return JSONResponse(game.cancel(await read(request, CancelBody)))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        sweeper = asyncio.create_task(game.sweep())
        yield
        sweeper.cancel()

    gets: dict[str, Callable[[Request], Awaitable[JSONResponse]]] = {"/task/info": info, "/health": health}
    posts = {"/episode/start": start, "/episode/step": step, "/episode/cancel": cancel}
    routes = [Route(options.prefix + path, call, methods=["GET"]) for path, call in gets.items()]
    routes += [Route(options.prefix + path, call, methods=["POST"]) for path, call in posts.items()]
    handlers: dict[Any, Any] = {ApiError: refuse, HTTPException: refuse_route, Exception: fail}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


def refuse(request: Request, error: ApiError) -> JSONResponse:
    """Answer a request that the game refuses."""
    return JSONResponse(error.body, error.status)


def refuse_route(request: Request, error: HTTPException) -> JSONResponse:
    """Answer a request without a matching route."""
    return JSONResponse({"error": error.detail, "detail": f"{request.method} {request.url.path}"}, error.status_code)


def fail(request: Request, error: Exception) -> JSONResponse:
    """Answer a request that met a fault of this server; the answer has no reward."""
    return JSONResponse({"error": "internal error", "detail": repr(error), "status": "internal"}, 500)


def read_options() -> Options:
    """Read the command line, and the variables for missing options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])

    def option(name: str, default: str | float, help: str, **more: Any) -> None:
        given: str | float = os.environ.get("GUESS_" + name.upper().replace("-", "_"), default)
        parser.add_argument(f"--{name}", type=type(default), default=given, help=help, **more)

    option("host", "127.0.0.1", "address to listen on")
    option("port", 5000, "port to listen on; 0: a free one")
    option("prefix", "/api", "what stands before each path")
    option("samples", 100, "how many samples there are")
    option("names", "", "format of their names, such as dev-{:03d}; empty: their numbers")
    option("max-turns", 8, "turns of an episode")
    option("idle-s", 300.0, "seconds after which an episode that nobody plays is forgotten")
    option("capacity", 0, "episodes at once; 0: any number")
    option("observation", "text", "form of observations", choices=("text", "messages", "json"))
    option("action", "text", "form of actions", choices=("text", "structured"))
    option("slow-step-file", "", "each step waits until this file is there")
    option("slow-start-file", "", "each start waits until this file is there")
    knobs = os.environ.get("GUESS_KNOBS", "") not in ("", "0")
    parser.add_argument("--knobs", action="store_true", default=knobs, help="allow 'Act: crash' and 'Act: sleep(5)'")
    return parser.parse_args(namespace=Options())


def main() -> None:
    """Serve until stopped."""
    options = read_options()
    uvicorn.run(application(options), host=options.host, port=options.port, backlog=4096)


if __name__ == "__main__":
    main()
