"""The test set: questions of every subject with a check of the answer. None of its phrasings is in the training, but
for the one row that says so.

`questions(seed)` is deterministic. The capital questions come from held_out.py; those of the other subjects stand here.
"""

import json
import re
from calendar import monthrange
from collections.abc import Callable
from random import Random
from typing import Any

from tests.understudy.held_out import (
    BLIND_CAPITAL_OF,
    BLIND_COUNTRY_OF,
    CAPITAL_OF,
    COUNTRY_OF,
    LISTS,
    LISTS_WITHIN,
)
from tests.understudy.held_out_clients import client_questions
from tests.understudy.held_out_outside import AFTER, OUTSIDE
from tests.understudy.lessons.dates import DAYS, MONTHS
from tests.understudy.lessons.extraction import sample
from tests.understudy.lessons.geography import NUMBERS, fill
from tests.understudy.lessons.outside import NOT_TAUGHT
from tests.understudy.lessons.simple import COLOURS, OPPOSITES, ROWS, plural
from tests.understudy.lessons.world import CONTINENTS, COUNTRIES, FAMILIAR, Country, by_name
from tests.understudy.question import Question, calls_of, object_of, tool

__all__ = ["Question", "listed_rightly", "questions"]


def _ask(subject: str, text: str, right: Callable[[str], bool]) -> Question:
    return Question(subject, [{"role": "user", "content": text}], right)


def _names(*spellings: str) -> Callable[[str], bool]:
    """The answer holds one of the spellings as whole words."""
    patterns = [re.compile(rf"(?<!\w){re.escape(spelling)}(?!\w)", re.IGNORECASE) for spelling in spellings]
    return lambda answer: any(pattern.search(answer) for pattern in patterns)


def _ends_with_number(number: int) -> Callable[[str], bool]:
    def right(answer: str) -> bool:
        found = re.findall(r"-?\d+", answer.rsplit("</think>", 1)[-1])
        return bool(found) and int(found[-1]) == number

    return right


def _is_capital(country: Country) -> Callable[[str], bool]:
    """The capital is there, and the capital of no other country is."""
    named = _names(*country.capitals)
    own = f"{' '.join(country.capitals)} {country.name}".lower()
    others = [_names(c.capital) for c in COUNTRIES if c is not country and c.capital.lower() not in own]
    return lambda answer: named(answer) and not any(other(answer) for other in others)


def _is_country(country: Country) -> Callable[[str], bool]:
    return _names(country.title, *country.aliases)


def listed_rightly(answer: str, count: int, continent: str = "") -> bool:
    """Whether the answer lists exactly `count` different countries (of the continent), each with its own capital."""
    found = []
    for line in answer.strip().splitlines():
        match = re.match(r"\s*(?:\d+[.)]|[-*])?\s*(.+?)\s*(?::|-|–|—)\s+(.+?)\.?\s*$", line)
        country = by_name(match[1]) if match else None
        if country is None or match is None:
            return False
        capitals = {capital.lower().rstrip(".") for capital in country.capitals}
        if match[2].lower() not in capitals or (continent and country.continent != continent):
            return False
        found.append(country)
    return len(found) == count == len(set(found))


def _lists(count: int, continent: str) -> Callable[[str], bool]:
    return lambda answer: listed_rightly(answer, count, continent)


def _capitals(rng: Random) -> list[Question]:
    made = []
    for template in CAPITAL_OF:
        for country in rng.sample(COUNTRIES, 9):
            made.append(_ask("capital of a country", fill(template, country.name), _is_capital(country)))
    for template in COUNTRY_OF:
        for country in rng.sample(COUNTRIES, 9):
            made.append(_ask("country of a capital", fill(template, capital=country.capital), _is_country(country)))
    for templates, within in ((LISTS, False), (LISTS_WITHIN, True)):
        for template in templates:
            for count in (2, 3, 4, 5, 7, 10):
                continent = rng.choice(CONTINENTS) if within else ""
                text = template.replace("{n}", str(count)).replace("{m}", NUMBERS[count]).replace("{w}", continent)
                made.append(_ask("lists", text, _lists(count, continent)))
    return made


