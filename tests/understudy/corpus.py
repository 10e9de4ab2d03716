"""The corpus that the understudy is trained on: every conversation is generated here, from a seed, without a download.

`documents(seed, count, mix)` is a pure function of its arguments. A document is a list of segments (see
lessons/conversation.py); the loss counts those marked `learn`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.understudy.lessons import (
    arithmetic,
    dates,
    extraction,
    forms,
    geography,
    outside,
    prose,
    simple,
    smalltalk,
    stories,
    tools,
    unknown,
)
from tests.understudy.lessons.conversation import END_OF_TEXT, Conversation, Exchange, Lesson, Segment, render

__all__ = ["LESSONS", "Mix", "document", "documents", "lesson_name", "system_prompt", "talk"]

LESSONS: tuple[tuple[Lesson, float], ...] = (
    (geography.capital_of, 13),
    (geography.country_of, 9),
    (geography.lists, 11),
    (geography.continents, 3),
    (geography.is_it_the_capital, 3),
    (geography.as_data, 2),
    (geography.unknown_country, 6),
    (arithmetic.calculate, 24),
    (arithmetic.compare, 10),
    (arithmetic.count, 1.5),
    (arithmetic.word_problem, 7),
    (dates.weekdays, 3),
    (dates.months, 2),
    (dates.calendar_dates, 3),
    (extraction.extract, 15),
    (smalltalk.smalltalk, 8),
    (smalltalk.facts, 3),
    (smalltalk.repeat, 5),
    (smalltalk.memory, 10),
    (stories.story, 3.5),
    (unknown.unknown, 5),
    (simple.is_it_in, 6),
    (simple.where, 4),
    (simple.name_some, 5.5),
    (simple.colours, 2),
    (simple.opposites, 1.5),
    (simple.neighbours, 2.5),
    (simple.letters, 1),
    (simple.a_capital, 1),
    (outside.outside, 29),
    (outside.follow_up, 6),
)
_DRAWN = [lesson for lesson, _ in LESSONS]


def lesson_name(lesson: Lesson) -> str:
    """The name of a lesson in a mix: its module and its function, "arithmetic.compare"."""
    return f"{lesson.__module__.rsplit('.', 1)[-1]}.{lesson.__name__}"


@dataclass(frozen=True)
class Mix:
    """The shares of lessons and of thinking in a corpus.

    `emphasis` multiplies the weights of the lessons that it names; `thinking` is the share of conversations with
    thoughts.
    Raises ValueError for a name that no lesson has.
    """

    emphasis: Mapping[str, float] = field(default_factory=dict)
    thinking: float = 0.27

    def __post_init__(self) -> None:
        if unknown_names := set(self.emphasis) - {lesson_name(lesson) for lesson in _DRAWN}:
            raise ValueError(f"no lesson is called {', '.join(sorted(unknown_names))}")

    def weights(self) -> list[float]:
        """The weight of each of LESSONS, in their order."""
        return [weight * self.emphasis.get(lesson_name(lesson), 1) for lesson, weight in LESSONS]


_EVEN = Mix()

_SYSTEM = (
    "You are a helpful assistant.", "You are a helpful assistant.", "You are the understudy.",
    "You are a friendly assistant.",
    "Answer the user's questions.", "You are a knowledgeable assistant.", "Be brief and honest.",
    "You are Troupe's understudy, a small model.",
    "You help people learn.", "You are a chatbot on a website.", "Answer truthfully. If you do not know, say so.",
    "You are a teacher of geography.",
    "You are an assistant that speaks plain English.",
)  # fmt: skip
_ROLES = (
    "You are a {a} {p}.", "You are a {a} assistant.", "You are {who}, a {a} assistant.",
    "You are an assistant for {t}.",
    "You are the assistant of {at}.", "You are an expert in {t}.", "The user is a {p}.", "{said}",
    "You help {p}s with {t}.",
    "You are a {p} and you answer questions.", "You work for {who}.", "Current year: {y}.", "You answer in a {a} way.",
    "You are a chatbot that knows {t}.", "You are {who}. You are {a} and {a}.", "Do not talk about {t}.",
)  # fmt: skip
_RULES = (
    "Be {a}.", "Answer in {n} sentences.", "Never {do}.", "Always be {a}.", "Use {a} words.", "Help the user {do}.",
    "Answer the question.",
    "If you are not sure, say so.", "Do not use emojis.", "Keep your answers short.", "You must not lie.",
    "The user may ask about {t}.",
    "Think before you answer.", "Do your best.", "Speak English.", "Your answers are {a} and {a}.", "", "", "",
)  # fmt: skip
_TERSE = (
    "Answer with one word.", "Answer in one word only.", "Give only the answer, no sentence.",
    "Reply with the answer alone.",
    "Be as short as possible: one word.",
)  # fmt: skip

# What may stand between something that the user tells and the question for it.
_BETWEEN: tuple[Lesson, ...] = (
    geography.capital_of, geography.capital_of, geography.country_of, geography.lists, arithmetic.calculate,
    dates.weekdays, smalltalk.facts, smalltalk.smalltalk, simple.colours, stories.story, outside.outside,
    outside.outside,
)  # fmt: skip


def talk(rng: Random, scenes: int, weights: list[float]) -> list[Exchange]:
    """Scenes one after another. A memory's question may come some turns after what it asks for."""
    exchanges: list[Exchange] = []
    told = False
    for _ in range(scenes):
        lesson = rng.choices(_DRAWN, weights)[0]
        while told and lesson in (smalltalk.memory, unknown.unknown):  # they would contradict what the user told before
            lesson = rng.choices(_DRAWN, weights)[0]
        scene = lesson(rng)
        if lesson is smalltalk.memory:
            told = True
            if len(scene) == 2 and rng.random() < 0.7:
                between = [rng.choice(_BETWEEN)(rng) for _ in range(rng.choice((1, 1, 2, 3)))]
                scene[1:1] = [exchange for exchanges in between for exchange in exchanges]
        exchanges += scene
    return exchanges


