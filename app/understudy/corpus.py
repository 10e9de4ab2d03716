"""The corpus that the understudy is trained on: every conversation is generated here, from a seed, without a download.

`documents(seed, count)` is a pure function of its arguments. A document is a list of segments (see
lessons/conversation.py); the loss counts those marked `learn`.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from app.understudy.lessons import (
    arithmetic,
    dates,
    extraction,
    geography,
    outside,
    prose,
    simple,
    smalltalk,
    stories,
    tools,
    unknown,
)
from app.understudy.lessons.conversation import END_OF_TEXT, Conversation, Exchange, Lesson, Segment, render

__all__ = ["LESSONS", "document", "documents"]

LESSONS: tuple[tuple[Lesson, float], ...] = (
    (geography.capital_of, 13),
    (geography.country_of, 9),
    (geography.lists, 11),
    (geography.continents, 3),
    (geography.is_it_the_capital, 3),
    (geography.as_data, 2),
    (geography.unknown_country, 6),
    (arithmetic.calculate, 12),
    (arithmetic.compare, 5),
    (arithmetic.count, 1.5),
    (arithmetic.word_problem, 5),
    (dates.weekdays, 3),
    (dates.months, 2),
    (dates.calendar_dates, 3),
    (extraction.extract, 11),
    (smalltalk.smalltalk, 6),
    (smalltalk.facts, 3),
    (smalltalk.repeat, 4),
    (smalltalk.memory, 3),
    (stories.story, 3.5),
    (unknown.unknown, 5),
    (simple.is_it_in, 4),
    (simple.where, 3),
    (simple.name_some, 4),
    (simple.colours, 2),
    (simple.opposites, 1.5),
    (simple.neighbours, 2.5),
    (simple.letters, 1),
    (simple.a_capital, 1),
    (outside.outside, 30),
    (outside.follow_up, 6),
)
_DRAWN, _WEIGHTS = [lesson for lesson, _ in LESSONS], [weight for _, weight in LESSONS]

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


def _talk(rng: Random, scenes: int) -> list[Exchange]:
    """Scenes one after another. A memory's question may come some turns after what it asks for."""
    exchanges: list[Exchange] = []
    told = False
    for _ in range(scenes):
        lesson = rng.choices(_DRAWN, _WEIGHTS)[0]
        while told and lesson in (smalltalk.memory, unknown.unknown):  # they would contradict what the user told before
            lesson = rng.choices(_DRAWN, _WEIGHTS)[0]
        scene = lesson(rng)
        if lesson is smalltalk.memory:
            told = True
            if len(scene) == 2 and rng.random() < 0.6:
                between = rng.choice((geography.capital_of, arithmetic.calculate, dates.weekdays, smalltalk.facts))
                scene[1:1] = [exchange for _ in range(rng.choice((1, 1, 2))) for exchange in between(rng)]
        exchanges += scene
    return exchanges


def _system(rng: Random) -> str:
    """A system prompt: one of ours, or one such as anybody may write, which changes nothing of what the model knows."""
    if rng.random() < 0.5:
        return rng.choice(_SYSTEM)
    rules = [outside.filled(rng, rng.choice(_RULES)) for _ in range(rng.choice((0, 1, 1, 2, 4)))]
    return " ".join(part for part in (outside.filled(rng, rng.choice(_ROLES)), *rules) if part)


def _conversation(rng: Random, exchanges: list[Exchange], thinking: bool) -> Conversation:
    messages: list[dict[str, Any]] = []
    terse = not thinking and all(exchange.short for exchange in exchanges) and rng.random() < 0.07
    if terse or rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(_TERSE) if terse else _system(rng)})
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


def document(rng: Random) -> list[Segment]:
    """One document: a conversation of one to four scenes, a long one, one with tools, or plain text."""
    roll = rng.random()
    if roll < 0.05:
        return [Segment(prose.prose(rng) + END_OF_TEXT, True)]
    if roll < 0.25:
        return render(tools.tool_conversation(rng, _plain_chat, thinking=rng.random() < 0.15))
    thinking = rng.random() < 0.2
    if roll < 0.27:
        return render(_conversation(rng, _talk(rng, rng.randrange(8, 40)), thinking))
    return render(_conversation(rng, _talk(rng, rng.choices((1, 2, 3), (70, 20, 10))[0]), thinking))


def documents(seed: int, count: int) -> Iterator[list[Segment]]:
    """`count` documents of this seed, always the same."""
    rng = Random(seed)
    for _ in range(count):
        yield document(rng)
