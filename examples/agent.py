"""Play episodes of an environment with a model behind an OpenAI-compatible endpoint, and print the rewards.

    python examples/agent.py --environment math --split train --endpoint http://127.0.0.1:8000/v1 --model NAME

The endpoint is vLLM, SGLang, llama.cpp or a hosted API. `play` is an episode: the prompt goes to the model, the model's
tool calls go to the environment, and their results go back to the model, until one of the two ends the episode.
The script needs the package in `clients/python`. With the package rich it also shows a progress bar. The command
`gateway run` does the same, and has more options.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from env_gateway_client import AsyncEpisode, text_of
from env_gateway_client.endpoint import Endpoint, EndpointOptions, call_tool
from env_gateway_client.runs import Played, Run, RunOptions, finish, summed, table


async def play(episode: AsyncEpisode, endpoint: Endpoint, played: Played) -> str:
    """Play *episode*, and return what ended it. `Endpoint.play` also sends images, and texts to a tool."""
    messages = played.messages
    messages.append({"role": "user", "content": text_of(episode.prompt)})
    for _ in range(endpoint.options.max_turns):
        message, ended = await endpoint.reply(played, episode.openai_tools)
        messages.append(message)
        if "tool_calls" not in message:
            return ended
        for call in message["tool_calls"]:
            result = await call_tool(episode, call["function"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result.text})
            if result.finished:
                return "finished"
    return "max_turns"


def plot(results: Sequence[Played], path: Path, title: str) -> None:
    """Draw the rewards in the order of the tasks, and their mean so far."""
    importlib.import_module("matplotlib").use("svg")
    pyplot = importlib.import_module("matplotlib.pyplot")
    ordered = sorted(results, key=lambda played: (played.index, played.member))
    rewards = [played.reward for played in ordered if played.reward is not None]
    means = [total / number for number, total in enumerate(accumulate(rewards), 1)]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
    axes.plot(range(1, len(rewards) + 1), rewards, ".", label="reward")
    axes.plot(range(1, len(rewards) + 1), means, label="mean so far")
    axes.set(title=title, xlabel="episode", ylabel="reward")
    axes.legend()
    figure.savefig(path, format="svg")


def main() -> int:
    """Play and report. Return the exit status: 1 if no episode has a reward, or if an error ended the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8080", help="of the gateway; default: %(default)s")
    add("--key", default=os.environ.get("GATEWAY_KEY", ""), help="a trainer's key; default: $GATEWAY_KEY")
    add("--environment", required=True)
    add("--split", required=True)
    add("--start", type=int, default=0, help="index of the first task; default: %(default)s")
    add("--stop", type=int, help="index after the last task; default: 20 tasks")
    add("--group-size", type=int, default=1, help="episodes on each task; default: %(default)s")
    add("--at-once", type=int, default=8, help="episodes at the same time; default: %(default)s")
    add("--endpoint", required=True, help="such as http://127.0.0.1:8000/v1")
    add("--model", required=True, help="its name at the endpoint")
    add("--json", type=Path, help="file for one JSON line per episode, with its messages")
    add("--plot", type=Path, help="file for a plot of the rewards, an SVG")
    given = vars(parser.parse_args())
    drawn = given.pop("plot")
    if drawn and importlib.util.find_spec("matplotlib") is None:
        parser.exit(1, "agent.py: --plot needs matplotlib (fix: pip install matplotlib)\n")
    address, model, out = given.pop("endpoint"), given.pop("model"), given.pop("json")
    try:
        model_options = EndpointOptions(url=address, model=model, key=os.environ.get("OPENAI_API_KEY", ""))
        options = RunOptions(**given, policy=model, out=out)
    except ValueError as error:
        parser.error(str(error))
    endpoint, began_at = Endpoint(model_options), time.monotonic()
    run = Run(options, lambda episode, played: play(episode, endpoint, played))
    status, problem = finish(run, endpoint)
    if run.results:
        summary = summed(run.results, time.monotonic() - began_at)
        print(table(summary))
        for reason, text in summary.examples.items():
            print(f"agent.py: {reason}, {text}", file=sys.stderr)
        if drawn:
            plot(run.results, drawn, f"{model} on {options.environment}, {options.split}")
    if problem:
        print(f"agent.py: {problem}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
