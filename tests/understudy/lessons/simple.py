"""Simple things that newcomers ask: where a city lies, colours, opposites, short lists, numbers, the alphabet."""

from random import Random

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.dates import DAYS, MONTHS
from tests.understudy.lessons.geography import NUMBERS
from tests.understudy.lessons.phrasing import casual, invented_name, polite, sentence_case
from tests.understudy.lessons.world import CONTINENTS, COUNTRIES, FAMILIAR, OTHER_CITIES, Country, by_name

__all__ = [
    "COLOURS",
    "OPPOSITES",
    "ROWS",
    "colours",
    "is_it_in",
    "letters",
    "name_some",
    "neighbours",
    "opposites",
    "plural",
    "where",
]


def _asked(rng: Random, forms: tuple[str, ...], keep: str = "", **slots: object) -> str:
    text = rng.choice(forms)
    for slot, value in slots.items():
        text = text.replace("{" + slot + "}", str(value))
    return polite(rng, casual(rng, sentence_case(text), keep))


# Capitals that are called like their country would make two different questions one.
_CITIES: tuple[tuple[str, Country, bool], ...] = (
    *((c.capital, c, True) for c in COUNTRIES if by_name(c.capital) is None),
    *((city, country, False) for city, name in OTHER_CITIES.items() if (country := by_name(name)) is not None),
)
_CAPITALS = tuple(row for row in _CITIES if row[2])
_OTHERS = tuple(row for row in _CITIES if not row[2])


def _city(rng: Random) -> tuple[str, Country, bool]:
    return rng.choice(_CAPITALS if rng.random() < 0.7 else _OTHERS)


def _fact(city: str, country: Country, capital: bool) -> str:
    return f"{city} is the capital of {country.name}." if capital else f"{city} is in {country.name}."


_IN: tuple[str, ...] = ("Is {k} in {c}?", "Is {k} located in {c}?", "Does {k} lie in {c}?", "Is {k} a city in {c}?",
    "{k} is in {c}, right?",
       "Is the city of {k} in {c}?", "Can I find {k} in {c}?", "Is {k} part of {c}?", "{k} is in {c}, isn't it?",
       "True or false: {k} is in {c}.", "Is it true that {k} is in {c}?", "{k} in {c}?",
       "{k} lies in {c}, correct?")  # fmt: skip
_IN += ("If I am in {k}, am I in {c}?", "I am in {k}. Is that {c}?", "Does {c} have a city called {k}?",
    "Is {c} the country of {k}?",
        "Do I have to go to {c} to see {k}?", "When I visit {k}, am I in {c}?", "{k} belongs to {c}, yes?",
        "I think {k} is in {c}. Is it?",
        "Am I right that {k} is in {c}?", "Is {k} somewhere in {c}?", "Does {c} contain {k}?",
        "Am I in {c} once I reach {k}?", "Would I be in {c} if I were in {k}?",
        "Do I stand in {c} when I stand in {k}?",
        "Am I in {c} while I visit {k}?", "I live in {k}. Do I live in {c}?")  # fmt: skip


def is_it_in(rng: Random) -> list[Exchange]:
    """Whether a city is in a country, or a country on a continent; an invented city is in none."""
    if rng.random() < 0.3:
        country = rng.choice(COUNTRIES)
        where = country.continent if rng.random() < 0.5 else rng.choice(CONTINENTS)
        right = where == country.continent
        question = _asked(
            rng,
            (*_IN[:3], *_IN[4:5], *_IN[8:12], "Is {k} on the continent of {c}?", "Is {k} a country in {c}?",
            "Is {k} a part of {c}?"),
            f"{country.name} {where}", k=country.name, c=where,
        )  # fmt: skip
        line = f"{'Yes' if right else 'No'}, {country.name} is in {country.continent}."
        return [
            Exchange(question, line, f"{sentence_case(country.name)} lies in {country.continent}.", line.split(",")[0])
        ]
    city, country, capital = _city(rng)
    asked = country if rng.random() < 0.45 else rng.choice(COUNTRIES)
    if rng.random() < 0.06:
        city = invented_name(rng)
        line = f"I don't know a city called {city}."
        return [Exchange(_asked(rng, _IN, f"{city} {asked.name}", k=city, c=asked.name), line, line, "I don't know")]
    right = asked is country
    fact = _fact(city, country, capital)
    line = f"{'Yes' if right else 'No'}, {fact}"
    return [
        Exchange(_asked(rng, _IN, f"{city} {asked.name}", k=city, c=asked.name), line, fact, "Yes" if right else "No")
    ]


