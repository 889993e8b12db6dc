"""Schemas of requests and answers, for `routes`. Bodies of requests are described by the models that validate them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel

from gateway.frontends.admin import curricula, flaky, nodes
from gateway.frontends.openenv.http import HttpReset, HttpStep
from gateway.upstreams.ors_bodies import CreateSession, OfRange, OfSplit, OfTask

Schema = Mapping[str, Any]
TEXT: Final[Schema] = {"type": "string"}
ANY: Final[Schema] = {"type": "object"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
FLAG: Final[Schema] = {"type": "boolean"}
JSON: Final = "application/json"


def obj(*optional: str, **properties: Schema | str) -> Schema:
    """Return the schema of an object. All *properties* are required; those named in *optional* need not be there.

    A text in place of a schema is the name of a schema in `SCHEMAS`.
    """
    found = {name: schema_of(value) for name, value in properties.items()}
    return {"type": "object", "properties": found, "required": [name for name in found if name not in optional]}


def several(of: Schema | str) -> Schema:
    """Return the schema of a list."""
    return {"type": "array", "items": schema_of(of)}


def maybe(of: Schema | str) -> Schema:
    """Return the schema of a value that may be null."""
    return {"anyOf": [schema_of(of), {"type": "null"}]}


def schema_of(value: Schema | str) -> Schema:
    """Return *value*, or a reference to the schema with this name."""
    return {"$ref": f"#/components/schemas/{value}"} if isinstance(value, str) else value


SCHEMAS: Final[Mapping[str, Schema]] = {
    "Error": obj("code", "reason", detail={}, code=TEXT, reason=TEXT),
    "ArealError": obj(
        *("detail", "episode_id", "status", "reason"),
        error=TEXT,
        detail=TEXT,
        episode_id=TEXT,
        status=TEXT,
        reason=TEXT,
    ),
    "SessionId": obj(sid=TEXT),
    "Status": obj("reason", "detail", status=TEXT, reason=TEXT, detail=TEXT),
    "Split": obj(name=TEXT, type={"enum": ["train", "validation", "test"]}),
    "Tool": obj("description", "input_schema", name=TEXT, description=maybe(TEXT), input_schema=maybe(ANY)),
    "Block": obj(
        *("text", "data", "mimeType", "detail"),
        type={"enum": ["text", "image"]},
        text=TEXT,
        data=TEXT,
        mimeType=TEXT,
        detail={},
    ),
    "Result": obj(
        *("output", "error", "reason"),
        ok=FLAG,
        output=obj(
            *("metadata", "reward", "data"),
            blocks=several("Block"),
            metadata={},
            reward=maybe({"type": "number"}),
            finished=FLAG,
            data={},
        ),
        error=TEXT,
        reason=maybe(TEXT),
    ),
    "Call": {
        **obj(
            *("name", "input", "text", "action", "task_id"), name=TEXT, input=ANY, text=TEXT, action=ANY, task_id=TEXT
        ),
        "description": "A tool with its input; or a text or an action, for the environment's default tool.",
    },
    "Tasks": obj(tasks=several(ANY), env_name=TEXT),
    "Start": obj("config", sample_id={"type": ["string", "integer"]}, config=ANY),
    "Action": obj(type={"enum": ["text", "structured"]}, content={"type": ["string", "object"]}),
    "Step": obj(episode_id=TEXT, action="Action"),
    "EpisodeId": obj(episode_id=TEXT),
    "Started": obj(episode_id=TEXT, observation={}, info=ANY, reward={"type": "number"}, done=FLAG),
    "Stepped": obj(observation={}, reward={"type": "number"}, done=FLAG, info=ANY),
    "Observation": obj("metadata", observation=ANY, reward=maybe({"type": "number"}), done=FLAG, metadata=maybe(ANY)),
    "Rpc": {
        **obj("params", "id", jsonrpc={"const": "2.0"}, method=TEXT, params=ANY, id={}),
        "description": "JSON-RPC: tools/list, tools/call, openenv/session/create, openenv/session/close.",
    },
    "RpcReply": obj("result", "error", "id", jsonrpc={"const": "2.0"}, result={}, error=ANY, id={}),
    "Event": obj("event", event={"enum": ["task_id", "chunk", "end", "error"]}, data=TEXT),
    "EpisodeRow": obj(
        "reward", "steps", id=TEXT, environment=TEXT, reward=maybe({"type": "number"}), steps=maybe(COUNT)
    ),
    "Episode": obj("messages", id=TEXT, environment=TEXT, steps=several(ANY), messages=several(ANY)),
    "TaskRow": obj(environment=TEXT, id=maybe(TEXT), split=TEXT, index=maybe(COUNT)),
    "Flaky": obj(
        environment=TEXT,
        task=TEXT,
        replays=COUNT,
        differing=COUNT,
        rate={"type": "number"},
        episodes=several(ANY),
        marked_at=maybe({"type": "number"}),
    ),
    "Replay": obj(
        episode=TEXT,
        replay=TEXT,
        is_same=FLAG,
        differs_in={"type": "array", "items": {"enum": ["reward", "end", "text"]}},
        steps=COUNT,
        differences=several(ANY),
    ),
    "Rollouts": obj(events={"type": "array", "items": ANY, "maxItems": 10_000}),
    "TaskInfo": obj(name=TEXT, num_samples=COUNT, max_episode_length=COUNT, observation_type=TEXT, action_type=TEXT),
    "Cancelled": obj(status={"const": "cancelled"}, episode_id=TEXT),
    "ArealHealth": obj(status=TEXT, active_episodes=COUNT, queued=COUNT, boxes=COUNT),
}
"""Schemas of bodies that no model validates, by name."""
MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "CreateSession": CreateSession,
    "OfSplit": OfSplit,
    "OfTask": OfTask,
    "OfRange": OfRange,
    "HttpReset": HttpReset,
    "HttpStep": HttpStep,
    "Sample": curricula.Sample,
    "Feedback": curricula.Feedback,
    "Audited": flaky.Audited,
    "Draining": nodes.Wanted,
}
"""Models that validate bodies, by the name of their schema."""
