"""Features of only one ORS package (conversations, final messages, judged groups) and the gateway's additions."""

import json
from typing import Any

import httpx
import pytest
from openreward import AsyncOpenReward, GroupCandidate, Message, ScoreGroupFailed, ScoreGroupUnsupported
from openreward.api.environments.types import TextBlock

from tests.wire.raw import RawEpisode, create, episode, new_sid, parse
from tests.wire.sdks import OPENREWARD, names, text
from tests.wire.targets import BOTH_GATEWAYS, ONE_GATEWAY, OURS, Target, on

pytestmark = pytest.mark.wire


@on("openreward-server", *ONE_GATEWAY)
async def test_a_conversation_arrives_with_all_kinds_of_blocks(target: Target) -> None:
    task = OPENREWARD.task("judge", {"question": "Why?"})

    async with (
        OPENREWARD.connect(target.url, target.key) as client,
        client.environment("judge").session(task) as session,
    ):
        messages: list[Any] = await session.get_messages()  # type: ignore[attr-defined]  # only this client has it
        prompt = await session.get_prompt()

    assert [message.role for message in messages] == ["system", "user", "assistant", "user"]
    assert messages[1].blocks[0].text == "Why?"
    reasoning, call = messages[2].blocks
    assert (reasoning.type, reasoning.text, reasoning.signature) == ("reasoning", "hm", "sig")
    assert (call.type, call.id, call.name, call.input) == ("tool_call", "c1", "look", {"at": "it"})
    assert messages[3].blocks[0].blocks[0].text == "seen"
    assert [block.text for block in prompt][:4] == ["[system]", "Be brief.", "[user]", "Why?"]


@on("openreward-server", *ONE_GATEWAY)
async def test_the_prompt_of_a_conversation_is_flattened_as_by_the_official_server(http: httpx.AsyncClient) -> None:
    async with episode(http, {"question": "Why?"}, environment="judge") as opened:
        prompt = (await opened.get("prompt")).json()

    assert [block["text"] for block in prompt] == [
        *("[system]", "Be brief.", "[user]", "Why?", "[assistant]", "<think>hm</think>"),
        *('[tool_call look] {"at": "it"}', "[user]", "[tool_result]", "seen"),
    ]
    assert prompt[0]["detail"] == {"role": "system"}


@on("openreward-server", *BOTH_GATEWAYS)
async def test_a_terminal_tool_is_not_listed_and_receives_the_final_message(target: Target) -> None:
    task = OPENREWARD.task("judge", {})

    async with (
        OPENREWARD.connect(target.url, target.key) as client,
        client.environment("judge").session(task) as session,
    ):
        listed = names(await session.list_tools())
        terminal: Any = await session.terminal_tool()  # type: ignore[attr-defined]  # only this client has it
        last: Any = await session.call_terminal_tool("abc")  # type: ignore[attr-defined]  # only this client has it

    assert listed == ["given"]
    assert (terminal.name, terminal.arg, terminal.description) == ("answer", "text", "Take the final message.")
    assert (text(last), last.reward, last.finished) == ("3 characters", 0.25, True)


@on("openreward-server", *ONE_GATEWAY)
async def test_the_scores_of_a_group_come_in_the_order_of_its_candidates(target: Target) -> None:
    said = [Message(role="assistant", blocks=[TextBlock(text=word)]) for word in "abc"]
    candidates = [GroupCandidate(messages=said[:1], metadata={"n": 1}), said, said[:2]]

    async with OPENREWARD.connect(target.url, target.key) as client:
        judge: Any = client.environment("judge")
        async with judge.session(OPENREWARD.task("judge", {})) as session:
            scores = await session.score_group(candidates)
        async with judge.session(OPENREWARD.task("judge", {"strict": True})) as strict:
            with pytest.raises(ScoreGroupFailed, match="the judge is unwell"):
                await strict.score_group(candidates)
            still_open = await strict.call_tool("given")
        async with client.environment("probe").session(OPENREWARD.task("probe", {})) as other:
            with pytest.raises(ScoreGroupUnsupported):
                await other.score_group(candidates)  # type: ignore[attr-defined]  # only this client has it

    assert [(score.reward, score.metadata) for score in scores] == [(1.0, {"n": 1}), (3.0, None), (2.0, None)]
    assert still_open.blocks


@on("openreward-server", *OURS)
async def test_the_list_of_tools_states_the_abilities_of_the_environment(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/judge/tools")).json()

    assert listed["terminal_tool"] == {"name": "answer", "arg": "text", "description": "Take the final message."}
    assert listed["supports_score_group"] is True
    assert listed["message_block_types"] == ["text", "image", "reasoning", "tool_call", "tool_result"]


@on("openreward-server", *OURS)
async def test_a_client_lists_openrewards_extras_of_the_environment(target: Target) -> None:
    client = AsyncOpenReward(api_key=target.key)
    try:
        judge = client.environments.get("judge", variant="judge", base_url=target.url)
        extras = (await judge.supports_score_group(), await judge.is_assistant_message_final())
    finally:
        await client.environments.aclose()

    assert extras == (True, True)


@on(*OURS)
async def test_a_seed_and_a_configuration_reach_the_environment(http: httpx.AsyncClient) -> None:
    opened = RawEpisode(http, new_sid(), "judge")

    created = await create(http, opened.sid, env_name="judge", task_spec={}, seed=7, config={"level": [1, "é"]})
    given = json.loads((await opened.call("given")).text)
    other_seed = await create(http, opened.sid, env_name="judge", task_spec={}, seed=8, config={"level": [1, "é"]})
    await opened.delete()

    assert created.status_code == 200
    assert given == {"seed": 7, "config": {"level": [1, "é"]}}
    assert other_seed.status_code == 400


@on(*ONE_GATEWAY)
@pytest.mark.parametrize(
    "spelling", [{"text": "abc"}, {"action": {"text": "abc"}}, {"name": "answer", "input": {"text": "abc"}}]
)
async def test_an_action_has_three_spellings(http: httpx.AsyncClient, spelling: dict[str, Any]) -> None:
    async with episode(http, environment="judge") as opened:
        response = await http.post("/judge/call", headers=opened.headers, json=spelling)

    output = parse(response.text).result["output"]
    assert output["blocks"][0]["text"] == "3 characters"
    assert (output["reward"], output["finished"]) == (0.25, True)
