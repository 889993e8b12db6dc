"""The environments for Gymnasium, on a real gateway.

Not run against Gymnasium itself where it is not installed: then `MODULES` stands in for gymnasium 1.4.0, with the names
and signatures that the adapter uses. NumPy is needed too; without it, the stand-in has lists.
"""

import enum
import math as maths
from collections.abc import Iterator
from typing import Any

import pytest
from env_gateway_client import EpisodeFailed, Gateway, InvalidRequest

from tests.clients.conftest import QUICK
from tests.clients.fakes import installed
from tests.wire.targets import ONE_GATEWAY, Target, on

pytestmark = pytest.mark.wire


class Env:
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.seeded = seed


class VectorEnv:
    def close(self, **kwargs: Any) -> None:
        self.close_extras(**kwargs)

    def close_extras(self, **kwargs: Any) -> None: ...


class Text:
    def __init__(self, max_length: int, *, min_length: int = 1, charset: object = None, seed: Any = None) -> None:
        self.max_length = max_length


class Tuple:
    def __init__(self, spaces: list[Any]) -> None:
        self.spaces = spaces


class AutoresetMode(enum.Enum):
    DISABLED = "Disabled"


def array(values: Any, dtype: Any = None) -> list[Any]:
    return list(values)


def empty(count: int, dtype: Any = None) -> list[Any]:
    return [None] * count


MODULES: dict[str, dict[str, Any]] = {
    "gymnasium": {"Env": Env},
    "gymnasium.spaces": {"Text": Text, "Tuple": Tuple},
    "gymnasium.vector": {"VectorEnv": VectorEnv, "AutoresetMode": AutoresetMode},
}
NUMPY = {"numpy": {"array": array, "empty": empty, "bool_": bool, "float64": float}}


@pytest.fixture
def adapter() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        try:
            import numpy  # noqa: F401
        except ImportError:
            yield installed(patch, "gymnasium", MODULES | NUMPY)[0]
        else:
            yield installed(patch, "gymnasium", MODULES)[0]


def test_an_episode_of_a_text_environment(adapter: Any, math: Gateway) -> None:
    env = adapter.GatewayEnv(math, "math")

    observation, info = env.reset(options={"split": "train", "index": 0})
    step = env.step("40")
    env.close()

    assert observation.startswith("State the final answer")
    assert info["tools"][0]["function"]["name"] == "submit"
    assert step[:4] == ("Correct.", 1.0, True, False)
    assert step[4]["rewarded"] is True
    assert env.observation_space.contains(observation)


def test_a_seed_chooses_the_same_task_again(adapter: Any, math: Gateway) -> None:
    env = adapter.GatewayEnv(math, "math")

    texts = [env.reset(seed=seed)[0] for seed in (7, 7, 8)]
    env.close()

    assert texts[0] == texts[1] != texts[2]


def test_an_action_may_name_its_tool(adapter: Any, math: Gateway) -> None:
    env = adapter.GatewayEnv(math, "math")
    env.reset(options={"split": "train", "index": 0})

    failed = env.step({"tool": "nope"})
    step = env.step({"tool": "submit", "arguments": {"answer": "40"}})
    env.close()

    assert failed[1:4] == (0.0, False, False)
    assert (failed[4]["rewarded"], failed[4]["reason"]) == (False, "not_found")
    assert step[1] == 1.0


@on(*ONE_GATEWAY)
async def test_a_text_does_not_choose_among_several_tools(target: Target, adapter: Any) -> None:
    with Gateway(target.url, target.key or "", timeouts=QUICK) as gateway:
        env = adapter.GatewayEnv(gateway, "probe")
        env.reset(options={"split": "train", "index": 0})
        with pytest.raises(InvalidRequest, match="echo"):
            env.step("text")
        env.close()


def test_a_failed_episode_raises_and_is_never_a_reward(adapter: Any, math: Gateway) -> None:
    env = adapter.GatewayEnv(math, "math")
    env.reset(options={"split": "train", "index": 0})
    env.episode.failed(RuntimeError("as if its worker had died"))

    with pytest.raises(EpisodeFailed):
        env.step("40")
    env.close()


def test_many_episodes_side_by_side(adapter: Any, math: Gateway) -> None:
    envs = adapter.GatewayVectorEnv(math, "math", 3)

    texts, info = envs.reset(options={"split": "train", "index": 0})
    envs.envs[2].episode.failed(RuntimeError("as if its worker had died"))
    envs.envs[2].episode.error, lost = None, envs.envs[2].episode.error
    envs.envs[2].step = lambda action: (_ for _ in ()).throw(lost)
    _, rewards, ends, cuts, infos = envs.step(["40", "41", "40"])
    envs.close()

    assert len(set(texts)) == 1
    assert len(info["tools"]) == 3
    assert list(rewards[:2]) == [1.0, 0.0]
    assert maths.isnan(rewards[2])
    assert list(ends) == [True, True, False]
    assert list(cuts) == [False, False, True]
    assert "cancelled" in infos["error"][2]
    assert list(infos["_error"]) == [False, False, True]


def test_only_the_masked_episodes_are_reset(adapter: Any, math: Gateway) -> None:
    envs = adapter.GatewayVectorEnv(math, "math", 2)
    envs.reset(options={"split": "train", "index": 0})
    kept = envs.envs[1].episode
    envs.step(["40", "41"])

    envs.reset(options={"split": "train", "index": 1, "reset_mask": [True, False]})
    _, rewards, ends, _, _ = envs.step(["wrong", "ignored"])
    envs.close()

    assert envs.envs[1].episode is kept
    assert list(rewards) == [0.0, 0.0]
    assert list(ends) == [True, True]