def where(rng: Random) -> list[Exchange]:
    """The country that a city lies in."""
    forms = ("Where is {k}?", "Where is the city of {k}?", "In which country is {k}?", "Which country is {k} in?",
        "What country is {k} in?",
             "Where does {k} lie?", "Where is {k} located?", "{k} is in which country?", "In what country is {k}?",
             "where is {k}",
             "What is {k}?", "Which country does {k} belong to?", "Where can I find {k}?", "Where in the world is {k}?",
             "In which country do I find {k}?", "{k} is a city in which country?", "{k} is found in what country?",
             "I want to see {k}. Which country is that?", "Which country do I travel to for {k}?",
             "Which country is home to {k}?", "Tell me where {k} lies.", "Do you know where {k} is?",
             "Say where {k} is.", "The city of {k} is part of which country?",
             "I am in {k}. Which country am I in?", "Which country has the city {k}?",
             "To see {k}, which country do I visit?", "Which country should I go to if I want to see {k}?",
             "In what country would I be if I went to {k}?", "To which country do I fly for {k}?")  # fmt: skip
    city, country, capital = _city(rng)
    if rng.random() < 0.06:
        city = invented_name(rng)
        line = f"I don't know a place called {city}."
        return [Exchange(_asked(rng, forms[:10], city, k=city), line, line, "I don't know")]
    fact = _fact(city, country, capital)
    return [
        Exchange(
            _asked(rng, forms, city, k=city), fact, f"The city lies in {country.name}.", sentence_case(country.name)
        )
    ]


