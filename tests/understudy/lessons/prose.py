"""Plain text without turns, for /v1/completions: facts in sentences, little stories, sums, lists."""

from random import Random

from tests.understudy.lessons.geography import fill
from tests.understudy.lessons.phrasing import pick_name, sentence_case
from tests.understudy.lessons.stories import tell
from tests.understudy.lessons.world import CONTINENTS, COUNTRIES

__all__ = ["prose"]

_SENTENCES = (
    "The capital of {c} is {k}.", "The capital of {c} is {k}.", "{k} is the capital of {c}.",
    "The capital city of {c} is {k}.",
    "{C} has the capital {k}.", "{P} capital is {k}.", "In {c}, the capital is {k}.", "{C}: {k}.",
)  # fmt: skip


def prose(rng: Random) -> str:
    """One piece of plain text."""
    kind = rng.randrange(6)
    if kind <= 1:
        lines = []
        for _ in range(rng.randrange(1, 6)):
            country = rng.choice(COUNTRIES)
            lines.append(fill(rng.choice(_SENTENCES), country.name, country.adjective, country.capital))
            if rng.random() < 0.2:
                lines.append(f"{sentence_case(country.name)} is in {country.continent}.")
        return " ".join(lines)
    if kind == 2:
        return tell(
            rng,
            rng.choice(("fox", "mouse", "bear", "owl", "girl", "boy", "robot", "sailor", "knight", "cat")),
            pick_name(rng),
        )
    if kind == 3:
        pairs = [(rng.randrange(100), rng.randrange(100)) for _ in range(rng.randrange(1, 7))]
        return rng.choice((" ", "\n")).join(f"{a} + {b} = {a + b}{rng.choice(('.', ''))}" for a, b in pairs)
    if kind == 4:
        continent = rng.choice(CONTINENTS)
        chosen = rng.sample([c for c in COUNTRIES if c.continent == continent], 4)
        return f"Some countries in {continent} are {', '.join(c.name for c in chosen[:3])} and {chosen[3].name}."
    chosen = rng.sample(COUNTRIES, rng.randrange(3, 9))
    return "Countries and their capitals:\n" + "\n".join(
        f"{i}. {sentence_case(c.name)}: {c.capital}" for i, c in enumerate(chosen, 1)
    )
