"""Servers by others, with a script of actions for each and the clients that play it: their own, and the gateway's four.

Most are code of published packages: servers in NeMo Gym's package, and what ``openenv init``, ``openenv import`` and
``orwd init`` write. The servers of ``tests/foreign`` have further habits of public environments.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.deadlines import COMMAND_S
from tests.wire.any.cases import Act
from tests.wire.any.players import Door, Episode, Seen, Trainer, at_gateway
from tests.wire.nemo_client import Call, GymEpisode
from tests.wire.openenv.clients import NEWEST, python_of

PROJECT = Path(__file__).resolve().parents[3]
NEMO = PROJECT / ".venv-nemo"
SECRET: Final = "an-operators-t0ken"


@dataclass(frozen=True)
class Launch:
    """The command of a server, which prints its URL when it is ready, and its folder and variables."""

    command: Sequence[str]
    cwd: Path | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """A server and a game on it."""

    name: str
    launch: Callable[[Path, int], Launch] | None = None
    """Returns the launch for an empty folder and a port. None: `rows` names a server of NeMo Gym's package."""
    own: str
    """The client of its own protocol: a key of `TRAINERS`, or ``gym``."""
    acts: Sequence[Act]
    rewards: Sequence[float]
    """What each action earns, so that a server whose rewards are all 0 shows nothing."""
    environment: str = ""
    """The server's own name of the environment."""
    sample: Any = 0
    """The server's own name of its first sample, for AReaL."""
    rows: str = ""
    """The server in NeMo Gym's package whose data set has the tasks."""
    secrets: Mapping[str, str] = field(default_factory=dict)
    """Secrets that a trainer of the server itself sends."""
    more: str = ""
    """What the operator adds to the environment.toml."""

    def direct(self, url: str) -> Door:
        """Return the door of the server itself."""
        row = json.loads(self.data.read_text().partition("\n")[0]) if self.rows else None
        return Door(url, self.environment, url, url, url, row, self.secrets, self.sample)

    def through(self, url: str) -> Door:
        """Return its door at the gateway at *url*."""
        return at_gateway(url, self.name)

    @property
    def data(self) -> Path:
        """The file with the rows of the data set."""
        (packages,) = NEMO.glob("lib/python*/site-packages")
        return packages / "resources_servers" / self.rows / "data" / "example.jsonl"


@dataclass(frozen=True)
class Transcript:
    """What a client saw: all values with the prompt and after each action, and the rewards."""

    seen: Sequence[Any]
    rewards: Sequence[float]
    done: bool


async def transcript(trainer: Trainer, door: Door, acts: Sequence[Act]) -> Transcript:
    """Play *acts*, and record what the client saw."""
    async with trainer.open(door, False) as episode:
        seen, rewards, done = [episode.whole], [], False
        for act in acts:
            last = await episode.act(act)
            seen.append(last.whole)
            rewards.append(last.reward or 0.0)
            done = last.done
        if not done and episode.finish is not None:
            rewards.append(await episode.finish())
    return Transcript(seen, rewards, done)


def gym_trainer() -> Trainer:
    """Return NeMo Gym's agent for servers with steps."""

    async def check(door: Door, case: Any) -> None:
        """Check nothing."""

    @asynccontextmanager
    async def open(door: Door, by_task: bool) -> AsyncIterator[Episode]:
        assert door.row is not None
        episode = GymEpisode(door.nemo, door.row)
        prompt = await episode.seed()

        async def act(action: Act) -> Seen:
            result = await episode.step(action.text or Call(action.tool, action.arguments))
            done = result["terminated"] or result["truncated"]
            shown = [result["observation"], [one["output"] for one in result["info"].get("tool_outputs", ())]]
            return Seen("", result["reward"], done, shown)

        yield Episode(prompt, act, prompt)

    return Trainer("gym", check, open)


def missing(wanted: Any, shown: Any) -> list[str]:
    """Return the values of *wanted* that are not in *shown*, as text. Numbers may be part of a text."""
    text = "\n".join(_leaves(shown))
    return [leaf for leaf in _leaves(wanted) if leaf not in text]


