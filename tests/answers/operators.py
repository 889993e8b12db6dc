"""Named operators that write an answer in other notations, and that make wrong answers near a right one."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any, Final

Operator = Callable[[str], str | None]
"""Returns another text, or None if the operator does not apply."""

MARKS: Final[Mapping[str, Operator]] = {
    "as it is": lambda text: text,
    "blanks": lambda text: f"  {text} \n",
    "bold": lambda text: f"**{text}**",
    "code": lambda text: f"`{text}`",
    "quotes": lambda text: f'"{text}"',
    "formula": lambda text: None if "$" in text else f"${text}$",
    "brackets of a formula": lambda text: None if "$" in text else rf"\({text}\)",
    "box": lambda text: None if "$" in text else rf"\boxed{{{text}}}",
    "a full stop": lambda text: f"{text}.",
    "a label": lambda text: f"Answer: {text}",
    "marks in marks": lambda text: None if "$" in text else rf"**$\boxed{{{text}}}$**",
}
"""Marks around an answer that do not change it."""

_NUMBER: Final = re.compile(r"(?P<sign>-?)(?P<whole>\d+)(?:\.(?P<places>\d+))?")


def _number(change: Callable[[str, str, str], tuple[str, str, str] | None]) -> Operator:
    """Return an operator that changes sign, whole part and places of a text that is a plain number."""

    def changed(text: str) -> str | None:
        found = _NUMBER.fullmatch(text)
        parts = change(found["sign"], found["whole"], found["places"] or "") if found else None
        if parts is None:
            return None
        sign, whole, places = parts
        return f"{sign}{whole}.{places}" if places else f"{sign}{whole}"

    return changed


def _grouped(sign: str, whole: str, places: str) -> tuple[str, str, str] | None:
    return (sign, f"{int(whole):,}", places) if len(whole) > 3 else None


NUMBERS: Final[Mapping[str, Operator]] = {
    "a plus": lambda text: f"+{text}" if _NUMBER.fullmatch(text) and not text.startswith("-") else None,
    "a typographic minus": lambda text: text.replace("-", "\N{MINUS SIGN}") if re.match(r"-\d", text) else None,
    "a decimal point": lambda text: f"{text}.0" if re.fullmatch(r"-?\d+", text) else None,
    "a zero behind": lambda text: f"{text}0" if re.fullmatch(r"-?\d+\.\d+", text) else None,
    "thousands": _number(_grouped),
    "full-width digits": lambda text: text.translate({48 + digit: 0xFF10 + digit for digit in range(10)}),
}
"""Other notations of a number."""

TEXTS: Final[Mapping[str, Operator]] = {
    "as it is": lambda text: text,
    "blanks": lambda text: f"  {text} \n",
    "tabs": lambda text: f"\t{text}\t",
    "a line end": lambda text: f"{text}\n",
    "a line end of Windows": lambda text: f"{text}\r\n",
    "empty lines": lambda text: f"\n\n{text}\n\n",
    "no-break spaces": lambda text: f"\N{NO-BREAK SPACE}{text}\N{NO-BREAK SPACE}",
    "decomposed letters": lambda text: unicodedata.normalize("NFD", text),
}
"""Other notations of a text whose characters count."""

CASES: Final[Mapping[str, Operator]] = {"capitals": str.upper, "small letters": str.lower, "titles": str.title}
"""Other notations of a text whose case does not count."""


def _json(change: Callable[[Any], Any] = lambda value: value, **form: Any) -> Operator:
    """Return an operator that changes a value and writes it in a form of `json.dumps`, if the change applies."""

    def changed(text: str) -> str | None:
        made = change(json.loads(text))
        return None if made is None else json.dumps(made, **{"ensure_ascii": False, **form})

    return changed


def _turned(value: Any) -> Any:
    return dict(reversed(value.items())) if isinstance(value, dict) else None


def _deep(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *change* for each value within lists and objects."""

    def changed(value: Any) -> Any:
        match value:
            case dict():
                return {key: changed(item) for key, item in value.items()}
            case list():
                return [changed(item) for item in value]
        return change(value)

    return changed


