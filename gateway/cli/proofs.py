"""Plays tasks with their references and without effort, and finds what is wrong with their rewards.

Imports the client package, so only the command `gateway tasks prove` imports this module, after `import_client`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Final

from env_gateway_client.client import AsyncEpisode, AsyncGateway
from env_gateway_client.content import Tool, text_of
from env_gateway_client.errors import GatewayError, NotAllowed, StartFailed, Unreachable
from env_gateway_client.runs import progress

REPEATS: Final = 8
"""Number of times that a play without a reference repeats its action while the episode goes on."""
EFFORTLESS: Final = ("empty", "echo", "constant", "no-op")
"""The plays that know nothing of the task's solution."""
_STOPS: Final = (NotAllowed, StartFailed, Unreachable)
"""Errors that end the command, because the other plays would have them too."""

Call = tuple[str, Mapping[str, Any]]
"""A tool and its arguments."""


class NotPlayable(Exception):
    """A play cannot be made. The text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A task to prove."""

    environment: str
    id: str
    place: str = ""
    """File and line. Empty: the gateway has the task."""
    task: Mapping[str, Any]
    """The complete task."""
    opening: Mapping[str, Any]
    """What opens an episode: the complete task, or its public view."""

    @property
    def group(self) -> tuple[str, str]:
        """The environment and the first tag. Tasks that share both are probably of one kind."""
        tags = self.task.get("tags")
        return self.environment, str(tags[0]) if isinstance(tags, list) and tags else ""

    @property
    def reference(self) -> Any:
        """The reference of the task or of its evaluation. None: there is none."""
        places = (("reference",), ("evaluation", "reference"), ("evaluation", "entry", "answer"))  # the last is math's
        return next((found for place in places if (found := _value(self.task, *place)) is not None), None)

    def number(self, key: str, default: float) -> float:
        """Return the number at a key of the task."""
        found = self.task.get(key)
        return found if isinstance(found, int | float) else default


@dataclass(frozen=True, slots=True)
class Played:
    """The end of one play."""

    play: str
    """``reference`` or an element of `EFFORTLESS`, and the tool that doing nothing called."""
    reward: float | None
    """0 if the episode went on without a reward. None: the play failed."""
    finished: bool = False
    error: str = ""

    def is_of(self, kind: str) -> bool:
        """Return True if the play is of a kind, whatever its tool."""
        return self.play.split()[0] == kind


@dataclass(slots=True)
class Proof:
    """The plays of one task."""

    subject: Subject
    plays: list[Played] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Why there is no play with the ``reference``, or with ``texts``."""

    @property
    def is_won(self) -> bool:
        """True if the reference won twice."""
        rewards = self.rewards("reference")
        return len(rewards) == 2 and not self._reference_problem()

    def rewards(self, kind: str) -> list[float]:
        """Return the rewards of the plays of a kind that did not fail."""
        return [one.reward for one in self.plays if one.is_of(kind) and one.reward is not None]

    def problems(self) -> list[tuple[str, str]]:
        """Return each mistake of the task: the plays that show it, and a text with its fix."""
        failures: defaultdict[str, list[str]] = defaultdict(list)
        for one in self.plays:
            if one.reward is None:
                failures[one.error].append(one.play)
        found = [(", ".join(dict.fromkeys(plays)), f"failed: {error}") for error, plays in failures.items()]
        if problem := self._reference_problem():
            found.append(("reference", problem))
        fix = 'fix: judge what the agent did, or state this reward as "reward_floor" in the task'
        return found + [(play, f"{text} ({fix})") for play, text in self._above_floor("no-op")]

    def remarks(self) -> list[tuple[str, str]]:
        """Return the texts that were given without reading the task, and earned more than the floor."""
        return [*self._above_floor("empty"), *self._above_floor("echo")]

    def _reference_problem(self) -> str:
        """Return what is wrong with the ends of the reference's plays, if none failed."""
        both = [one for one in self.plays if one.is_of("reference")]
        rewards = self.rewards("reference")
        full = self.subject.number("reward_full", 1.0)
        if len(rewards) < len(both) or not both:
            return ""
        if rewards[0] != rewards[1]:
            fix = "make start and judging depend on the task and the seed alone"
            return f"earns {rewards[0]:g} in the first play and {rewards[1]:g} in the second (fix: {fix})"
        if rewards[0] < full:
            fix = 'correct the reference or the evaluation, or state this reward as "reward_full" in the task'
            return f"earns {rewards[0]:g} and does not win, which takes {full:g} (fix: {fix})"
        if not all(one.finished for one in both):
            return "does not end the episode (fix: add the action that ends it to the reference)"
        return ""

    def _above_floor(self, kind: str) -> list[tuple[str, str]]:
        floor = self.subject.number("reward_floor", 0.0)
        found = [one for one in self.plays if one.is_of(kind) and one.reward is not None and one.reward > floor]
        return [(one.play, f"earns {one.reward:g}, more than the floor of {floor:g}") for one in found]


