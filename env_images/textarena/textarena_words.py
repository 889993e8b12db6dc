"""English words for the games that need some, in place of the corpora that these games download.

Four games ask the package nltk for its word lists, which are a download, and for the kind of a word. Their modules get
the lists of the package `wonderwords` instead: nouns where they ask for basic words, and nouns, verbs and adjectives
where they ask for all. Guesses are looked up in TextArena's own spelling dictionaries, which are part of its package,
and in these words.
"""

from __future__ import annotations

import sys
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import resources
from types import ModuleType
from typing import Any

from envserver.textarena import game_module

DICTIONARY = "textarena.envs.utils.word_lists"


@cache
def word_list(kind: str) -> tuple[str, ...]:
    """Return the words of a list of `wonderwords`: those of small letters alone, in order, each once."""
    text = resources.files("wonderwords.assets").joinpath(f"{kind}list.txt").read_text("utf-8")
    return tuple(sorted({word for word in text.split() if word.isascii() and word.isalpha() and word.islower()}))


def words(name: str = "en") -> list[str]:
    """Return nouns for `en-basic`, else all words, as nltk's corpus `words` returns its lists."""
    if name == "en-basic":
        return list(word_list("noun"))
    return sorted({*word_list("noun"), *word_list("verb"), *word_list("adjective")})


def word_module(folder: str) -> Any:
    """Import the game in *folder*, which needs words, as `game_module` does.

    Raises:
        ImportError: TextArena or wonderwords is not installed, or the game is not in its place.
    """
    with _words_for_nltk():
        module: Any = game_module(folder)
    if hasattr(module, "EnglishDictionary"):
        module.EnglishDictionary = _dictionary  # one for all games: to read it takes two seconds and 30 MiB
    if folder == "WordLadder":
        module.WordLadderEnv._find_valid_pairs = _ladders
        find = cache(module.WordLadderEnv._build_neighbor_map)
        module.WordLadderEnv._build_neighbor_map = staticmethod(lambda spelled: find(tuple(spelled)))
    return module


@cache
def _dictionary(**options: bool) -> Any:
    lists: Any = sys.modules[DICTIONARY]
    lists._parse_condition = cache(lists._parse_condition)  # a hundred rules, read anew for each of 100,000 words
    dictionary = lists.EnglishDictionary(**options)
    words_of_all = dictionary.get_all_words()
    dictionary.get_all_words = lambda: words_of_all
    return dictionary


class Ladders(Sequence[tuple[str, str, None]]):
    """The pairs of words whose distance in steps is within two bounds, in the order in which the library lists them."""

    def __init__(self, spelled: Sequence[str], places: Sequence[int]) -> None:
        self._spelled = spelled
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        start, target = divmod(self._places[index], len(self._spelled))
        return self._spelled[start], self._spelled[target], None


def _ladders(_: Any, neighbours: Mapping[str, Sequence[str]], least: int, most: int) -> Ladders:
    """Find the same pairs as the library, which keeps a list of words for each of up to 400,000 and takes 4 s."""
    spelled = tuple(neighbours)
    number = {word: place for place, word in enumerate(spelled)}
    return _pairs(spelled, tuple(tuple(number[word] for word in beside) for beside in neighbours.values()), least, most)


@lru_cache(maxsize=64)
def _pairs(spelled: tuple[str, ...], beside: tuple[tuple[int, ...], ...], least: int, most: int) -> Ladders:
    places = array("I")
    for start in range(len(spelled)):
        steps = {start: 0}
        waiting = deque([start])
        while waiting:
            here = waiting.popleft()
            if least <= steps[here] and here != start:
                places.append(start * len(spelled) + here)
            if steps[here] < most:
                for word in beside[here]:
                    if word not in steps:
                        steps[word] = steps[here] + 1
                        waiting.append(word)
    return Ladders(spelled, places)


@contextmanager
def _words_for_nltk() -> Iterator[None]:
    """Let imports in the block find the lists above under the name nltk; a real nltk stays what it is for others."""
    corpus: Any = ModuleType("nltk.corpus")
    corpus.words = ModuleType("nltk.corpus.words")
    corpus.words.words = words
    nltk: Any = ModuleType("nltk")
    nltk.corpus, nltk.download, nltk.pos_tag = corpus, lambda *_, **__: True, _kinds
    replaced = {"nltk": nltk, "nltk.corpus": corpus}
    before = {name: sys.modules.get(name) for name in replaced}
    sys.modules.update(replaced)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def _kinds(tokens: list[str]) -> list[tuple[str, str]]:
    """Return each token with the tag of a noun, or of another word, as nltk's `pos_tag` does."""
    return [(token, "NN" if token in _nouns() else "JJ") for token in tokens]


@cache
def _nouns() -> frozenset[str]:
    return frozenset(word_list("noun"))
