# ruff: noqa: RUF001, RUF002 - models write the multiplication sign
r"""Answers as models write them: extracted from a text, without marks around them, and numbers by their value.

Every environment whose answer is a number or a word reads it here, so that the same notation is right everywhere:
``$42$``, ``\boxed{42}``, ``**42**``, ``+42``, ``42.0``, ``8,000``, ``1.2 × 10^3`` and a minus sign of any typeface.
"""

import math
import re
import unicodedata
from collections.abc import Collection
from fractions import Fraction

MAX_NUMBER_CHARS = 2_000
"""Maximum length of a number: below the 4,300 digits up to which Python converts integers."""
MAX_EXPONENT = 1_000
"""Largest power of ten in scientific notation."""

_TYPEFACES = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"),  # minus signs, hyphens and short dashes
        **dict.fromkeys("\u00a0\u2009\u202f\u2007", " "),  # spaces that keep a number on one line
        "\uff0b": "+",
    }
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")

_THOUGHT = re.compile(r"</think(?:ing)?>", re.IGNORECASE)
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_BOX = re.compile(r"\\f?boxed?\s*\{")
_END = re.compile(r"</answer|<\|(?:im_end|eot_id|end|endoftext|end_of_text)\|>|</s>", re.IGNORECASE)

_PAIRS = (
    *(("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("```", "```")),
    *(("**", "**"), ("__", "__"), ("*", "*"), ("`", "`"), ('"', '"'), ("'", "'"), ("“", "”"), ("{", "}")),
)
"""Marks before and after an answer that say nothing about it."""
_COMMAND = re.compile(r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|mathit|mathsf|mbox|bm)\s*\{")
_WORDS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathit|mathsf|mbox)\s*\{([^{}]*)\}")
"""Text inside a formula, such as a unit."""
_LABEL = re.compile(r"(?:(?:the\s+)?(?:final\s+)?answer\s*(?:is\b\s*:?|[:=])|[=≈]|\\approx\b)\s*", re.IGNORECASE)

_LATEX_SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|\\displaystyle\b|\\left\b|\\right\b")
_VARIABLE = re.compile(r"[A-Za-z]\s*(?:=|≈|\\approx\b)\s*")
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+)"
_TIMES_TEN = r"\s*(?:[×·*x]|\\times|\\cdot)\s*10\s*(?:\^|\*\*)\s*[{(]?\s*(?P<power>[+-]?[0-9]{1,6})\s*[)}]?"
_DECIMAL = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:(?P<whole>{_WHOLE})(?:\.(?P<places>[0-9]*))?|\.(?P<only>[0-9]+))"
    rf"(?:\s*[eE]\s*(?P<e>[+-]?[0-9]{{1,6}})|{_TIMES_TEN})?"
)
_FRACTION = re.compile(
    rf"(?P<sign>[+-]?)\s*(?:\\[dtc]?frac\s*\{{\s*(?P<above>{_WHOLE})\s*\}}\s*\{{\s*(?P<below>{_WHOLE})\s*\}}"
    rf"|(?P<left>{_WHOLE})\s*/\s*(?P<right>{_WHOLE}))"
)


def final_answer(text: str) -> str:
    r"""Return the answer in a model's *text*, for environments in which the answer stands alone.

    Reasoning, up to the last ``</think>``, is cut first. Then the last ``<answer>`` counts, in any case, up to its end
    tag, an end token or the end of the text, because a stop string cuts the tag off. Without a tag the last
    ``\boxed{…}`` counts, and without that the whole text.
    """
    text = without_reasoning(text)
    if not _TAG.search(text) and (begin := _last(_BOX, text)):
        return text[begin : _closing(text, begin)].strip()
    return tagged_answer(text).strip()


def without_reasoning(text: str) -> str:
    """Return *text* after the last ``</think>`` or ``</thinking>``."""
    return text[_last(_THOUGHT, text) :]


def tagged_answer(text: str) -> str:
    """Return *text* after its last ``<answer>``, and before the end tag or an end token."""
    text = text[_last(_TAG, text) :]
    end = _END.search(text)
    return text[: end.start() if end else len(text)]


def unmarked(text: str) -> str:
    """Return *text* without the marks around it, with composed letters, and with one kind of minus and of space."""
    text = unicodedata.normalize("NFC", text).translate(_TYPEFACES).strip()
    while (inner := _without_a_mark(text).strip()) != text:
        text = inner
    return text


def read_number(text: str, *, units: Collection[str] = ()) -> Fraction | None:
    """Return the exact value of the number that *text* consists of, else None.

    A number is decimal, with commas or spaces only between groups of three digits, perhaps with a power of ten, or a
    fraction in lowest terms: ``80/2`` is a calculation. A letter with an equals sign may stand before it, and one of
    *units*, in any case, after it.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    plain = plain_number(text, units=units)
    if (found := _FRACTION.fullmatch(plain)) is not None:
        above, below = (_digits(found[a] or found[b]) for a, b in (("above", "left"), ("below", "right")))
        if below < 2 or math.gcd(above, below) > 1:
            return None
        return Fraction(-above if found["sign"] == "-" else above, below)
    if (found := _DECIMAL.fullmatch(plain)) is None:
        return None
    places = found["places"] or found["only"] or ""
    power = int(found["e"] or found["power"] or 0)
    if abs(power) > MAX_EXPONENT:
        return None
    value = Fraction(int(re.sub("[, ]", "", found["whole"] or "") + places), 10 ** len(places))
    return (-value if found["sign"] == "-" else value) * Fraction(10) ** power


def plain_number(text: str, *, units: Collection[str] = ()) -> str:
    """Return *text* without marks, an assigned variable and one of *units*, with ASCII digits and powers."""
    plain = _LATEX_SPACE.sub(" ", _WORDS.sub(r"\1", unmarked(text)).replace("{,}", ","))
    plain = unmarked(_VARIABLE.sub("", plain, count=1) if _VARIABLE.match(plain) else plain)
    plain = _SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(_SUPERSCRIPTS), plain)
    plain = "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in plain)
    folded = plain.casefold()
    for unit in units:
        if folded.endswith(unit.casefold()):
            return unmarked(plain[: -len(unit)])
    return plain


def _digits(whole: str) -> int:
    return int(re.sub("[, ]", "", whole))


def _without_a_mark(text: str) -> str:
    """Return *text* without one of the marks around it, if it has one and something is inside."""
    for before, after in _PAIRS:
        if text.startswith(before) and text.endswith(after):
            inner = text[len(before) : -len(after)]
            if inner.strip() and before not in inner and after not in inner:
                return inner
    if (command := _COMMAND.match(text)) and _closing(text, command.end()) == len(text) - 1:
        return text[command.end() : -1]
    if (label := _LABEL.match(text)) and label.end() < len(text):
        return text[label.end() :]
    return text[:-1] if len(text) > 1 and text[-1] == "." and text[-2] != "." else text


def _last(pattern: re.Pattern[str], text: str) -> int:
    """Return the end of the last occurrence of *pattern*, or 0."""
    end = 0
    for found in pattern.finditer(text):
        end = found.end()
    return end


def _closing(text: str, begin: int) -> int:
    """Return the place of the brace that closes a brace opened before *begin*, or the text's length."""
    depth = 1
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
    return len(text)