def _value(document: Any, *keys: str) -> Any:
    """Return the value at a path in nested objects, or None."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def constants_of(subjects: Iterable[Subject]) -> dict[tuple[str, str], str]:
    """Return the most frequent text of the references of each group that has one."""
    texts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for subject in subjects:
        if isinstance(subject.reference, str):
            texts[subject.group][subject.reference] += 1
    return {group: found.most_common(1)[0][0] for group, found in texts.items()}


def text_call_of(tools: Iterable[Tool]) -> tuple[str, str]:
    """Return the one tool that requires one text, and nothing else, and the name of that argument.

    Raises:
        NotPlayable: There is no such tool, or more than one.
    """
    found: list[tuple[str, str]] = []
    for tool in tools:
        match tool.input_schema:
            case {"required": [str(name)]} if _value(tool.input_schema, "properties", name, "type") == "string":
                found.append((tool.name, name))
    if len(found) != 1:
        names = ", ".join(name for name, _ in found)
        what = f"the tools {names} require one text" if names else "no tool requires one text and nothing else"
        raise NotPlayable(f"{what}; choose one with --text-tool")
    return found[0]


def reference_calls(reference: Any, tools: Iterable[Tool], text_call: tuple[str, str] | None) -> list[Call]:
    """Return the calls that play a reference, in their order.

    Args:
        reference: `Subject.reference`.
        tools: The tools of the episode.
        text_call: Tool and argument for texts. None: those of `text_call_of`.

    Raises:
        NotPlayable: There is no reference, or no tool for its text.
        ValueError: The reference has another form.
    """
    calls: list[Call] = []
    match reference:
        case None:
            raise NotPlayable("the task has none")
        case {"commands": list(commands), "answer": answer}:  # of the environment os
            end = ("finish_action", {"thought": ""}) if answer is None else ("answer_action", {"answer": answer})
            return [*(("bash_action", {"script": command}) for command in commands), end]
    for entry in reference if isinstance(reference, list) else [reference]:
        match entry:
            case {"name": str(name), "input": dict(arguments)}:
                calls.append((name, arguments))
            case str():
                name, argument = text_call or text_call_of(tools)
                calls.append((name, {argument: entry}))
            case _:
                form = 'a text, an action {"name": TOOL, "input": {…}}, or a list of these'
                raise ValueError(f"the reference has {str(entry)[:80]!r} (fix: write {form})")
    return calls


def summed(proofs: Iterable[Proof]) -> dict[str, Any]:
    """Return the result of the command: a row for each group of tasks, and what is to mend."""
    groups: defaultdict[tuple[str, str], list[Proof]] = defaultdict(list)
    found: dict[str, list[dict[str, Any]]] = {"groups": [], "problems": [], "remarks": [], "skipped": []}
    for proof in proofs:
        groups[proof.subject.group].append(proof)
        task = {"environment": proof.subject.environment, "task": proof.subject.id, "place": proof.subject.place}
        found["problems"] += [{**task, "play": play, "problem": text} for play, text in proof.problems()]
        found["remarks"] += [{**task, "play": play, "remark": text} for play, text in proof.remarks()]
        found["skipped"] += [{**task, "play": play, "reason": reason} for play, reason in proof.skipped.items()]
    for (environment, tag), some in groups.items():
        row: dict[str, Any] = {"environment": environment, "tag": tag, "tasks": len(some)}
        row["won"] = sum(proof.is_won for proof in some)
        row["references"] = sum("reference" not in proof.skipped for proof in some)
        for play in EFFORTLESS:
            rewards = [reward for proof in some for reward in proof.rewards(play)]
            row[play] = {"max": max(rewards), "mean": fmean(rewards)} if rewards else None
        row["failed"] = sum(one.reward is None for proof in some for one in proof.plays)
        found["groups"].append(row)
    return found


async def prove(
    gateway: AsyncGateway, subject: Subject, constant: str | None, text_call: tuple[str, str] | None
) -> Proof:
    """Play a task in each way, one play after the other. A failed play is a `Played` without a reward.

    Raises:
        NotAllowed, StartFailed, Unreachable: The other tasks would fail too.
    """
    proof = Proof(subject)
    episode, nothing = await _play(gateway, subject, "no-op", [])
    proof.plays.append(nothing)
    if episode is None:
        proof.skipped["reference"] = "no episode opened"
        return proof
    plays: list[tuple[str, Sequence[Call]]] = []
    try:
        plays += [("reference", reference_calls(subject.reference, episode.tools, text_call))] * 2
    except NotPlayable as reason:
        proof.skipped["reference"] = str(reason)
    except ValueError as error:
        proof.plays.append(Played("reference", None, error=str(error)))
    try:
        tool, argument = text_call or text_call_of(episode.tools)
        texts = {"empty": "", "echo": text_of(episode.prompt), "constant": constant}
        plays += [(play, [(tool, {argument: text})] * REPEATS) for play, text in texts.items() if text is not None]
    except NotPlayable as reason:
        proof.skipped["texts"] = str(reason)
    idle = [tool.name for tool in episode.tools if not (tool.input_schema or {}).get("required")]
    plays += [(f"no-op {name}", [(name, {})] * REPEATS) for name in idle]
    proof.plays += [(await _play(gateway, subject, play, calls))[1] for play, calls in plays]
    return proof


async def _play(
    gateway: AsyncGateway, subject: Subject, play: str, calls: Sequence[Call]
) -> tuple[AsyncEpisode | None, Played]:
    """Play an episode until it ends, at most with *calls*. Returns the episode too, or None if it did not open."""
    episode = None
    try:
        async with await gateway.open(subject.environment, task=subject.opening, policy="prove") as episode:
            for name, arguments in calls:
                result = await episode.step(name, arguments)
                if not result.ok and (result.reason == "tool_failed" or play == "reference"):
                    is_raised = result.reason == "tool_failed"
                    what, fix = (
                        ("raised", "correct the tool") if is_raised else ("did not run", "correct the reference")
                    )
                    error = f"the tool {name} {what}: {result.text} (fix: {fix})"
                    return episode, Played(play, None, error=error)
                if result.finished or not result.ok:
                    break
            return episode, Played(play, episode.final_reward(), episode.finished)
    except _STOPS:
        raise
    except GatewayError as error:
        return episode, Played(play, None, error=str(error))


async def prove_all(
    gateway: AsyncGateway, subjects: Sequence[Subject], *, at_once: int, text_call: tuple[str, str] | None
) -> list[Proof]:
    """Prove *subjects*, *at_once* at the same time. Close all episodes in the end, also after an error.

    Raises:
        ExceptionGroup: Of the errors of `prove`.
    """
    constants, proofs = constants_of(subjects), dict[int, Proof]()
    waiting = iter(enumerate(subjects))

    async def prove_some() -> None:
        for number, subject in waiting:
            proofs[number] = await prove(gateway, subject, constants.get(subject.group), text_call)
            advance()

    with progress(len(subjects), "tasks") as advance:
        async with gateway, asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(prove_some())
    return [proofs[number] for number in range(len(subjects))]