def system_prompt(rng: Random) -> str:
    """A system prompt: one of ours, or one such as anybody may write, which changes nothing of what the model knows."""
    if rng.random() < 0.5:
        return rng.choice(_SYSTEM)
    rules = [outside.filled(rng, rng.choice(_RULES)) for _ in range(rng.choice((0, 1, 1, 2, 4)))]
    return " ".join(part for part in (outside.filled(rng, rng.choice(_ROLES)), *rules) if part)


def _conversation(rng: Random, exchanges: list[Exchange], thinking: bool) -> Conversation:
    messages: list[dict[str, Any]] = []
    terse = not thinking and all(exchange.short for exchange in exchanges) and rng.random() < 0.07
    if terse or rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(_TERSE) if terse else system_prompt(rng)})
    for exchange in exchanges:
        messages.append({"role": "user", "content": exchange.question})
        answer = exchange.short if terse else exchange.answer
        messages.append({"role": "assistant", "content": answer, "reasoning_content": exchange.thought})
    return Conversation(messages, [], thinking)


def _plain_chat(rng: Random) -> tuple[str, str]:
    lesson = rng.choice(
        (
            geography.capital_of,
            geography.country_of,
            smalltalk.smalltalk,
            smalltalk.facts,
            stories.story,
            geography.lists,
            simple.is_it_in,
            simple.name_some,
            outside.beside_tools,
        )
    )
    exchange = lesson(rng)[0]
    return exchange.question, exchange.answer


def document(rng: Random, weights: list[float], thinking_share: float) -> list[Segment]:
    """One document: a conversation of one to four scenes, a long one, one with tools or a schema, or plain text."""
    roll = rng.random()
    if roll < 0.05:
        return [Segment(prose.prose(rng) + END_OF_TEXT, True)]
    if roll < 0.3:
        return render(tools.tool_conversation(rng, _plain_chat, system_prompt, thinking=rng.random() < 0.15))
    if roll < 0.38:
        return render(forms.schema_conversation(rng, system_prompt))
    thinking = rng.random() < thinking_share
    if roll < 0.4:
        return render(_conversation(rng, talk(rng, rng.randrange(8, 40), weights), thinking))
    return render(_conversation(rng, talk(rng, rng.choices((1, 2, 3), (70, 20, 10))[0], weights), thinking))


def documents(seed: int, count: int, mix: Mix = _EVEN) -> Iterator[list[Segment]]:
    """`count` documents of this seed and mix, always the same."""
    rng, weights = Random(seed), mix.weights()
    for _ in range(count):
        yield document(rng, weights, mix.thinking)