_FORM: Final = frozenset(("type", "mimeType", "mime_type", "role", "tool_name", "input"))
"""Fields that say how a value is to be read, or repeat the action."""


def _leaves(value: Any) -> Iterator[str]:
    """Yield the scalar values in *value* as text, also those of JSON in a text."""
    match value:
        case None | "" | bool():
            return
        case str() if value.startswith(("data:image/png;base64,", "iVBOR")):
            yield "[image: image/png]"  # as NeMo Gym's agents see it
        case str():
            parsed = None
            if value.lstrip()[:1] in ("{", "["):
                try:
                    parsed = json.loads(value)
                except ValueError:
                    parsed = None
            if isinstance(parsed, dict | list):
                yield from _leaves(parsed)
            else:
                yield value.strip()
        case int() | float():
            yield f"{value:g}"
        case {"type": "input_image", "image_url": str(url)}:
            yield from _leaves(url)
        case dict():
            for name, one in value.items():
                if name not in _FORM:
                    yield from _leaves(one)
        case [[[*_], *_], *_]:
            yield "[image: image/png]"  # rows of pixels become an image
        case list() | tuple():
            for one in value:
                yield from _leaves(one)


# -- servers of packages --------------------------------------------------------------------------------------------


def nemo_launch(ports: Mapping[str, int]) -> Launch:
    """Return the launch of servers of NeMo Gym's package, by name, in one process."""
    server = str(PROJECT / "tests/foreign/nemo/server.py")
    return Launch([str(NEMO / "bin/python"), server, *(f"{name}:{port}" for name, port in ports.items())])


def _own(server: str, *arguments: str, python: str = sys.executable) -> Callable[[Path, int], Launch]:
    path = str(PROJECT / "tests/foreign" / server / "server.py")
    return lambda folder, port: Launch([python, path, *(one.format(port=port) for one in arguments)])


def _initialized(folder: Path, port: int) -> Launch:
    """Make an environment with ``openenv init``."""
    _run(_openenv(), "init", "echo_box", "--output-dir", str(folder))
    return _uvicorn(folder, "echo_box", port)


def _imported(folder: Path, port: int) -> Launch:
    """Make an environment with ``orwd init``, and import it with ``openenv import``."""
    _run(_orwd(), "init", "sums", "--dir", str(folder / "sums"))
    made = folder / "made"
    _run(_openenv(), "import", str(folder / "sums"), "--name", "sums_env", "--output-dir", str(made), "--type", "ors")
    # openreward is in another venv. Its packages come after those of openenv.
    return _uvicorn(made, "sums_env", port, sysconfig.get_path("purelib"))


def _scaffolded(folder: Path, port: int) -> Launch:
    """Make an environment with ``orwd init``."""
    _run(_orwd(), "init", "sums", "--dir", str(folder / "sums"))
    program = f"import server as made; made.Server([made.BasicEnvironment]).run(host='127.0.0.1', port={port})"
    return Launch([sys.executable, "-c", program], folder / "sums", {"PYTHONPATH": str(folder / "sums")})


def _uvicorn(folder: Path, package: str, port: int, *paths: str) -> Launch:
    program = f"import sys, uvicorn; sys.path += {[*paths]!r}; uvicorn.run('{package}.server.app:app', port={port})"
    return Launch([python_of(NEWEST), "-W", "ignore", "-c", program], folder, {"PYTHONPATH": str(folder)})


def _openenv() -> str:
    return str(Path(python_of(NEWEST)).parent / "openenv")


def _orwd() -> str:
    return str(Path(sys.executable).parent / "orwd")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMMAND_S)


# -- games ----------------------------------------------------------------------------------------------------------


def _call(tool: str, said: str = "", /, **arguments: Any) -> Act:
    return Act(tool=tool, arguments=arguments, text=said)


def _plain(said: str, /, **arguments: Any) -> Act:
    return Act(tool="step", arguments=arguments, text=said, is_plain=True)


def _answer(text: str) -> Act:
    return Act(tool="reply", arguments={"text": text}, text=text, is_answer=True)


def _say(text: str) -> Act:
    return Act(tool="reply", arguments={"text": text}, text=text)


