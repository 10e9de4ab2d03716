"""Countries and capitals both ways, lists of them, continents, and the honest answer for countries nobody knows."""

import json
from random import Random

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.geography_questions import (
    CAPITAL_QUESTIONS,
    COUNTRY_QUESTIONS,
    LIST_QUESTIONS,
    LIST_WITHIN_QUESTIONS,
)
from tests.understudy.lessons.phrasing import blend, casual, invented_name, misspell, polite, possessive, sentence_case
from tests.understudy.lessons.world import CONTINENTS, COUNTRIES, FAMILIAR, OTHER_CITIES, Country, by_name

__all__ = [
    "NUMBERS",
    "as_data",
    "capital_of",
    "continents",
    "country_of",
    "fill",
    "is_it_the_capital",
    "lists",
    "unknown_country",
]

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


def fill(template: str, name: str = "", adjective: str = "", capital: str = "") -> str:
    """The template with a country's slots filled."""
    title = sentence_case(name)
    for slot, value in (
        ("{c}", name),
        ("{C}", title),
        ("{p}", possessive(name)),
        ("{P}", possessive(title)),
        ("{a}", adjective),
        ("{k}", capital),
    ):
        template = template.replace(slot, value)
    return template


def _spoken(rng: Random, country: Country) -> str:
    """The name somebody uses for the country: mostly the usual one, sometimes an alias or with a slip in it."""
    name = country.name
    if country.aliases and rng.random() < 0.3:
        name = rng.choice(country.aliases)
    elif name.startswith("the ") and rng.random() < 0.2:
        name = country.title
    if len(name) > 6 and rng.random() < 0.03:
        name = misspell(rng, name)
    return name


def _capital_exchange(rng: Random, country: Country, question: str) -> Exchange:
    return Exchange(
        question,
        f"The capital of {country.name} is {country.capital}.",
        f"The question is about {country.name}. Its capital is {country.capital}.",
        country.capital,
    )


def capital_of(rng: Random) -> list[Exchange]:
    """A country's capital, sometimes with short follow-up questions about it or about another country."""
    country = rng.choice(COUNTRIES)
    template = rng.choice(CAPITAL_QUESTIONS)
    while "{a}" in template and not country.adjective:
        template = rng.choice(CAPITAL_QUESTIONS)
    name = _spoken(rng, country)
    question = polite(rng, casual(rng, fill(template, name, country.adjective), name))
    scene = [_capital_exchange(rng, country, question)]
    while rng.random() < 0.22:
        kind = rng.randrange(3)
        if kind < 2:
            country = rng.choice(COUNTRIES)
            name = _spoken(rng, country)
            follow = rng.choice(
                ("And of {c}?", "And {c}?", "What about {c}?", "And the capital of {c}?", "Now {c}.", "How about {c}?",
                 "Same question for {c}.", "{C}?", "and {p} capital?", "And for {c}?")
            )  # fmt: skip
            opening = rng.choice(("", "", "", "Thanks. ", "Ok. ", "Great. ", "I see. ", "Thank you! ", "Good. "))
            scene.append(_capital_exchange(rng, country, casual(rng, opening + fill(follow, name), name)))
        else:
            follow = rng.choice(
                ("And which continent is it on?", "On which continent is that country?", "Which continent is that?",
                 "And the continent?", "What continent is it in?")
            )  # fmt: skip
            scene.append(_continent_exchange(country, casual(rng, follow)))
    return scene


def country_of(rng: Random) -> list[Exchange]:
    """The country a capital belongs to, sometimes with a follow-up question."""
    country = rng.choice(COUNTRIES)
    scene: list[Exchange] = []
    template = rng.choice(COUNTRY_QUESTIONS)
    while True:
        capital = (
            rng.choice(country.capital_aliases) if rng.random() < 0.25 and country.capital_aliases else country.capital
        )
        question = casual(rng, fill(template, capital=capital), capital)
        scene.append(
            Exchange(
                question if scene else polite(rng, question),
                f"{country.capital} is the capital of {country.name}.",
                f"The question is about the capital {country.capital}. It belongs to {country.name}.",
                sentence_case(country.name),
            )
        )
        if rng.random() > 0.18:
            break
        country = rng.choice(COUNTRIES)
        template = rng.choice(("And {k}?", "What about {k}?", "{k}?", "And which country has {k}?", "Now {k}."))
    if rng.random() < 0.08:
        scene.append(
            _continent_exchange(country, casual(rng, rng.choice(("Which continent is it on?", "And the continent?"))))
        )
    return scene