# What is named in one row, always in this order. The key is the singular.
ROWS: dict[str, tuple[str, ...]] = {
    "colour": ("red", "blue", "green", "yellow", "orange", "purple", "brown", "black", "white", "pink"),
    "animal": ("dog", "cat", "horse", "cow", "bird", "fish", "lion", "mouse", "sheep", "bear"),
    "fruit": ("apple", "banana", "orange", "pear", "grape", "cherry", "lemon", "plum", "peach", "melon"),
    "vegetable": ("carrot", "potato", "tomato", "onion", "pea", "bean", "cabbage", "spinach", "leek", "pumpkin"),
    "planet": ("Mercury", "Venus", "Earth", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune"),
    "season": ("spring", "summer", "autumn", "winter"),
    "continent": ("Africa", "Antarctica", "Asia", "Europe", "North America", "Oceania", "South America"),
    "ocean": ("Pacific", "Atlantic", "Indian Ocean", "Southern Ocean", "Arctic Ocean"),
    "day of the week": tuple(DAYS),
    "weekday": tuple(DAYS),
    "month": tuple(MONTHS),
    "shape": ("circle", "square", "triangle", "rectangle", "oval", "star"),
    "number": tuple(NUMBERS[1:11]),
    "letter": tuple("ABCDEFGHIJ"),
    "country": ("France", "Japan", "Brazil", "Egypt", "Canada", "Germany", "India", "Spain", "Kenya", "Italy"),
    "European country": ("France", "Germany", "Spain", "Italy", "Norway", "Poland", "Greece", "Sweden"),
    "African country": ("Egypt", "Kenya", "Morocco", "Nigeria", "Ghana", "Ethiopia", "Tunisia", "Senegal"),
    "Asian country": ("Japan", "India", "China", "Thailand", "Vietnam", "Indonesia", "South Korea", "Nepal"),
}
_WHOLE = ("planet", "season", "continent", "ocean", "day of the week", "month")


def plural(kind: str) -> str:
    """The plural of a row's name."""
    if kind == "day of the week":
        return "days of the week"
    return kind[:-1] + "ies" if kind.endswith("ry") else kind + "s"


def listed(things: tuple[str, ...]) -> str:
    """The things as a sentence."""
    if len(things) == 1:
        return f"{sentence_case(things[0])}."
    return f"{sentence_case(', '.join(things[:-1]))} and {things[-1]}."


def name_some(rng: Random) -> list[Exchange]:
    """Some of a row, or all of it."""
    kind = rng.choice(list(ROWS))
    row = ROWS[kind]
    many = plural(kind).replace("colour", rng.choice(("colour", "color")))
    one = kind.replace("colour", rng.choice(("colour", "color")))
    forms: tuple[str, ...]
    if kind in _WHOLE and rng.random() < 0.35:
        of = {"planet": " of the solar system", "season": " of the year", "month": " of the year"}.get(kind, "")
        forms = ("What are the {x}?", "Name the {x}.", "List the {x}.", "Name all {x}.", "List all {x}.",
            "What are the {x}{o}?", "Which {x} are there?",
                 "Tell me the {x}.", "Name all the {x}{o}.", "the {x}{o}", "Can you list the {x}?",
                 "Say the {x} in order.", "all {x}",
                 "What {x} are there?", "Give me all {x}.", "Do you know the {x}?")  # fmt: skip
        return [Exchange(_asked(rng, forms, x=many, o=of), listed(row), f"There are {len(row)} {plural(kind)}.")]
    count = rng.choice((1, 2, 3, 3, 3, 4, 5, 5, 6, 7, 8, 10))
    count = min(count, len(row))
    number = str(count) if rng.random() < 0.4 else NUMBERS[count]
    if count == 1:
        forms = ("Name a {x}.", "Name one {x}.", "Tell me a {x}.", "Give me a {x}.", "Say a {x}.",
            "Do you know a {x}?", "a {x}, please",
                 "Give me the name of a {x}.", "What is a {x} you know?", "Can you name one {x}?",
                 "Give me an example of a {x}.")  # fmt: skip
        form = _asked(rng, forms, x=one).replace(" a a", " an a").replace(" a o", " an o").replace("A a", "An a")
        return [Exchange(form, listed(row[:1]), f"I know {row[0]}.", sentence_case(row[0]))]
    forms = ("Name {n} {x}.", "List {n} {x}.", "Give me {n} {x}.", "Tell me {n} {x}.", "What are {n} {x}?",
        "{n} {x}", "{n} {x} please",
             "Can you name {n} {x}?", "Say {n} {x}.", "I need {n} {x}.", "Write {n} {x}.", "Please list {n} {x}.",
             "Which {n} {x} do you know?",
             "Could you list {n} {x}?", "name me {n} {x}", "Think of {n} {x}.", "Give me the names of {n} {x}.",
             "Give {n} examples of {x}.",
             "Show me {n} {x}.", "I want {n} {x}.", "Do you know {n} {x}?", "Write down {n} {x}.",
             "Do you know any {x}? Name {n}.", "Come up with {n} {x}.", "Can you think of {n} {x}?",
             "Could you come up with {n} {x} for me?", "Can you tell me {n} {x}?")  # fmt: skip
    return [
        Exchange(
            _asked(rng, forms, n=number, x=many),
            listed(row[:count]),
            f"{sentence_case(NUMBERS[count])} {plural(kind)}.",
        )
    ]


COLOURS: dict[str, str] = {
    "the sky": "blue", "grass": "green", "snow": "white", "a banana": "yellow", "blood": "red", "coal": "black",
    "a lemon": "yellow", "the sun": "yellow", "a tomato": "red", "a strawberry": "red", "a carrot": "orange",
    "an orange": "orange",
    "milk": "white", "a leaf": "green", "a cucumber": "green", "the sea": "blue", "the night": "black",
    "a fire engine": "red",
    "a cherry": "red", "a frog": "green", "an elephant": "grey", "chocolate": "brown", "coffee": "brown",
    "wood": "brown", "salt": "white",
    "sugar": "white", "a cloud": "white", "a pumpkin": "orange", "a flamingo": "pink", "a pig": "pink",
    "gold": "yellow", "a plum": "purple",
    "spinach": "green", "a swan": "white", "a raven": "black", "a crow": "black", "an eggplant": "purple",
    "a polar bear": "white",
    "the ocean": "blue", "a pea": "green", "fire": "red", "a bear": "brown", "a sunflower": "yellow",
    "a mouse": "grey", "rice": "white",
}  # fmt: skip
_SHADES = ("red", "blue", "green", "yellow", "orange", "purple", "brown", "black", "white", "pink", "grey")


def colours(rng: Random) -> list[Exchange]:
    """The colour of a thing, or whether it has one."""
    thing, colour = rng.choice(list(COLOURS.items()))
    if rng.random() < 0.3:
        asked = colour if rng.random() < 0.5 else rng.choice(_SHADES)
        question = _asked(rng, ("Is {t} {c}?", "Is {t} really {c}?", "{t} is {c}, right?",
            "Is the colour of {t} {c}?", "Is it true that {t} is {c}?",
                                "Is the color of {t} {c}?"), t=thing, c=asked)  # fmt: skip
        line = f"{'Yes' if asked == colour else 'No'}, {thing} is {colour}."
        return [Exchange(question, line, f"{sentence_case(thing)} is {colour}.", line.split(",")[0])]
    forms = ("What color is {t}?", "What colour is {t}?", "Which colour is {t}?", "Which color does {t} have?",
        "What colour does {t} have?",
             "What is the colour of {t}?", "What is the color of {t}?", "colour of {t}",
             "Tell me the colour of {t}.", "{t}: which colour?",
             "What is the usual colour of {t}?", "Do you know the color of {t}?", "In which colour do we see {t}?",
             "What colour do you think {t} has?", "Which colour would {t} be?", "{t} has what colour?",
             "I need the colour of {t}.", "What color do we give {t}?", "Which colour do you see on {t}?")  # fmt: skip
    line = f"{sentence_case(thing)} is {colour}."
    return [Exchange(_asked(rng, forms, t=thing), line, line, colour)]


OPPOSITES: tuple[tuple[str, str], ...] = (
    ("hot", "cold"), ("big", "small"), ("up", "down"), ("day", "night"), ("open", "closed"), ("fast", "slow"),
    ("light", "dark"),
    ("happy", "sad"), ("old", "young"), ("early", "late"), ("left", "right"), ("full", "empty"), ("good", "bad"),
    ("long", "short"),
    ("high", "low"), ("hard", "soft"), ("rich", "poor"), ("strong", "weak"), ("wet", "dry"), ("black", "white"),
    ("loud", "quiet"),
    ("true", "false"), ("first", "last"), ("near", "far"), ("heavy", "light"), ("clean", "dirty"), ("thick", "thin"),
    ("wide", "narrow"),
    ("deep", "shallow"), ("easy", "difficult"), ("cheap", "expensive"), ("inside", "outside"), ("above", "below"),
    ("before", "after"),
    ("yes", "no"), ("in", "out"), ("start", "end"), ("friend", "enemy"), ("summer", "winter"), ("north", "south"),
    ("east", "west"),
    ("always", "never"), ("everything", "nothing"), ("push", "pull"), ("win", "lose"), ("laugh", "cry"), ("sweet",
    "sour"), ("same", "different"),
)  # fmt: skip


def opposites(rng: Random) -> list[Exchange]:
    """The opposite of a word."""
    first, second = rng.choice(OPPOSITES)
    forms = ("What is the opposite of {a}?", "What's the opposite of {a}?", "opposite of {a}",
        "Tell me the opposite of {a}.", "{a}: what is the opposite?",
             "Which word is the opposite of {a}?", "What word means the opposite of {a}?",
             "Give me the opposite of {a}.", "Name the opposite of {a}.",
             "the opposite of {a}?", "Do you know the opposite of {a}?", "What is the contrary of {a}?",
             "I need the opposite of {a}.", "Which word is opposite to {a}?", "What is not {a} but the opposite?",
             "Say the opposite of {a}.", "The opposite of {a} is")  # fmt: skip
    line = f"The opposite of {first} is {second}."
    return [Exchange(_asked(rng, forms, a=first), line, line, second)]


def _spelled(number: int) -> str:
    tens = ["", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    teens = ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
    if number < 13:
        return NUMBERS[number]
    if number < 20:
        return teens[number - 13]
    if number == 100:
        return "one hundred"
    return tens[number // 10] + (f"-{NUMBERS[number % 10]}" if number % 10 else "")


def neighbours(rng: Random) -> list[Exchange]:
    """The number before or after, twice or half of it, and numbers in words."""
    a, kind = rng.randrange(1, 1000 if rng.random() < 0.4 else 101), rng.randrange(5)
    forms: tuple[str, ...]
    if kind == 0:
        forms = ("What number comes after {a}?", "Which number follows {a}?", "What comes after {a}?",
            "number after {a}", "What is the next number after {a}?",
                 "What is the number after {a}?", "Which number is next after {a}?")  # fmt: skip
        return [Exchange(_asked(rng, forms, a=a), f"After {a} comes {a + 1}.", f"{a} + 1 = {a + 1}.", str(a + 1))]
    if kind == 1:
        forms = (
            "What number comes before {a}?",
            "Which number is before {a}?",
            "What comes before {a}?",
            "number before {a}",
            "What is the number before {a}?",
        )
        return [Exchange(_asked(rng, forms, a=a), f"Before {a} comes {a - 1}.", f"{a} - 1 = {a - 1}.", str(a - 1))]
    if kind == 2:
        forms = (
            "What is twice {a}?",
            "What is the double of {a}?",
            "Double {a}.",
            "What is double {a}?",
            "How much is twice {a}?",
            "two times {a}",
            "Twice {a}?",
        )
        line = f"Twice {a} is {2 * a}."
        return [Exchange(_asked(rng, forms, a=a), line, f"{a} + {a} = {2 * a}.", str(2 * a))]
    if kind == 3:
        half = rng.randrange(1, 201)
        forms = (
            "What is half of {a}?",
            "What is a half of {a}?",
            "Half of {a}?",
            "How much is half of {a}?",
            "Halve {a}.",
            "What is the half of {a}?",
        )
        line = f"Half of {2 * half} is {half}."
        return [Exchange(_asked(rng, forms, a=2 * half), line, f"{half} + {half} = {2 * half}.", str(half))]
    number = rng.randrange(101)
    if rng.random() < 0.6:
        forms = (
            "Write {a} in words.",
            "How do you write {a} in words?",
            "Spell the number {a}.",
            "{a} in words",
            "What is {a} in words?",
            "Write the number {a} as a word.",
        )
        return [
            Exchange(
                _asked(rng, forms, a=number), _spelled(number), f"{number} is {_spelled(number)}.", _spelled(number)
            )
        ]
    forms = (
        "Write {a} as a number.",
        "Write {a} in digits.",
        "{a} in digits",
        "What is {a} as a number?",
        "Which number is {a}?",
    )
    return [
        Exchange(_asked(rng, forms, a=_spelled(number)), str(number), f"{_spelled(number)} is {number}.", str(number))
    ]


_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def letters(rng: Random) -> list[Exchange]:
    """The alphabet and the order of its letters."""
    at, kind = rng.randrange(26), rng.randrange(3)
    forms: tuple[str, ...]
    if kind == 0:
        forms = ("Say the alphabet.", "Recite the alphabet.", "What is the alphabet?", "Write the alphabet.",
            "the alphabet please", "List the letters of the alphabet.",
                 "Tell me the alphabet.", "Can you say the alphabet?", "Do you know the alphabet?",
                 "Which letters are in the alphabet?")  # fmt: skip
        return [Exchange(_asked(rng, forms), f"{' '.join(_ALPHABET)}.", "There are 26 letters.")]
    step = 1 if kind == 1 else -1
    at = min(at, 24) if step == 1 else max(at, 1)
    word = "after" if step == 1 else "before"
    forms = (
        "Which letter comes {w} {a}?",
        "What letter comes {w} {a}?",
        "letter {w} {a}?",
        "What is the letter {w} {a}?",
        "Which letter is {w} {a} in the alphabet?",
    )
    letter, other = _ALPHABET[at], _ALPHABET[at + step]
    question = polite(rng, rng.choice(forms).replace("{w}", word).replace("{a}", letter))
    return [Exchange(question, f"{sentence_case(word)} {letter} comes {other}.", f"{other} is {word} {letter}.", other)]


def a_capital(rng: Random) -> list[Exchange]:
    """Any capital or country, of the world or of a continent."""
    forms: tuple[str, ...]
    continent, adjective = rng.choice(tuple(_ADJECTIVES.items()))
    country = next(c for c in (*FAMILIAR, *COUNTRIES) if c.continent == continent)
    if rng.random() < 0.35:
        forms = ("Name a capital.", "Name a country and its capital.", "Name any capital city.",
            "Tell me a capital.", "Say a capital.", "a capital, please",
                 "Do you know a capital city?", "Give me a country with its capital.")  # fmt: skip
        country = FAMILIAR[0]
    else:
        forms = ("Name {a} capital.", "Name a capital in {w}.", "Tell me {a} capital.",
            "Give me a capital city in {w}.", "Name {a} country and its capital.",
                 "Name a country in {w} and its capital.", "Do you know {a} capital?",
                 "Say a capital of a country in {w}.", "{a} capital city, please")  # fmt: skip
    line = f"{country.capital} is the capital of {country.name}."
    return [
        Exchange(
            _asked(rng, forms, w=continent, a=adjective),
            line,
            f"{country.name} is in {country.continent}.",
            country.capital,
        )
    ]


_ADJECTIVES = {
    "Africa": "an African", "Asia": "an Asian", "Europe": "a European", "North America": "a North American",
    "South America": "a South American", "Oceania": "an Oceanian",
}  # fmt: skip
