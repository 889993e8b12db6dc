"""The families of tasks: each draws, for a level, the user's messages and the evaluation of the last reply.

Every task has a reference that earns 1: a reply, or several if the user says more. This module is not in the image,
because the server never needs it.
"""

from __future__ import annotations

import calendar
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from datetime import date, timedelta
from typing import Any, TypeAlias

Drawn: TypeAlias = dict[str, Any]
"""The `instruction`, `config` and `evaluation` of a task."""

NAMES = ["Amara", "Bruno", "Celine", "Dmitri", "Elif", "Farid", "Greta", "Hiro", "Ines", "Jonas", "Kirsten", "Luca"]
WORDS = [
    "anchor",
    "basket",
    "candle",
    "desert",
    "engine",
    "forest",
    "garden",
    "harbor",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "market",
    "needle",
    "orange",
    "pocket",
    "quartz",
    "ribbon",
    "saddle",
    "tunnel",
    "valley",
    "window",
    "yellow",
    "zipper",
]
THINGS = ["apples", "books", "chairs", "lamps", "pencils", "plates", "stamps", "tickets"]


def drawn(instruction: str, evaluation: Mapping[str, Any], reference: str | list[str], **config: Any) -> Drawn:
    """Return a task from its parts."""
    return {"instruction": instruction, "config": config, "evaluation": {**evaluation, "reference": reference}}


def exactly(instruction: str, answer: str, **config: Any) -> Drawn:
    """Return a task with exactly one right answer, to the letter."""
    return drawn(instruction, {"reward_function": "exact_match", "expected": answer}, answer, **config)


def format_following(dice: random.Random, level: int) -> Drawn:
    """Ask for given words in a given form."""
    words = dice.sample(WORDS, level + 1)
    listed = ", ".join(words)
    match level:
        case 1:
            return exactly(
                f"Write these words in capital letters with a hyphen between them, nothing else: {listed}",
                "-".join(words).upper(),
            )
        case 2:
            return exactly(
                "Write these words in reverse order, each in double quotes, separated by single spaces, nothing else: "
                f"{listed}",
                " ".join(f'"{word}"' for word in reversed(words)),
            )
        case 3:
            return exactly(
                "Write these words as a numbered list, one a line, in the form `1) Word`, each with a capital first "
                f"letter and nothing else: {listed}",
                "\n".join(f"{number}) {word.capitalize()}" for number, word in enumerate(words, start=1)),
            )
    rows = [f"{word}|{len(word)}|{word[0]}" for word in words]
    return exactly(
        "For each of these words write one line `word|number of its letters|its first letter`, below a first line "
        f"`word|letters|first`, without spaces and without anything else: {listed}",
        "\n".join(["word|letters|first", *rows]),
    )


def extraction(dice: random.Random, level: int) -> Drawn:
    """Ask for one detail of a letter."""
    first, second = dice.sample(NAMES, 2)
    order, room = dice.randrange(10_000, 99_999), dice.randrange(100, 999)
    total, paid = dice.randrange(200, 900), dice.randrange(20, 190)
    host = dice.choice(["example.com", "example.org", "example.net"])
    letter = (
        f"Dear {first}, thank you for order {order}. The total is {total} euros, of which you paid {paid} in advance. "
        f"Your room is {room}; the one next to it, {room + 1}, is taken by {second}. Questions? Write to "
        f"{second.lower()}.{order % 100}@{host}, not to {first.lower()}@{host}."
    )
    question, answer = [
        ("Which order number does it name? Answer with the number alone.", str(order)),
        (
            "To which e-mail address should questions go? Answer with the address alone.",
            f"{second.lower()}.{order % 100}@{host}",
        ),
        (f"In which room does {second} stay? Answer with the number alone.", str(room + 1)),
        ("How many euros are still to be paid? Answer with the number alone.", str(total - paid)),
    ][level - 1]
    return exactly(f"{letter}\n\n{question}", answer)