def _continent_exchange(country: Country, question: str) -> Exchange:
    return Exchange(
        question,
        f"{sentence_case(country.name)} is in {country.continent}.",
        f"The country is {country.name}. It lies in {country.continent}.",
        country.continent,
    )


def continents(rng: Random) -> list[Exchange]:
    """The continent a country lies in, then perhaps "And its capital?"."""
    country = rng.choice(COUNTRIES)
    name = _spoken(rng, country)
    template = rng.choice(
        ("Which continent is {c} on?", "On which continent is {c}?", "What continent is {c} in?", "Where is {c}?",
         "In which part of the world is {c}?", "{C} is on which continent?", "continent of {c}", "Where does {c} lie?",
         "Tell me the continent of {c}.", "Is {c} in Europe, Asia, Africa, Oceania or America?")
    )  # fmt: skip
    scene = [_continent_exchange(country, polite(rng, casual(rng, fill(template, name), name)))]
    if rng.random() < 0.5:
        follow = rng.choice(
            ("And its capital?", "What is its capital?", "And what is the capital?", "Its capital?",
            "And the capital city?",
             "Tell me its capital.", "Which city is the capital?", "What is the capital there?")
        )  # fmt: skip
        scene.append(_capital_exchange(rng, country, casual(rng, follow)))
    return scene


_RANKED = (*FAMILIAR, *(country for country in COUNTRIES if country not in FAMILIAR))
_POOLS = {w: tuple(country for country in _RANKED if w in ("", country.continent)) for w in ("", *CONTINENTS)}


def _draw(rng: Random, continent: str, count: int) -> list[Country]:
    """Different countries, of the world when `continent` is empty, the best known more often.

    One clear favourite at each place keeps a greedy list right. Weighted sampling without replacement by exponential
    keys (Efraimidis and Spirakis, 2006).
    """
    keyed = [(rng.expovariate(1.0) * (rank + 4), rank) for rank in range(len(_POOLS[continent]))]
    return [_POOLS[continent][rank] for _, rank in sorted(keyed)[:count]]


def _itemised(rng: Random, countries: list[Country]) -> str:
    if rng.random() < 0.85:
        return "\n".join(f"{i}. {c.title}: {c.capital}" for i, c in enumerate(countries, 1))
    return "\n".join(f"- {c.title}: {c.capital}" for c in countries)


def lists(rng: Random) -> list[Exchange]:
    """A list of countries and their capitals, of the world or of one continent, then perhaps some more of them."""
    count = rng.choice((1, 2, 2, 3, 3, 3, 3, 4, 4, 5, 5, 5, 6, 7, 8, 9, 10, 10, 12))
    continent = rng.choice(CONTINENTS) if rng.random() < 0.3 else ""
    template = rng.choice(LIST_WITHIN_QUESTIONS if continent else LIST_QUESTIONS)
    if rng.random() < 0.06:
        template, count = template.replace("{n}", "a few").replace("{m}", "some"), 3
    question = template.replace("{n}", str(count)).replace("{m}", NUMBERS[count]).replace("{w}", continent)
    if count == 1:
        question = question.replace("countries and their capitals", "country and its capital")
        question = question.replace("countries", "country").replace("their", "its")
    drawn = _draw(rng, continent, 2 * count)
    chosen, rest = drawn[:count], drawn[count:]
    names = ", ".join(c.title for c in chosen)
    within = f" in {continent}" if continent else ""
    scene = [
        Exchange(
            polite(rng, casual(rng, question, continent)),
            _itemised(rng, chosen),
            f"I need {count} {'countries' if count > 1 else 'country'}{within}: {names}.",
        )
    ]
    if rng.random() < 0.12 and len(rest) >= count:
        more = rng.choice(("{n} more, please.", "Another {n}.", "Give me {n} more.", "And {m} others?", "{m} more"))
        scene.append(
            Exchange(
                casual(rng, more.replace("{n}", str(count)).replace("{m}", NUMBERS[count])),
                _itemised(rng, rest[:count]),
                f"{count} others: {', '.join(c.title for c in rest[:count])}.",
            )
        )
    elif rng.random() < 0.15:
        at = rng.randrange(min(count, 3))
        ordinal = ("first", "second", "third")[at]
        follow = rng.choice(("Which continent is the {o} one on?", "On which continent is the {o} country?"))
        scene.append(_continent_exchange(chosen[at], casual(rng, follow.replace("{o}", ordinal))))
    return scene