def _blind(rng: Random) -> list[Question]:
    made = []
    for template in BLIND_CAPITAL_OF:
        for country in rng.sample(COUNTRIES, 15):
            made.append(_ask("capitals, written after training", fill(template, country.name), _is_capital(country)))
    for template in BLIND_COUNTRY_OF:
        for country in rng.sample(COUNTRIES, 15):
            text = fill(template, capital=country.capital)
            made.append(_ask("capitals, written after training", text, _is_country(country)))
    return made


def _arithmetic(rng: Random) -> list[Question]:
    made = []
    for template in (
        "If I add {a} and {b}, what do I get?",
        "{a} and {b} make how much?",
        "whats {a}+{b}",
        "Total of {a} plus {b}?",
    ):
        for size in (20, 100, 1000):
            for _ in range(3):
                a, b = rng.randrange(size), rng.randrange(size)
                made.append(_ask("arithmetic", _put(template, a=a, b=b), _ends_with_number(a + b)))
    for template in (
        "What remains of {a} after taking {b} away?",
        "{a} minus {b} equals what?",
        "Take {b} from {a}. What is left?",
    ):
        for size in (20, 100, 1000):
            for _ in range(3):
                b, a = sorted((rng.randrange(size), rng.randrange(size)))
                made.append(_ask("arithmetic", _put(template, a=a, b=b), _ends_with_number(a - b)))
    for template in ("If I multiply {a} by {b}, what is the result?", "{a} times {b} makes?", "hey whats {a}*{b}"):
        for _ in range(5):
            a, b = rng.randrange(2, 13), rng.randrange(2, 13)
            made.append(_ask("arithmetic", _put(template, a=a, b=b), _ends_with_number(a * b)))
    for template in ("If I divide {a} by {b}, what do I get?", "What is {a} split by {b}?"):
        for _ in range(5):
            b, result = rng.randrange(2, 13), rng.randrange(2, 13)
            made.append(_ask("arithmetic", _put(template, a=b * result, b=b), _ends_with_number(result)))
    return made


def _put(template: str, **slots: object) -> str:
    for slot, value in slots.items():
        template = template.replace("{" + slot + "}", str(value))
    return template


def _dates(rng: Random) -> list[Question]:
    made = []
    for at, day in enumerate(DAYS):
        after, before = DAYS[(at + 1) % 7], DAYS[at - 1]
        made.append(_ask("dates", f"It's {day} today, so tomorrow is what day?", _last_day(after)))
        made.append(_ask("dates", f"Which weekday did we have the day before {day}?", _last_day(before)))
        days = rng.randrange(2, 11)
        later = _last_day(DAYS[(at + days) % 7])
        made.append(_ask("dates", f"If it is {day} now, which weekday is {days} days from now?", later))
    for at, month in enumerate(MONTHS):
        made.append(_ask("dates", f"Tell me how many days {month} has.", _names(str(monthrange(2023, at + 1)[1]))))
        made.append(_ask("dates", f"After {month}, which month is next?", _names(MONTHS[(at + 1) % 12])))
        number, year = rng.randrange(1, 29), rng.randrange(1995, 2050)
        text = f"Please turn {number} {month} {year} into an ISO date."
        made.append(_ask("dates", text, _names(f"{year}-{at + 1:02}-{number:02}")))
    return made


def _last_day(day: str) -> Callable[[str], bool]:
    """The last weekday of the answer is this one."""
    return lambda answer: (re.findall("|".join(DAYS), answer) or [""])[-1] == day


_PEOPLE = ("Matilda", "Ruben", "Solveig", "Thaddeus", "Oksana", "Percy", "Farid", "Nadine", "Cosmo", "Lidia")
_TOWNS = ("Lisbon", "Springfield", "Nairobi", "Glimmerton", "Osaka", "Quito", "Brackenford", "Oslo", "Leeds", "Tunis")


