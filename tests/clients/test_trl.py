"""The environment factory for TRL, treated as ``GRPOTrainer`` and async GRPO of trl 1.16.0 treat it.

Not run: TRL itself, whose installation takes 6 GB. `tools_of` and `schema_of` do what TRL and Transformers do with an
environment: they take the public functions of its class, and read their signatures, type hints and docstrings.
"""

import inspect
import json
import pickle
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from typing import Any

import pytest
from env_gateway_client import InvalidRequest, Tool
from env_gateway_client.trl import EnvironmentFactory, _method, _method_name

from tests.clients.conftest import PROJECT, QUICK
from tests.wire.targets import ONE_GATEWAY, Target, on

pytestmark = pytest.mark.wire


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """Return the tools that TRL finds in an environment."""
    members = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    names = [name for name, _ in members if name not in ("reset", "get_reward") and not name.startswith("_")]
    return {name: getattr(environment, name) for name in names}


def schema_of(tool: Callable[..., Any]) -> dict[str, Any]:
    """Return names, types and descriptions of a tool's arguments, as Transformers reads them for a chat template."""
    hints = typing.get_type_hints(tool)
    about, _, arguments = (tool.__doc__ or "").partition("\nArgs:\n")
    lines = arguments.partition("\nReturns:")[0]
    texts = dict(re.findall(r"^    (\w+): (.+)$", lines, re.M))
    parameters = {name: (hints[name], texts[name]) for name in inspect.signature(tool).parameters}
    return {"name": tool.__name__, "description": about.strip(), "parameters": parameters}


@pytest.fixture
def factory(bundled: Target) -> EnvironmentFactory:
    return EnvironmentFactory(bundled.url, "math", key=bundled.key or "", timeouts=QUICK)


def test_an_episode_as_trl_plays_it(factory: EnvironmentFactory) -> None:
    (row,) = factory.rows("train", 0, 1)
    environment = factory()

    prompt = environment.reset(**row)
    submitted = tools_of(environment)["submit"](answer="40")
    again = tools_of(environment)["submit"](answer="7")
    reward = environment.get_reward()

    assert row["prompt"] == [{"role": "user", "content": ""}]
    assert prompt.startswith("State the final answer")
    assert (submitted, reward, environment.finished) == ("Correct.", 1.0, True)
    assert again.startswith("The episode has finished")


def test_environments_of_one_factory_have_one_type_and_separate_episodes(factory: EnvironmentFactory) -> None:
    first, second = factory(), factory()
    for environment in (first, second):
        environment.reset(split="train", index=0)

    tools_of(first)["submit"](answer="40")
    tools_of(second)["submit"](answer="41")

    assert type(first) is type(second)
    assert type(first).__name__ == "Math"
    assert [first.get_reward(), second.get_reward()] == [1.0, 0.0]


def test_a_reset_ends_the_episode_before_it(factory: EnvironmentFactory) -> None:
    environment = factory()

    environment.reset(split="train", index=0)
    before = environment.episode
    environment.reset(task_id="train-chain_sum-1-01", split=None)

    assert before is not None
    assert before.is_closed
    assert environment.get_reward() == 0.0, "the agent stopped before it earned a reward"


def test_a_row_without_a_task_names_the_columns_that_it_needs(factory: EnvironmentFactory) -> None:
    with pytest.raises(InvalidRequest, match="split and index"):
        factory().reset(prompt=[])


@on(*ONE_GATEWAY)
async def test_a_failed_episode_has_no_reward(target: Target) -> None:
    environment = EnvironmentFactory(target.url, "brief", key=target.key or "", timeouts=QUICK)()
    environment.reset(split="train", index=0)
    tools_of(environment)["score"](reward=1.0)
    environment.episode.failed(RuntimeError("as if its worker had died"))

    assert environment.get_reward() is None


@on(*ONE_GATEWAY)
async def test_images_are_parts_of_the_observation(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("env_gateway_client.Image.pil", lambda self: self.content[:4])  # without Pillow
    environment = EnvironmentFactory(target.url, "probe", key=target.key or "", timeouts=QUICK)()

    prompt = environment.reset(split="train", index=1)
    shown = tools_of(environment)["image"]()
    environment.get_reward()

    assert prompt == [
        {"type": "text", "text": "Naïve café — 你好 🙂?"},
        {"type": "image", "image": b"\x89PNG"},
    ]
    assert shown == [{"type": "image", "image": b"\x89PNG"}]


def test_a_factory_plays_in_another_process_after_pickling(factory: EnvironmentFactory) -> None:
    factory()  # has connections by now
    program = (
        "import pickle, sys\n"
        "environment = pickle.loads(bytes.fromhex(sys.argv[1]))()\n"
        "environment.reset(split='train', index=0)\n"
        "environment.submit(answer='40')\n"
        "print(environment.get_reward())\n"
    )
    played = subprocess.run(
        [sys.executable, "-c", program, pickle.dumps(factory).hex()],
        env={"PYTHONPATH": str(PROJECT / "clients" / "python")},
        capture_output=True,
        text=True,
        timeout=QUICK.call_s,
    )

    assert (played.stdout, played.stderr) == ("1.0\n", "")


def test_the_tools_have_what_a_chat_template_needs(factory: EnvironmentFactory) -> None:
    (schema,) = [schema_of(tool) for tool in tools_of(factory()).values()]

    assert schema["name"] == "submit"
    assert schema["description"].startswith("Submit your answer")
    assert schema["parameters"] == {"answer": (str, "answer")}


def test_a_method_has_types_defaults_and_choices_of_its_schema() -> None:
    tool = Tool(
        "open",
        "Open a page.",
        {
            "required": ["url"],
            "properties": {
                "tabs": {"type": "integer", "description": "Number\n of tabs."},
                "url": {"type": "string", "description": "Address."},
                "mode": {"type": "string", "enum": ["a", "b"]},
                "rest": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            },
        },
    )
    calls: list[Any] = []

    class Environment:
        def _call(self, name: str, arguments: Any) -> None:
            calls.append((name, dict(arguments)))

    Environment.open = _method("open", tool)  # type: ignore[attr-defined]  # as the factory does
    bound = Environment().open  # type: ignore[attr-defined]
    bound(url="x", mode=None)
    bound("y", 2)
    schema = schema_of(bound)

    assert list(schema["parameters"]) == ["url", "tabs", "mode", "rest"]
    assert schema["parameters"]["url"] == (str, "Address.")
    assert schema["parameters"]["tabs"] == (int | None, "Number of tabs.")
    assert schema["parameters"]["mode"] == (str | None, f"mode (choices: {json.dumps(['a', 'b'])})")
    assert calls == [("open", {"url": "x"}), ("open", {"url": "y", "tabs": 2})]


@pytest.mark.parametrize(
    ("tool", "method"),
    [("act", "act"), ("browser.click", "browser_click"), ("reset", "call_reset"), ("_x", "call__x"), ("2d", "call_2d")],
)
def test_a_tool_name_becomes_a_method_that_trl_accepts(tool: str, method: str) -> None:
    assert _method_name(tool) == method


def test_a_finished_episode_frees_its_slot_before_the_reward_is_read(
    factory: EnvironmentFactory, bundled: Target
) -> None:
    environment = factory()
    environment.reset(split="train", index=0)

    tools_of(environment)["submit"](answer="40")

    assert environment.episode.is_closed