def word_problem(dice: random.Random, level: int) -> Drawn:
    """Ask for the result of some steps of arithmetic."""
    first, second = dice.sample(NAMES, 2)
    things = dice.choice(THINGS)
    boxes, each, given = dice.randint(3, 9), dice.randint(4, 12), dice.randint(2, 11)
    text, result = f"{first} has {boxes} boxes of {each} {things}", boxes * each
    if level >= 2:
        text, result = f"{text} and gives {given} {things} to {second}", result - given
    if level >= 3:
        friends = dice.randint(2, 7)
        more = (-result) % friends + friends
        text = f"{text}. Then {first} buys {more} more and shares all of them equally among {friends} friends"
        result = (result + more) // friends
    if level >= 4:
        price = dice.randint(2, 9)
        text, result = f"{text}, who each sell theirs for {price} euros apiece", result * price
    question = [
        f"How many {things} does {first} have?",
        f"How many {things} does {first} have left?",
        f"How many {things} does each friend get?",
        "How many euros does each friend earn?",
    ][level - 1]
    return drawn(
        f"{text}. {question} Answer with the number alone.",
        {"reward_function": f"numeric_match({result})"},
        str(result),
    )


def json_output(dice: random.Random, level: int) -> Drawn:
    """Ask for the contents of a text as JSON."""
    cities = ["Oslo", "Lima", "Kyoto", "Accra", "Porto"]
    people = [(name, dice.randint(19, 80), dice.choice(cities)) for name in dice.sample(NAMES, level)]
    told = " ".join(f"{name} is {age} years old and lives in {city}." for name, age, city in people)
    ages = sorted(age for _, age, _ in people)
    least = ages[len(ages) // 2]
    asked, answer = [
        (
            "a JSON object with the keys name, age (a number) and city",
            dict(zip(("name", "age", "city"), people[0], strict=True)),
        ),
        ("a JSON object that maps each name to the age, a number", {name: age for name, age, _ in people}),
        (
            "a JSON object with the keys people (a list of the names, in this order) and oldest (the highest age)",
            {"people": [name for name, _, _ in people], "oldest": ages[-1]},
        ),
        (
            f"a JSON list of objects with the keys name and city, of those who are {least} or older, in this order",
            [{"name": name, "city": city} for name, age, city in people if age >= least],
        ),
    ][level - 1]
    return drawn(
        f"{told}\n\nWrite this as {asked}. Answer with the JSON alone.",
        {"reward_function": "json_equals", "expected": answer},
        json.dumps(answer),
    )


def word_constraint(dice: random.Random, level: int) -> Drawn:
    """Ask for a sentence under constraints, all of which must hold."""
    letter = dice.choice("aeiou")
    words = [word for word in WORDS if letter not in word]
    dice.shuffle(words)
    length, wanted, last = dice.randint(5, 12), words[0], words[1]
    rules: list[tuple[str, str]] = [
        (f"has exactly {length} words", f"word_count_between({length}, {length})"),
        (f"contains the word {wanted}", f"contains({wanted!r}, case=False)"),
        (f"ends with the word {last}, without a full stop", f"ends_with({last!r}, case=False)"),
        (f"does not contain the letter {letter}", f"not_contains({letter!r}, case=False)"),
    ]
    used = [rules[place] for place in [(0, 1), (0, 1, 2), (0, 1, 3), (0, 1, 2, 3)][level - 1]]
    told = "; ".join(rule for rule, _ in used)
    return drawn(
        f"Write one line of text that fulfils all of these: it {told}. Answer with the line alone.",
        {"all": [{"reward_function": call} for _, call in used], "combine": "least"},
        " ".join([wanted, *itertools.islice(itertools.cycle(words[2:]), length - 2), last]),
    )


PHRASES: Sequence[Mapping[str, tuple[str, Sequence[str]]]] = [
    {
        "French": ("Thank you", ["merci"]),
        "Spanish": ("Thank you", ["gracias"]),
        "German": ("Thank you", ["danke"]),
        "Italian": ("Thank you", ["grazie"]),
    },
    {
        "French": ("Good evening", ["bonsoir"]),
        "Spanish": ("See you tomorrow", ["hasta mañana"]),
        "German": ("Good morning", ["guten Morgen"]),
        "Italian": ("Good night", ["buona notte", "buonanotte"]),
    },
    {
        "French": ("Where is the train station?", ["où est la gare", "où se trouve la gare"]),
        "Spanish": ("What time is it?", ["qué hora es", "¿qué hora es"]),
        "German": ("What is your name? (informally)", ["wie heißt du", "wie ist dein Name"]),
        "Italian": ("How much does it cost?", ["quanto costa"]),
    },
    {
        "French": ("I do not speak French.", ["je ne parle pas français", "je ne parle pas le français"]),
        "Spanish": ("I live in a small house.", ["vivo en una casa pequeña", "yo vivo en una casa pequeña"]),
        "German": ("I have two brothers.", ["ich habe zwei Brüder"]),
        "Italian": ("Today is a beautiful day.", ["oggi è una bella giornata", "oggi è una giornata bella"]),
    },
]
"""By level: language → an English phrase and its usual translations."""


def translation(dice: random.Random, level: int) -> Drawn:
    """Ask for a common phrase in another language; final punctuation and case do not count."""
    language = dice.choice(sorted(PHRASES[level - 1]))
    phrase, known = PHRASES[level - 1][language]
    choices = [f"{translated}{mark}" for translated in known for mark in ("", ".", "!", "?", " ?")]
    return drawn(
        f"Translate into {language}: {phrase}\nAnswer with the usual translation alone.",
        {"reward_function": f"one_of({choices!r}, case=False)"},
        known[0],
    )


def recall(dice: random.Random, level: int) -> Drawn:
    """State facts, talk about something else, and ask for one of the facts."""
    owners = dice.sample(NAMES, level)
    codes = {owner: dice.randrange(1_000, 9_999) for owner in owners}
    asked = dice.choice(owners)
    chatter = dice.sample(
        ["Nice weather today, isn't it?", "I had soup for lunch.", "My train was late again.", "I like your name."],
        level,
    )
    told = " ".join(f"The locker of {owner} has the code {code}." for owner, code in codes.items())
    question = f"Now, what is the code of {asked}'s locker? Answer with the number alone."
    return drawn(
        f"{told} Remember that. Just say OK for now.",
        {"reward_function": f"exact_match('{codes[asked]}')"},
        ["OK", *["Yes."] * level, str(codes[asked])],
        follow_ups=[*chatter, question],
    )


def ordering(dice: random.Random, level: int) -> Drawn:
    """Ask for things in another order."""
    count = level + 3
    match level:
        case 1:
            words = dice.sample(WORDS, count)
            return exactly(
                f"Sort alphabetically, separated by a comma and a space, nothing else: {', '.join(words)}",
                ", ".join(sorted(words)),
            )
        case 2:
            values = dice.sample(range(-99, 100), count)
            return exactly(
                "Sort from the largest to the smallest, separated by a comma and a space, nothing else: "
                f"{', '.join(map(str, values))}",
                ", ".join(map(str, sorted(values, reverse=True))),
            )
        case 3:
            days = [date(dice.randint(1990, 2030), dice.randint(1, 12), dice.randint(1, 28)) for _ in range(count)]
            return exactly(
                "Sort from the earliest to the latest, one a line, nothing else: "
                f"{', '.join(day.isoformat() for day in days)}",
                "\n".join(day.isoformat() for day in sorted(days)),
            )
    people = {name: dice.randint(1, 4) for name in dice.sample(NAMES, count)}
    told = ", ".join(f"{name} ({points})" for name, points in people.items())
    ranked = sorted(people, key=lambda name: (-people[name], name))
    return exactly(
        "Rank these players by points, the most first, equal ones alphabetically; names alone, separated by a comma "
        f"and a space: {told}",
        ", ".join(ranked),
    )


def counting(dice: random.Random, level: int) -> Drawn:
    """Ask for the number of occurrences of something."""
    number = dice.randint(5, 12) if level == 1 else 4 + 4 * level
    words = [dice.choice(WORDS[: 4 + 2 * level]) for _ in range(number)]
    text, word, letter = " ".join(words), dice.choice(words), dice.choice("aeinr")
    question, count = [
        ("How many words are in this text?", len(words)),
        (f"How often does the word {word} occur in this text?", words.count(word)),
        (f"How often does the letter {letter} occur in this text?", text.count(letter)),
        (f"How many words of this text contain the letter {letter}?", sum(letter in one for one in words)),
    ][level - 1]
    return drawn(
        f"{question} Answer with the number alone.\n\n{text}",
        {"reward_function": f"numeric_match({count})"},
        str(count),
    )


def dates(dice: random.Random, level: int) -> Drawn:
    """Ask for a date in another form, or some days later."""
    day = date(dice.randint(2001, 2030), dice.randint(1, 12), dice.randint(1, 28))
    long, days = (
        f"{calendar.month_name[day.month]} {day.day}, {day.year}",
        dice.randint(8, 25) if level < 4 else dice.randint(60, 200),
    )
    match level:
        case 1:
            return exactly(f"Write {long} in the form YYYY-MM-DD, nothing else.", day.isoformat())
        case 2:
            return exactly(f"Write {day.isoformat()} in the form DD.MM.YYYY, nothing else.", day.strftime("%d.%m.%Y"))
    return exactly(
        f"Which date is {days} days after {long}? Answer in the form YYYY-MM-DD, nothing else.",
        (day + timedelta(days=days)).isoformat(),
    )


def history(dice: random.Random, level: int) -> Drawn:
    """Continue a conversation on which the answer depends."""
    words = dice.sample(WORDS, level + 3)
    gone, new = dice.choice(words), dice.choice([word for word in WORDS if word not in words])
    place = dice.randint(2, len(words) - 1)
    earlier = [
        {
            "role": "system",
            "content": "You keep the user's list. Answer with the list alone: words separated by a comma and a space.",
        },
        {"role": "user", "content": f"Put these on my list: {', '.join(words)}"},
        {"role": "assistant", "content": ", ".join(words)},
    ]
    kept = [word for word in words if word != gone]
    asked, answer = [
        (f"Strike {gone}.", kept),
        (f"Put {new} at the end.", [*words, new]),
        (f"Put {new} in place {place}, before what is there now.", [*words[: place - 1], new, *words[place - 1 :]]),
        (f"Strike {gone}, then put {new} first.", [new, *kept]),
    ][level - 1]
    return exactly(asked, ", ".join(answer), messages=earlier)


def clarifying(dice: random.Random, level: int) -> Drawn:
    """Omit details that the user states only on request."""
    name, people, hour = dice.choice(NAMES), dice.randint(2, 12), dice.randint(12, 21)
    day = dice.choice(["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"])
    details: list[tuple[str, object, str, str, str]] = [
        ("people", people, "for how many people (people)", "people|persons|guests|many", f"We are {people}."),
        ("hour", hour, "at which hour (hour, a number)", "time|hour|when|o.clock", f"At {hour} o'clock."),
        ("day", day, "on which day of the week (day)", "day|when", f"On {day}, please."),
        ("name", name, "for whom (name)", "name|whom|who", f"The name is {name}."),
    ]
    used = details[:level]
    asked = "; ".join(text for _, _, text, _, _ in used)
    questions = {
        "people": "For how many people?",
        "hour": "At which hour?",
        "day": "On which day?",
        "name": "For whom?",
    }
    answer = {key: value for key, value, *_ in used}
    follow_ups = [
        {"when": f"regex_match({f'({pattern})'!r}, case=False)", "say": say} for _, _, _, pattern, say in used
    ]
    return drawn(
        "Please book a table for me. Ask me, one question at a time, what you need to know: "
        f"{asked}. When you know it all, write the booking as a JSON object with these keys and nothing else: "
        f"{', '.join(key for key, *_ in used)}.",
        {"reward_function": "json_equals", "expected": answer},
        [*(questions[key] for key, *_ in used), json.dumps(answer)],
        follow_ups=follow_ups,
    )


FAMILIES: Mapping[str, tuple[str, Callable[[random.Random, int], Drawn]]] = {
    "format": ("form", format_following),
    "extraction": ("reading", extraction),
    "word_problem": ("arithmetic", word_problem),
    "json": ("form", json_output),
    "constraint": ("form", word_constraint),
    "translation": ("language", translation),
    "recall": ("multi-turn", recall),
    "ordering": ("reading", ordering),
    "counting": ("reading", counting),
    "dates": ("arithmetic", dates),
    "history": ("multi-turn", history),
    "clarifying": ("multi-turn", clarifying),
}
"""Name → its kind, and the function that draws a task of a level from 1 to 4."""