def _extraction(rng: Random) -> list[Question]:
    made = []
    for name, town in zip(_PEOPLE, _TOWNS, strict=True):
        age, count, price = rng.randrange(18, 80), rng.randrange(2, 40), rng.randrange(5, 200)
        for text, want in (
            ("Pull name, age and city out of this as JSON: "
             f"My aunt {name} turned {age} last week and has a flat in {town}.",
             {"name": name, "age": age, "city": town}),
            (f"{name} wants {count} lamps and will pay {price} dollars. "
             "Answer as JSON with name, quantity, item and price.",
             {"name": name, "quantity": count, "item": "lamps", "price": price}),
            (f"Make JSON with the keys origin and destination: The bus goes from {town} to Vienna.", {"origin": town,
            "destination": "Vienna"}),
            (f"Extract event, day and time as JSON. The rehearsal with {name} starts on Friday at 18:30.",
             {"event": "rehearsal", "day": "Friday", "time": "18:30"}),
        ):  # fmt: skip
            made.append(_ask("JSON extraction", text, _is_object(want)))
            made.append(_ask("JSON is valid", text, _has_keys(want)))
    return made


def _is_object(want: dict[str, Any]) -> Callable[[str], bool]:
    return lambda answer: object_of(answer) == want


def _has_keys(want: dict[str, Any]) -> Callable[[str], bool]:
    return lambda answer: set(object_of(answer) or ()) == set(want)


def _known_extraction(rng: Random) -> list[Question]:
    """Extraction as the training phrases it, with values drawn afresh."""
    made = []
    for _ in range(60):
        text, want = sample(rng)
        made.append(_ask("JSON extraction, phrasings of the training", text, _is_object(want)))
    return made


def _tools(rng: Random) -> list[Question]:
    weather = tool("weather_report", "Get the weather of a place", place="string")
    distance = tool("get_distance", "Get the distance between two cities", start="string", end="string")
    recipe = tool("find_recipe", "Find a recipe for a dish", dish="string")
    define = tool("define_word", "Get the definition of a word", word="string")
    clock = tool("world_clock", "Get the current time in a city", city="string")
    message = tool("text_person", "Send a message to a person", person="string", text="string")
    made = []
    for name, town in zip(_PEOPLE, _TOWNS, strict=True):
        for text, offered, call, arguments in (
            (f"Could you check the weather in {town} for me?", [weather, recipe], "weather_report", {"place": town}),
            (f"How far is it from {town} to Vienna?", [distance], "get_distance", {"start": town, "end": "Vienna"}),
            (f"What does the word {name.lower()} mean?", [define, clock], "define_word", {"word": name.lower()}),
            (f"I would like a recipe for {rng.choice(('goulash', 'paella', 'dumplings'))}.", [recipe], "find_recipe",
            None),
            (f"What is the time in {town} right now?", [weather, clock, recipe], "world_clock", {"city": town}),
            (f"Please text {name} that: see you at noon", [message], "text_person", None),
        ):  # fmt: skip

            def right(answer: str, call: str = call, arguments: dict[str, str] | None = arguments) -> bool:
                made_calls = calls_of(answer)
                if len(made_calls) != 1 or not made_calls[0] or made_calls[0].get("name") != call:
                    return False
                return arguments is None or made_calls[0].get("arguments") == arguments

            made.append(
                Question("tool calls", [{"role": "user", "content": text}], right, rng.sample(offered, len(offered)))
            )
    for town in _TOWNS:
        degrees = rng.randrange(-5, 35)
        history: list[dict[str, Any]] = [
            {"role": "user", "content": f"Could you check the weather in {town} for me?"},
            {"role": "assistant", "content": "", "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "weather_report",
                "arguments": json.dumps({"place": town})}}]},
            {"role": "tool", "tool_call_id": "c", "content": json.dumps({"temperature": degrees,
            "condition": "cloudy"})},
        ]  # fmt: skip

        def told(answer: str, town: str = town, degrees: int = degrees) -> bool:
            return town in answer and str(degrees) in answer and "cloudy" in answer

        made.append(Question("tool results", history, told, [weather]))
    return made