JSON: Final[Mapping[str, Operator]] = {
    "as it is": lambda text: text,
    "blanks": lambda text: f"  {text} \n",
    "compact": _json(separators=(",", ":")),
    "indented": _json(indent=4),
    "escapes": _json(ensure_ascii=True),
    "keys turned": _json(_turned),
    "numbers with a point": _json(_deep(lambda value: float(value) if type(value) is int else value)),
    "a fence": lambda text: f"```\n{text}\n```",
    "a fence of JSON": lambda text: f"```json\n{text}\n```",
    "carriage returns": lambda text: json.dumps(json.loads(text), indent=1, ensure_ascii=False).replace("\n", "\r\n"),
}
"""Other notations of a JSON value."""

SIZES: Final[Mapping[str, Operator]] = {
    "a small unit": lambda text: text.lower() if text[-1] == "K" else None,
    "a blank before the unit": lambda text: f"{text[:-1]} K" if text[-1] == "K" else None,
    "KB": lambda text: f"{text}B" if text[-1] == "K" else None,
    "KiB": lambda text: f"{text}iB" if text[-1] == "K" else None,
    "bytes": lambda text: str(int(text[:-1]) << 10) if text[-1] == "K" else None,
}
"""Other notations of a size."""

FILES: Final[Mapping[str, Operator]] = {
    "as it is": lambda text: text,
    "no line end": lambda text: text.rstrip("\n"),
    "a line end more": lambda text: f"{text}\n",
    "an empty line before": lambda text: f"\n{text}",
    "carriage returns": lambda text: text.replace("\n", "\r\n"),
    "old carriage returns": lambda text: text.replace("\n", "\r"),
}
"""Other forms of a file's content."""

IN_TEXT: Final[Mapping[str, Operator]] = {
    "a tag": lambda text: f"I computed it.\n<answer>{text}</answer>",
    "a tag of capitals": lambda text: f"<ANSWER> {text} </ANSWER>",
    "a tag that is not closed": lambda text: f"So it is <answer>{text}",
    "an end token": lambda text: f"<answer>{text}<|im_end|>",
    "a draft before": lambda text: f"<answer>0.123</answer> is wrong. <answer>{text}</answer>",
    "reasoning before": lambda text: f"<think>Is it 0.123? <answer>0.123</answer></think>{text}",
    "reasoning that began in the prompt": lambda text: f"It is 0.123.</think>\n\n{text}",
    "a box in a sentence": lambda text: None if "$" in text else rf"Therefore the result is \boxed{{{text}}}.",
}
"""Answers in a model's text."""


def _first_digit(whole: str) -> str:
    return f"{int(whole[0]) % 9 + 1}{whole[1:]}"


def _swapped(sign: str, whole: str, places: str) -> tuple[str, str, str] | None:
    for at in range(len(whole) - 1):
        if whole[at] != whole[at + 1] and (at or whole[1] != "0"):
            return sign, whole[:at] + whole[at + 1] + whole[at] + whole[at + 2 :], places
    return None


def _last_place(step: int) -> Operator:
    def moved(sign: str, whole: str, places: str) -> tuple[str, str, str] | None:
        digits = int(whole + places) + step
        if digits < 1:
            return None
        text = f"{digits:0{len(places) + 1}}"
        return (sign, text[: -len(places)], text[-len(places) :]) if places else (sign, text, "")

    return _number(moved)


NEAR_NUMBERS: Final[Mapping[str, Operator]] = {
    "another sign": lambda text: text[1:] if text.startswith("-") else f"-{text}",
    "a digit more in front": _number(lambda sign, whole, places: (sign, f"1{whole}", places)),
    "a zero more behind": _number(lambda sign, whole, places: (sign, f"{whole}0", places)),
    "a digit dropped": _number(lambda sign, whole, places: (sign, whole[1:], places) if len(whole) > 1 else None),
    "a digit changed": _number(lambda sign, whole, places: (sign, _first_digit(whole), places)),
    "two digits swapped": _number(_swapped),
    "the point moved right": _number(
        lambda sign, whole, places: (sign, whole + places[0], places[1:]) if places else None
    ),
    "the point moved left": _number(lambda sign, whole, places: (sign, whole[:-1] or "0", whole[-1] + places)),
    "the last place plus one": _last_place(1),
    "the last place minus one": _last_place(-1),
}
"""Wrong numbers near a right one."""