STRANGERS: Final = {
    stranger.name: stranger
    for stranger in (
        Stranger(
            name="nemo-counter",
            own="nemo",
            rows="example_session_state_mgmt",
            acts=(
                _call("increment_counter", count=1),
                _call("increment_counter", count="many"),  # refused, with the reason
                _call("increment_counter", count=2),
                _call("get_counter_value"),
                _answer("The count is 6."),
            ),
            rewards=(0, 0, 0, 0, 1),
        ),
        Stranger(
            name="nemo-office",  # 27 tools behind one route
            own="nemo",
            rows="workplace_assistant",
            acts=(
                _call("company_directory_find_email_address", name="Carlos"),
                _call("email_search_emails", query="Task Update"),
                _call("email_send_email"),  # fails
                _call(
                    "email_reply_email",
                    email_id="00000057",
                    body="Thanks for the update - I will get back to you tomorrow.",
                ),
                _answer("I have replied."),
            ),
            rewards=(0, 0, 0, 0, 1),
        ),
        Stranger(
            name="nemo-steps",  # its verifier reads the arguments of a call
            own="nemo",
            rows="example_multi_step",
            acts=(
                _call("get_synonym_value", synonym="Blazing"),
                _call("get_synonym_value", synonym="Warm"),
                _call("extract_synonym_values", synonym_values=[711, 407]),
                _answer("Done."),
            ),
            rewards=(0, 0, 0, 1),
        ),
        Stranger(
            name="nemo-match",  # no tools
            own="nemo",
            rows="string_match",
            acts=(_answer("It is \\boxed{Paris}."),),
            rewards=(1,),
        ),
        Stranger(
            name="nemo-talk",  # several texts, and a reward for each
            own="gym",
            rows="example_multi_turn_gymnasium",
            acts=(_say("Paris."), _say("Two million."), _say("The Eiffel Tower.")),
            rewards=(0, 0, 1),
        ),
        Stranger(
            name="nemo-click",  # a picture in its prompt
            own="nemo",
            rows="circle_click",
            acts=(_call("click", x=664, y=841), _answer("")),
            rewards=(0, 1),
        ),
        Stranger(
            name="openenv-init",  # several fields, and metadata
            launch=_initialized,
            own="openenv-0.10.0",
            acts=(_plain("Hello", message="Hello"), _plain("Good bye", message="Good bye")),
            rewards=(0.5, 0.8),
        ),
        Stranger(
            name="openenv-import",
            launch=_imported,
            own="openenv-0.10.0",
            acts=(_call("answer", "4", answer="4"),),
            rewards=(1,),
        ),
        Stranger(
            name="orwd-init",
            launch=_scaffolded,
            own="openreward",
            environment="basicenvironment",
            acts=(_call("answer", "4", answer="4"),),
            rewards=(1,),
        ),
        Stranger(
            name="gallery",  # the question in the metadata, a picture as an array, an exception for a bad move
            # Not before the launch: it makes the venv.
            launch=lambda folder, port: _own("gallery", "--port", "{port}", python=python_of(NEWEST))(folder, port),
            own="openenv-0.10.0",
            acts=(_plain("green", color="green"), _plain("pink", color="pink"), _plain("red", color="red")),
            rewards=(-0.25, 0, 0.75),
        ),
        Stranger(
            name="vault",  # five tools, one with a name of OpenEnv's own, and a secret that only the operator has
            launch=_own("openreward", "{port}"),
            own="openreward",
            environment="riddles",
            acts=(_call("has_secret", name="TOKEN"), _call("step", seconds=0), _call("answer", text="river")),
            rewards=(0, 0, 1),
            secrets={"TOKEN": SECRET},
            more='\n[secrets]\nTOKEN = "env:STRANGERS_TOKEN"\n',
        ),
        Stranger(
            name="areal-named",  # named samples
            launch=_own("areal", "--port", "{port}", "--names", "dev-{{:03d}}"),
            own="areal",
            sample="dev-000",
            acts=(_call("act", "Act: guess(50)", content="Act: guess(50)"),),
            rewards=(0,),
        ),
    )
}