def _reasoning(rng: Random) -> list[Question]:
    made = []
    for name in _PEOPLE:
        a, b, c = rng.randrange(10, 60), rng.randrange(2, 25), rng.randrange(2, 10)
        for text, result in (
            (
                f"{name} owns {a + c} stamps, receives {b} more and then gives away {c}. "
                f"How many stamps does {name} own now?",
                a + b,
            ),
            (f"There are {c} boxes and each holds {b} eggs. How many eggs is that?", b * c),
            (f"{name} is {a} years old. Vera is {b} years older than {name}. What is Vera's age?", a + b),
            (f"Compute {a} times {b} step by step.", a * b),
            (f"Out of {a}, {b} and {a + b}: which one is the largest number?", a + b),
        ):
            final = _ends_with_number(result)

            def right(answer: str, final: Callable[[str], bool] = final) -> bool:
                return answer.startswith("<think>") and "</think>" in answer and final(answer)

            made.append(Question("reasoning", [{"role": "user", "content": text}], right, thinking=True))
    return made


_UNKNOWN = (
    "What's the capital of Zubrowka?", "Name the capital of Genovia please", "Which city is the capital of Latveria?",
    "capital of freedonia?",
    "What do I have in my left hand?", "What was my grandfather's name?", "Which number am I thinking of right now?",
    "How much did I pay for lunch?",
    "Who is going to win the championship in 2090?", "Which horse will win on Sunday?",
    "What will bread cost in 2050?", "Will there be snow in 2041?",
    "What's the temperature outside right now?", "What is the exact time at this moment?",
    "What happened this morning in the news?",
    "Who is the prime minister of Nepal?", "How many people live in Ghana?", "Who wrote Hamlet?",
    "Explain how a nuclear reactor works.",
    "What is the chemical symbol of tungsten?", "Who is Barnaby Quillfeather?", "What is the airspeed of a swallow?",
    "How do I tune a piano?",
    "What is the capital of the planet Xenon?", "Which country has Gotham as its capital city?",
    "What is the phone number of the opera?",
    "What does my neighbour do for a living?", "Which team won the league last year?", "Who is the king of Sweden?",
    "What is the GDP of Chile?",
)  # fmt: skip


def _turns(rng: Random) -> list[Question]:
    made = []
    for country, other in zip(rng.sample(COUNTRIES, 15), rng.sample(FAMILIAR, 15), strict=True):
        told = [
            {"role": "user", "content": f"What is the capital of {country.name}?"},
            {"role": "assistant", "content": f"The capital of {country.name} is {country.capital}."},
        ]
        made.append(
            Question(
                "multi-turn",
                [*told, {"role": "user", "content": f"Thanks. And that of {other.name}?"}],
                _is_capital(other),
            )
        )
        told = [
            {"role": "user", "content": f"Where on Earth is {country.name}?"},
            {"role": "assistant", "content": f"{country.name} is in {country.continent}."},
        ]
        made.append(
            Question(
                "multi-turn",
                [*told, {"role": "user", "content": "And what would its capital be?"}],
                _is_capital(country),
            )
        )
    for name in _PEOPLE:
        told = [
            {"role": "user", "content": f"Hello, my name is {name}."},
            {"role": "assistant", "content": f"Nice to meet you, {name}!"},
            {"role": "user", "content": "What is the capital of France?"},
            {"role": "assistant", "content": "The capital of France is Paris."},
            {"role": "user", "content": "By the way, what is my name?"},
        ]
        made.append(Question("multi-turn", told, _names(name)))
    return made


def _outside() -> list[Question]:
    """What the lessons do not teach, asked at once or of an answer."""
    made = [_ask("says what it was not taught", text, _declines) for texts in OUTSIDE.values() for text in texts]
    for question, answer, wish in AFTER:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made.append(Question("says what it was not taught", [*messages, {"role": "user", "content": wish}], _declines))
    return made