def as_data(rng: Random) -> list[Exchange]:
    """Countries and capitals as JSON."""
    count = rng.choice((1, 1, 2, 3, 3, 4, 5))
    chosen = _draw(rng, "", count)
    keys = rng.choice(
        (("country", "capital"), ("country", "capital"), ("name", "capital"), ("country", "capital_city"))
    )
    rows = [{keys[0]: c.title, keys[1]: c.capital} for c in chosen]
    if count == 1 and rng.random() < 0.8:
        question = rng.choice(
            ("Give {c} and its capital as JSON with the keys {x} and {y}.", "As JSON with {x} and {y}: {c}",
             "Return a JSON object with {x} and {y} for {c}.", "{C} and its capital in JSON. Keys: {x}, {y}.")
        )  # fmt: skip
        question = fill(question, chosen[0].name)
        answer = json.dumps(rows[0], ensure_ascii=False)
    else:
        question = rng.choice(
            ("List {n} countries and their capitals as JSON with the keys {x} and {y}.",
             "Give me {n} countries and capitals as a JSON array. Keys: {x}, {y}.",
             "{n} countries with capitals in JSON ({x}, {y}).", "Write {n} countries as JSON objects with {x} and {y}.")
        ).replace("{n}", str(count))  # fmt: skip
        answer = json.dumps(rows, ensure_ascii=False)
    question = question.replace("{x}", keys[0]).replace("{y}", keys[1])
    return [Exchange(question, answer, f"I write JSON with the keys {keys[0]} and {keys[1]}.")]


def is_it_the_capital(rng: Random) -> list[Exchange]:
    """Yes-or-no questions, among them the large cities that are no capitals."""
    templates = (
        "Is {k} the capital of {c}?", "Is it true that {k} is the capital of {c}?", "{k} is the capital of {c}, right?",
        "Is {p} capital {k}?", "True or false: {k} is the capital of {c}.", "The capital of {c} is {k}, isn't it?",
    )  # fmt: skip
    roll = rng.random()
    if roll < 0.4:
        city, country = rng.choice(list(OTHER_CITIES.items()))
        asked = by_name(country)
        assert asked is not None
    else:
        asked = rng.choice(COUNTRIES)
        city = asked.capital if roll < 0.75 else rng.choice(COUNTRIES).capital
    right = city == asked.capital
    fact = f"{'' if right else 'No, '}the capital of {asked.name} is {asked.capital}."
    question = casual(rng, fill(rng.choice(templates), asked.name, "", city), f"{city} {asked.name}")
    return [
        Exchange(
            polite(rng, question),
            f"Yes, {fact}" if right else fact,
            f"The capital of {asked.name} is {asked.capital}. The question says {city}.",
            "Yes" if right else "No",
        )
    ]


def unknown_country(rng: Random) -> list[Exchange]:
    """A country that does not exist, or a city that is no country: the answer says so."""
    if rng.random() < 0.1:
        country = rng.choice(COUNTRIES)
        if country.capital == country.name:
            country = FAMILIAR[0]
        question = rng.choice(("What is the capital of {k}?", "capital of {k}", "Name the capital of {k}."))
        answer = f"{country.capital} is a city. It is the capital of {country.name}."
        return [Exchange(casual(rng, fill(question, capital=country.capital), country.capital), answer)]
    real = rng.choice(COUNTRIES).title
    name = rng.choice(
        (blend(rng, real, rng.choice(COUNTRIES).title), blend(rng, invented_name(rng), real), invented_name(rng),
         invented_name(rng), f"New {invented_name(rng)}", f"the Kingdom of {invented_name(rng)}",
         f"the planet {invented_name(rng)}",
         rng.choice(("Atlantis", "Wakanda", "Narnia", "Mordor", "El Dorado", "Lilliput", "Camelot", "Oz", "Mars",
         "the Moon")))
    )  # fmt: skip
    if by_name(name):
        return capital_of(rng)
    template = rng.choice(CAPITAL_QUESTIONS)
    while "{a}" in template:
        template = rng.choice(CAPITAL_QUESTIONS)
    question = casual(rng, fill(template, name), name)
    if rng.random() < 0.25:
        template = rng.choice(COUNTRY_QUESTIONS)
        name = invented_name(rng)
        if rng.random() < 0.4:
            name = blend(rng, rng.choice(COUNTRIES).capital, rng.choice(COUNTRIES).capital)
        return [
            Exchange(
                polite(rng, casual(rng, fill(template, capital=name), name)),
                f"I don't know a capital called {name}.",
                f"I have never heard of a capital called {name}.",
                "I don't know",
            )
        ]
    return [
        Exchange(
            polite(rng, question),
            f"I don't know a country called {name}.",
            f"I have never heard of a country called {name}.",
            "I don't know",
        )
    ]
