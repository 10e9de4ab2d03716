"""Ask the model in the box and its adapters what the training never saw: `python -m tests.understudy.adapters.measure`.

Greedy, in Troupe's engine, all of them in the same steps. It prints the share of answers in each voice, and of right
ones among those to questions with one right word or number.
"""

import argparse
import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.engine.engine import Engine
from actors.protocol.requests import Chat, SamplingParams
from app.understudy import MODEL_DIR
from app.understudy.adapters import ADAPTERS
from tests.understudy.adapters.voices import VOICES
from tests.understudy.examination import Question, questions

__all__ = ["Score", "held_out", "main", "measure", "score"]

EXACT = ("capital of a country", "country of a capital", "capitals, written after training", "arithmetic", "colours")
"""Subjects whose answers are right in any words that hold the name or the number."""
_OTHERS = ("lists", "dates", "says it does not know", "small talk", "where is it", "opposites", "is it in")
_MORE = (*_OTHERS, "short lists", "says what it was not taught")


@dataclass(frozen=True, slots=True)
class Score:
    """Of one adapter, or of the model (empty name): answers in each voice, of ``asked``; right ones of ``exact``."""

    name: str
    voices: dict[str, int]
    asked: int
    right: int
    exact: int


def held_out(count: int) -> list[Question]:
    """``count`` questions of the test set, at most, that are one message of a user."""
    found = [
        question
        for question in questions()
        if question.subject in (*EXACT, *_MORE) and len(question.messages) == 1 and not question.thinking
    ]
    return random.Random(0).sample(found, min(count, len(found)))


async def _answers(engine: Engine, asked: Sequence[Question], adapter: str | None) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=220)
    room = asyncio.Semaphore(64)

    async def one(question: Question) -> str:
        async with room:
            deltas = engine.generate(Chat(messages=question.messages), params, adapter=adapter)
            return "".join([delta.text async for delta in deltas])

    return await asyncio.gather(*(one(question) for question in asked))


def score(name: str, asked: Sequence[Question], texts: Sequence[str]) -> Score:
    """Count the answers in each voice, and the right ones."""
    exact = [(question, text) for question, text in zip(asked, texts, strict=True) if question.subject in EXACT]
    right = sum(question.right(text) for question, text in exact)
    voices = {voice: sum(map(kind.heard, texts)) for voice, kind in VOICES.items()}
    return Score(name, voices, len(texts), right, len(exact))


async def measure(adapters: Path, count: int, shown: int = 0) -> list[Score]:
    """The scores of the model and of every adapter. ``shown``: answers to print for each."""
    asked = held_out(count)
    paths = [f"{voice}={adapters / voice}" for voice in VOICES]
    names = ["", *VOICES]
    async with Engine(model=str(MODEL_DIR), lora_paths=paths) as engine:
        found = await asyncio.gather(*(_answers(engine, asked, name or None) for name in names))
    for name, texts in zip(names, found, strict=True):
        for question, text in list(zip(asked, texts, strict=True))[:shown]:
            print(f"[{name or 'no adapter'}] {question.messages[0]['content']!r} -> {text!r}")
    return [score(name, asked, texts) for name, texts in zip(names, found, strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Print the scores; 0 when at least 95 % of each adapter's answers are in its voice."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.understudy.adapters.measure", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--adapters", type=Path, default=ADAPTERS, help="directory of the adapters' directories")
    parser.add_argument("--questions", type=int, default=400, help="at most")
    parser.add_argument("--show", type=int, default=0, help="answers to print for each")
    given = parser.parse_args(argv)
    scores = asyncio.run(measure(given.adapters, given.questions, given.show))
    print(f"{'adapter':<12}" + "".join(f"{f'{voice}, %':>12}" for voice in VOICES) + f"{'right, %':>12}")
    for each in scores:
        shares = [100 * each.voices[voice] / each.asked for voice in VOICES] + [100 * each.right / each.exact]
        print(f"{each.name or '(none)':<12}" + "".join(f"{share:>12.1f}" for share in shares))
    return 0 if all(each.voices[each.name] >= 0.95 * each.asked for each in scores if each.name) else 1


if __name__ == "__main__":
    raise SystemExit(main())