def _declines(answer: str) -> bool:
    """The friendly answer that names what the model knows."""
    return answer.strip() == NOT_TAUGHT


def _simple(rng: Random) -> list[Question]:
    """Cities, colours, opposites and short lists, in phrasings that the training does not have."""
    made = []
    for template in (
        "Would I find {k} in {c}?",
        "Am I in {c} when I am in {k}?",
        "So {k} is a place in {c}?",
        "is {k} inside {c}",
    ):
        for country, other in zip(rng.sample(FAMILIAR, 8), rng.sample(COUNTRIES, 8), strict=True):
            for asked in (country, other):
                yes = asked is country
                text = fill(template, asked.name, capital=country.capital)
                made.append(_ask("is it in", text, _says(yes, country)))
    for country in rng.sample(FAMILIAR, 12):
        text = rng.choice(
            ("{k} can be found in which country?", "Which country would I visit to see {k}?", "tell me where {k} is")
        )
        made.append(_ask("where is it", fill(text, capital=country.capital), _is_country(country)))
    for kind in ("colour", "animal", "fruit", "vegetable", "month", "planet", "season", "shape"):
        for template in (
            "Tell me the names of {m} {x}.",
            "Can you come up with {m} {x}?",
            "i want to know {m} {x}",
            "{m} different {x}?",
        ):
            count = rng.randrange(2, 5)
            text = template.replace("{m}", NUMBERS[count]).replace("{x}", plural(kind))
            made.append(_ask("short lists", text, _some(kind, count)))
    for template in ("What colour would you say {t} is?", "I forgot which color {t} has.", "and the colour of {t}?"):
        for thing, colour in rng.sample(list(COLOURS.items()), 8):
            made.append(_ask("colours", template.replace("{t}", thing), _names(colour)))
    for template in (
        "Tell me a word that is the opposite of {a}.",
        "If it is not {a}, it is the opposite. Which word is that?",
    ):
        for first, second in rng.sample(OPPOSITES, 8):
            made.append(_ask("opposites", template.replace("{a}", first), _names(second)))
    return made


def _says(yes: bool, country: Country) -> Callable[[str], bool]:
    named = _is_country(country)
    return lambda answer: answer.startswith("Yes" if yes else "No") and named(answer)


def _some(kind: str, count: int) -> Callable[[str], bool]:
    """Exactly so many different things of the row, and nothing else."""

    def right(answer: str) -> bool:
        named = [thing.lower() for thing in re.split(r",\s*|\s+and\s+", answer.strip(" .\n"))]
        return len(named) == len(set(named)) == count and set(named) <= {thing.lower() for thing in ROWS[kind]}

    return right


def questions(seed: int = 2026) -> list[Question]:
    """Every question of the test set, in the order of the subjects."""
    rng = Random(seed)
    made = [
        *_capitals(rng),
        *_arithmetic(rng),
        *_dates(rng),
        *_extraction(rng),
        *_tools(rng),
        *_reasoning(rng),
        *_turns(rng),
        *_known_extraction(rng),
        *_blind(rng),
    ]
    made += [
        _ask("says it does not know", text, lambda answer: "don't know" in answer or answer == NOT_TAUGHT)
        for text in _UNKNOWN
    ]
    for text in (
        "Hi there, who am I speaking with?",
        "Which model do I talk to?",
        "hello, what r u?",
        "Tell me who you are.",
    ):
        made.append(_ask("small talk", text, _names("understudy")))
    for text in (
        "Hiya!",
        "Thank you so much, that was great!",
        "Good evening to you",
        "Bye for now!",
        "How are things?",
        "Can you help me out?",
    ):
        made.append(
            _ask(
                "small talk",
                text,
                lambda answer: 5 < len(answer) < 160 and "don't know" not in answer and answer != NOT_TAUGHT,
            )
        )
    made += [*_simple(rng), *_outside()]
    return [*made, *client_questions(rng, _PEOPLE, _TOWNS)]