NEAR_TEXTS: Final[Mapping[str, Operator]] = {
    "another unit": lambda text: f"{text} parsecs",
    "inside a longer text": lambda text: f"x{text}y",
    "twice": lambda text: f"{text}{text}" if text.strip("0") else None,
    "beside a wrong answer": lambda text: f"{text} or 0.123",
    "before a wrong answer": lambda text: f"{text}, no: 0.123",
    "negated": lambda text: f"not {text}",
}
"""Wrong answers that contain a right one."""


NEAR_WORDS: Final[Mapping[str, Operator]] = {
    "another case": lambda text: text.swapcase() if text.swapcase() != text else None,
    "a letter dropped": lambda text: text[1:] if len(text) > 1 else None,
    "a letter more": lambda text: f"{text}{text[-1:]}",
    "a letter changed": lambda text: f"{chr(ord(text[0]) + 1)}{text[1:]}" if text.isascii() else None,
    "letters swapped": lambda text: f"{text[1]}{text[0]}{text[2:]}" if len(set(text[:2])) > 1 else None,
}
"""Wrong words near a right one, where its case counts."""


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


def _without_a_key(value: Any) -> Any:
    return dict(list(value.items())[1:]) if isinstance(value, dict) else None


def _with_a_key(value: Any) -> Any:
    return {**value, "more": None} if isinstance(value, dict) else None


def _other_keys(value: Any) -> Any:
    return {key.swapcase(): item for key, item in value.items()} if isinstance(value, dict) else None


NEAR_JSON: Final[Mapping[str, Operator]] = {
    "a key dropped": _json(_without_a_key),
    "a key more": _json(_with_a_key),
    "keys in another case": _json(_other_keys),
    "values changed": _json(_deep(lambda value: f"{value}x" if isinstance(value, str) else [value])),
    "texts for numbers": _json(lambda value: made if (made := _deep(_text)(value)) != value else None),
    "in a list": _json(lambda value: [value]),
    "a comma more": lambda text: f"{text},",
    "a bracket dropped": lambda text: text[:-1],
    "in a sentence": lambda text: f"It is {text}.",
}
"""Wrong JSON near a right value."""

NEAR_SIZES: Final[Mapping[str, Operator]] = {
    "a larger unit": lambda text: f"{text[:-1]}M" if text[-1] == "K" else None,
    "no unit": lambda text: text[:-1] if text[-1] == "K" else None,
    "one more": lambda text: f"{int(text[:-1]) + 1}K" if text[-1] == "K" else None,
    "one less": lambda text: f"{int(text[:-1]) - 1}K" if text[-1] == "K" else None,
}
"""Wrong sizes near a right one."""

NEAR_FILES: Final[Mapping[str, Operator]] = {
    "the first line dropped": lambda text: text.split("\n", 1)[1],
    "the last line dropped": lambda text: text.rstrip("\n").rpartition("\n")[0],
    "the first line twice": lambda text: text.split("\n")[0] + "\n" + text,
    "the lines turned": lambda text: "\n".join(reversed(text.split("\n"))),
    "another case": lambda text: text.swapcase(),
    "a blank more": lambda text: text.replace(" ", "  ", 1) if " " in text else None,
}
"""Wrong contents near a right one."""


def variants(text: str, *tables: Mapping[str, Operator]) -> Iterator[tuple[str, str]]:
    """Yield the names of the operators that apply to *text*, and the texts that they make."""
    for table in tables:
        for name, operator in table.items():
            if (made := operator(text)) is not None:
                yield name, made


def number_variants(text: str, *tables: Mapping[str, Operator]) -> Iterator[tuple[str, str]]:
    """Yield *text* with each of its numbers changed in turn by each operator that changes it."""
    for found in re.finditer(r"(?<![\w.])-?\d+(?:\.\d+)?(?![\w.])", text):
        for name, made in variants(found[0], *tables):
            if made.isascii() and Fraction(made) != Fraction(found[0]):
                yield f"{name} of {found[0]}", text[: found.start()] + made + text[found.end() :]
