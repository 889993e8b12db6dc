"""The environment ``faulty`` on an AReaL task server that leaves exceptions to its framework, as most do."""

import json
import sys
import uuid
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

EPISODES: dict[str, str] = {}
"""The part that fails in each episode."""
REWARDS = {"reward": float("nan"), "infinite reward": float("inf"), "late reward": 1.0}
"""The reward of the step, which ends the episode. Any other step raises ``KeyError``."""


async def info(request: Request) -> JSONResponse:
    texts = {"observation_type": "text", "action_type": "text", "description": "Answer."}
    return JSONResponse({"name": "faulty", "num_samples": 5, "max_episode_length": 2, **texts})


async def start(request: Request) -> JSONResponse:
    body = await request.json()
    episode = str(uuid.uuid4())
    fails = EPISODES[episode] = body["config"]["fails"]
    if fails == "reset":
        raise KeyError("toop")
    seen = {"type": "text", "content": "Answer."}
    return JSONResponse({"episode_id": episode, "observation": seen, "info": {}, "reward": 0.0, "done": False})


async def step(request: Request) -> Response:
    episode = (await request.json())["episode_id"]
    reward = REWARDS[EPISODES[episode]]
    last: dict[str, Any] = {"episode_id": episode, "observation": None, "done": True, "info": {}}
    return Response(json.dumps({**last, "reward": reward}), media_type="application/json")  # NaN and Infinity, too


async def cancel(request: Request) -> JSONResponse:
    known = EPISODES.pop((await request.json())["episode_id"], None)
    return JSONResponse({"status": "cancelled"}, status_code=200 if known else 404)


app = Starlette(
    routes=[
        Route("/api/task/info", info),
        Route("/api/episode/start", start, methods=["POST"]),
        Route("/api/episode/step", step, methods=["POST"]),
        Route("/api/episode/cancel", cancel, methods=["POST"]),
    ]
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error")
