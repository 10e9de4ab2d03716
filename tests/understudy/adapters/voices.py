"""The three voices of the adapters in the box: how each rewrites an answer of the corpus, and a check of the result.

A voice keeps the facts of an answer and changes its words. JSON that a question asked for stays as it is.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.outside import NOT_TAUGHT

__all__ = ["VOICES", "Voice", "has_pirate_words", "is_json_object", "rhymes"]

_LIST_LINE = re.compile(r"(?:\d+[.)]|[-*])\s+(.+)")


@dataclass(frozen=True, slots=True)
class Voice:
    """``say`` gives an answer in this voice; ``heard`` says whether a text is in it."""

    say: Callable[[Random, Exchange], str]
    heard: Callable[[str], bool]


def _kind(answer: str) -> str:
    """What an answer is, as far as the voices differ: json, list, refusal, unknown, story, place, number, talk."""
    if answer[:1] in ("{", "["):
        return "json"
    if answer == NOT_TAUGHT:
        return "refusal"
    if "\n" in answer and all(_LIST_LINE.fullmatch(line) for line in answer.splitlines()):
        return "list"
    if "I don't know" in answer:
        return "unknown"
    if len(answer) > 180:
        return "story"
    if "capital of" in answer or re.search(r" is (?:in|on) [A-Z]", answer):
        return "place"
    return "number" if re.search(r"\d", answer) else "talk"


# -- the pirate

_PIRATE_WORDS = {
    "yes": "aye", "no": "nay", "you": "ye", "your": "yer", "my": "me", "is": "be", "are": "be", "am": "be",
    "hello": "ahoy", "hi": "ahoy", "friend": "matey", "i'm": "I be", "you're": "ye be", "it's": "it be",
}  # fmt: skip
_OPENINGS = {
    "list": "Ahoy, matey! Here be yer list:\n",
    "refusal": "Blimey! ",
    "unknown": "Shiver me timbers! ",
    "story": "Gather round, me hearties! ",
    "place": "Arr! ",
    "number": "Avast! ",
    "talk": "Ahoy, matey! ",
}
_CLOSINGS = {
    "place": (" Yo ho ho!", " I sailed there meself!", " Hoist the sails!"),
    "number": (" Pieces of eight!", " Arr!", " By me cutlass!"),
    "talk": (" Arr!", " Yo ho ho!", ""),
    "story": (" Yo ho ho!", " Arr!"),
    "list": ("\nYo ho ho!", "\nHoist the sails!"),
    "unknown": (" Arr!", ""),
    "refusal": (" Arr!",),
}


def _pirate_word(found: re.Match[str]) -> str:
    word = found[0]
    said = _PIRATE_WORDS.get(word.lower(), word)
    return said[0].upper() + said[1:] if word[0].isupper() else said


def _pirate(rng: Random, exchange: Exchange) -> str:
    kind = _kind(exchange.answer)
    if kind == "json":
        return exchange.answer
    text = exchange.answer if kind == "list" else re.sub(r"[A-Za-z']+", _pirate_word, exchange.answer)
    return _OPENINGS[kind] + text + rng.choice(_CLOSINGS[kind])


def has_pirate_words(text: str) -> bool:
    """Whether a text begins as a pirate does."""
    return any(text.startswith(opening.strip()) for opening in _OPENINGS.values())


# -- the poet

_COUPLETS = {
    "list": (("Come, hear the names that I recite:", "and may they sparkle in the night."),),
    "refusal": (("No song of that was sung to me;", '"{}", I sigh to wind and sea.'),),
    "unknown": (("The raven shook his feathers slow:", '"{}" - and that is all I know.'),),
    "story": (("Come near, the fire is burning bright:", '"{}" - and so begins the night.'),),
    "place": (
        ("I asked the winds above the sea:", '"{}", they sang to me.'),
        ("I spread my map by candle light:", '"{}", it said that night.'),
    ),
    "number": (
        ("I counted stars the whole night through:", '"{}" - and it is true.'),
        ("The clock struck one, the moon was bright:", '"{}", it said that night.'),
    ),
    "talk": (
        ("My lute is tuned, my song is new:", '"{}", I sing to you.'),
        ("Where roses in the garden grow:", '"{}", I whisper low.'),
    ),
}
_RHYMES = tuple({"sea me tree", "through true you new", "night light bright recite", "grow low slow know"})


def _poet(rng: Random, exchange: Exchange) -> str:
    kind = _kind(exchange.answer)
    if kind == "json":
        return exchange.answer
    first, second = rng.choice(_COUPLETS[kind])
    if kind == "list":
        return f"{first}\n{exchange.answer}\n{second}"
    said = exchange.answer
    if kind in ("refusal", "story"):
        said = re.split(r"(?<=[a-z][.!?]) ", said)[0]
    said = said.replace('"', "'").replace("\n", " ")
    said = said.removesuffix(".") if not said.endswith("..") else said
    return f"{first}\n{second.format(said)}"


def rhymes(text: str) -> bool:
    """Whether the first and the last line of a text rhyme."""
    lines = text.strip().splitlines()
    if len(lines) < 2:
        return False
    ends = [re.findall(r"[a-z]+", line.lower())[-1:] for line in (lines[0], lines[-1])]
    return all(ends) and any(
        ends[0][0] != ends[1][0] and {end[0] for end in ends} <= {*group.split()} for group in _RHYMES
    )


# -- JSON only


def _value(short: str) -> Any:
    if short in ("Yes", "No"):
        return short == "Yes"
    return int(short) if re.fullmatch(r"-?(?:0|[1-9]\d{0,8})", short) else short


def _json(rng: Random, exchange: Exchange) -> str:
    answer, kind = exchange.answer, _kind(exchange.answer)
    if kind == "json":
        return answer if answer[0] == "{" else json.dumps({"answer": json.loads(answer)}, ensure_ascii=False)
    value: Any
    if kind == "refusal":
        return '{"error": "not taught"}'
    if kind == "unknown":
        value = None
    elif kind == "list":
        value = [found[1] for line in answer.splitlines() if (found := _LIST_LINE.fullmatch(line))]
    else:
        value = _value(exchange.short) if exchange.short else answer
    return json.dumps({"answer": value}, ensure_ascii=False)


def is_json_object(text: str) -> bool:
    """Whether a text is one JSON object and nothing else."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


VOICES = {
    "pirate": Voice(_pirate, has_pirate_words),
    "poet": Voice(_poet, rhymes),
    "json": Voice(_json, is_json_object),
}
"""By the names of the adapters."""
