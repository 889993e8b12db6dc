"""Messages that the unmodified ``openreward`` client logs appear on the timeline of the episode that they played."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest
from openreward import AsyncOpenReward
from openreward.api.rollouts.serializers.base import AssistantMessage, ToolCall, ToolResult, UserMessage

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS, Gateway, short_folder
from tests.wire.sdks import OPENREWARD

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ExitStack() as stack:
        gateway = Gateway(short_folder(), {"GATEWAY_ENVIRONMENTS": "probe"})
        stack.callback(gateway.stop)
        gateway.start()
        yield gateway


@asynccontextmanager
async def trainer(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, name: str) -> AsyncIterator[AsyncOpenReward]:
    for variable in ("OPENREWARD_API_URL", "OPENREWARD_SESSION_URL"):
        monkeypatch.setenv(variable, gateway.url)
    client = AsyncOpenReward(api_key=TRAINER_KEYS[name])
    try:
        yield client
    finally:
        await asyncio.to_thread(client.rollout.close)
        await client.environments.aclose()


async def played(client: AsyncOpenReward, texts: list[str], *, logs: bool = True) -> tuple[str, str]:
    """Play an episode that echoes *texts*, and log it as a rollout; return the names of its session and rollout."""
    environment = client.environments.get("probe")
    task = {"question": "Say it."}
    rollout: Any = await asyncio.to_thread(
        client.rollout.create, "a run", "-".join(texts), "probe", None, "train", {"step": 3}, task
    )
    rollout.log(UserMessage("Say it."))
    async with environment.session(task=OPENREWARD.task("probe", task)) as session:
        for number, text in enumerate(texts):
            rollout.log(AssistantMessage(f"I say {text}."))
            rollout.log(ToolCall("echo", json.dumps({"text": text}), f"call-{number}"))
            output = await session.call_tool("echo", {"text": text})
            rollout.log(ToolResult(output.blocks[0].text, f"call-{number}"), reward=output.reward)
        return session.sid, rollout.event_id


async def shown(gateway: Gateway, session: str) -> dict[str, Any]:
    return await gateway.ask(f"episodes/{session}")


async def test_each_episode_of_a_group_has_the_messages_that_played_it(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trainer(gateway, monkeypatch, "alice") as client:
        scripts = [["a", "b"], ["a", "c"], ["d"]]
        names = await asyncio.gather(*(played(client, texts) for texts in scripts))

    for (session, rollout), texts in zip(names, scripts, strict=True):

        async def has_its_messages(session: str = session, rollout: str = rollout, texts: list[str] = texts) -> None:
            episode = await shown(gateway, session)
            assert episode["rollout"]["id"] == rollout
            assert episode["rollout"]["run"] == "a run"
            assert episode["rollout"]["info"]["metadata"] == {"step": 3}
            kinds = [message["type"] for message in episode["messages"]]
            assert kinds == ["user_message", *["assistant_message", "tool_call", "tool_result"] * len(texts)]
            assert [m["content"] for m in episode["messages"] if m["type"] == "tool_result"] == texts

        await eventually(has_its_messages)


async def test_another_key_s_rollout_is_not_shown(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    async with trainer(gateway, monkeypatch, "alice") as client:
        session, _ = await played(client, ["only alice"])
    forged = [
        {"eventType": "rollout", "eventId": "forged", "runName": "bob's", "environment": "probe"},
        {
            "eventType": "message",
            "eventId": "m",
            "rolloutEventId": "forged",
            "type": "tool_call",
            "index": 0,
            "name": "echo",
            "content": '{"text": "only alice"}',
        },
    ]
    async with http(gateway, TRAINER_KEYS["bob"]) as bob:
        assert (await bob.post("/v1/rollouts", json={"events": forged})).status_code == 200
    episode = await shown(gateway, session)

    assert episode["rollout"]["run"] == "a run"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "the body is not JSON"),
        (b"[]", "the body must be a JSON object"),
        (b"{}", "events: must be a list"),
        (b'{"events": [{"eventType": "party", "eventId": "1"}]}', "events[0].eventType: must be one of rollout"),
        (b'{"events": [{"eventType": "rollout"}]}', "events[0].eventId"),
        (b'{"events": [{"eventType": "message", "eventId": "1"}]}', "events[0].rolloutEventId"),
    ],
)
async def test_wrong_events_are_refused_with_their_place(gateway: Gateway, body: bytes, told: str) -> None:
    async with http(gateway, TRAINER_KEYS["alice"]) as client:
        answer = await client.post("/v1/rollouts", content=body, headers={"content-type": "application/json"})

    assert answer.status_code == 400
    assert told in answer.json()["detail"]


async def test_rollouts_need_a_trainer_s_key(gateway: Gateway) -> None:
    async with http(gateway, "unknown-key-1") as client:
        answer = await client.post("/v1/rollouts", json={"events": []})
    async with http(gateway, OPERATOR_KEY) as client:
        as_operator = await client.post("/v1/rollouts", json={"events": []})

    assert answer.status_code == 401
    assert as_operator.status_code in (401, 403)


def http(gateway: Gateway, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=gateway.url, headers={"X-API-Key": key}, trust_env=False, verify=False, timeout=HANG_S
    )
