"""From a sentence to a JSON object: the keys that were asked for, values as they stand in the text."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.dates import DAYS, MONTHS
from tests.understudy.lessons.phrasing import invented_name, pick_name
from tests.understudy.lessons.words import NOUNS, phrase
from tests.understudy.lessons.world import COUNTRIES

__all__ = ["FORMS", "OTHER_KEYS", "RELATIVES", "described", "extract", "general", "sample", "value"]

_ITEMS = [
    "notebooks", "lamps", "chairs", "pencils", "cups", "plates", "bottles", "shirts", "shoes", "boxes", "pillows",
    "batteries", "towels", "candles", "bags", "spoons",
]  # fmt: skip
_JOBS = [
    "teacher", "baker", "doctor", "painter", "engineer", "farmer", "nurse", "pilot", "actor", "driver", "cook",
    "student", "lawyer", "tailor", "writer",
]  # fmt: skip
_EVENTS = [
    "the concert",
    "the meeting",
    "the opening night",
    "the workshop",
    "the lecture",
    "the rehearsal",
    "the party",
    "the exam",
    "the match",
    "the interview",
]
RELATIVES = (
    "aunt", "uncle", "sister", "brother", "cousin", "niece", "nephew", "friend", "colleague", "boss", "neighbour",
    "doctor",
    "grandmother", "grandfather", "daughter", "son", "mother", "father", "classmate", "driver",
)  # fmt: skip
_COLORS = ["red", "blue", "green", "black", "white", "yellow", "silver", "brown", "grey", "orange"]


def _city(rng: Random) -> str:
    return invented_name(rng) if rng.random() < 0.5 else rng.choice(COUNTRIES).capital


def _surname(rng: Random) -> str:
    return invented_name(rng, ("er", "son", "ova", "man", "ez", "ini", "sky", "ton"))


def value(rng: Random, kind: str) -> Any:
    """A value of this kind: a name, a number, a day."""
    draw: dict[str, Callable[[], Any]] = {
        "name": lambda: pick_name(rng) if rng.random() < 0.6 else f"{pick_name(rng)} {_surname(rng)}",
        "age": lambda: rng.randrange(4, 95),
        "city": lambda: _city(rng),
        "job": lambda: rng.choice(_JOBS),
        "quantity": lambda: rng.randrange(2, 60),
        "item": lambda: rng.choice(_ITEMS) if rng.random() < 0.6 else rng.choice(NOUNS) + "s",
        "price": lambda: (
            rng.randrange(1, 300)
            if rng.random() < 0.6
            else round(rng.randrange(1, 100) + rng.randrange(1, 100) / 100, 2)
        ),
        "event": lambda: rng.choice(_EVENTS).removeprefix("the ") if rng.random() < 0.7 else rng.choice(NOUNS),
        "day": lambda: rng.choice(DAYS),
        "date": lambda: f"{rng.randrange(1, 29)} {rng.choice(MONTHS)}",
        "time": lambda: f"{rng.randrange(24):02}:{rng.choice((0, 15, 30, 45)):02}",
        "email": lambda: f"{pick_name(rng).lower()}@{invented_name(rng).lower()}.{rng.choice(('com', 'org', 'net'))}",
        "phone": lambda: f"{rng.randrange(100, 1000)}-{rng.randrange(1000, 10000)}",
        "color": lambda: rng.choice(_COLORS),
        "brand": lambda: invented_name(rng),
        "year": lambda: rng.randrange(1960, 2031),
        "origin": lambda: _city(rng),
        "destination": lambda: _city(rng),
        "flight": lambda: f"{rng.choice('ABKLTX')}{rng.choice('ABKLTX')}{rng.randrange(10, 1000)}",
        "room": lambda: rng.randrange(1, 500),
        "temperature": lambda: rng.randrange(-15, 40),
        "title": lambda: " ".join(invented_name(rng) for _ in range(rng.choice((1, 2)))),
    }
    return draw[kind]()


# What the text is about: the values it holds (in its order), and ways to say it.
FORMS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("name", "age", "city"), ("{name} is {age} years old and lives in {city}.", "{name}, {age}, comes from {city}.",
    "In {city} lives {name}, who is {age}.",
                               "My neighbour {name} is {age} and was born in {city}.",
                               "My cousin {name} became {age} yesterday and owns a house in {city}.",
                               "Last year my friend {name} from {city} was {age}.",
                               "My {rel} {name} celebrates being {age} and rents a room in {city}.",
                               "My {rel} {name} is {age} since Monday and keeps a shop in {city}.",
                               "Our {rel} {name} will be {age} soon and lives in {city}.",
                               "My {rel} {name} ({age}) has a garden in {city}.",
                               "This is {name}, {age} now, with a house near {city}.",
                               "Our teacher {name}, aged {age}, moved to {city}.")),
    (("name", "age"), ("{name} is {age} years old.", "{name} is {age}.", "{name} turned {age}.", "{name}, {age}",
    "The age of {name} is {age}.", "My {rel} {name} is {age} years of age.", "At {age}, {name} is still young.",
                       "Now {name} is {age} years old.", "Here comes {name}, aged {age}.",
                       "My {rel} is called {name} and is {age}.")),
    (("name", "job"), ("{name} is a {job}.", "{name} works as a {job}.", "The {job} is called {name}.")),
    (("name", "city"), ("{name} lives in {city}.", "{name} comes from {city}.", "In {city} we met {name}.")),
    (("name", "job", "city"), ("{name} works as a {job} in {city}.", "{name} is a {job} from {city}.",
    "The {job} {name} lives in {city}.")),
    (("name", "age", "job"), ("{name} is a {age} year old {job}.", "{name} is {age} and works as a {job}.",
    "At {age}, {name} became a {job}.")),
    (("name", "quantity", "item", "price"), ("{name} ordered {quantity} {item} for {price} dollars.",
    "{name} bought {quantity} {item} and paid {price} dollars.",
                                             "Order by {name}: {quantity} {item}, {price} dollars in total.",
                                             "{name} needs {quantity} {item} and has {price} dollars for them.",
                                             "{name} would like {quantity} {item} and offers {price} dollars.",
                                             "For {price} dollars {name} takes {quantity} {item}.")),
    (("quantity", "item", "price"), ("We need {quantity} {item} at {price} dollars.",
    "Please send {quantity} {item} for {price} dollars.",
                                     "The invoice lists {quantity} {item}, {price} dollars.")),
    (("event", "day", "time"), ("The {event} is on {day} at {time}.", "On {day} at {time} we have the {event}.",
    "Don't miss the {event}: {day}, {time}.")),
    (("event", "date", "city"), ("The {event} takes place in {city} on {date}.",
    "On {date} the {event} starts in {city}.", "{city} hosts the {event} on {date}.")),
    (("name", "email"), ("You can write to {name} at {email}.", "{name} has the email address {email}.",
    "Contact: {name}, {email}.")),
    (("name", "phone", "email"), ("Call {name} at {phone} or write to {email}.",
    "{name}: phone {phone}, mail {email}.", "Reach {name} under {phone} or {email}.")),
    (("color", "brand", "year"), ("I drive a {color} {brand} from {year}.",
    "For sale: {color} {brand}, built in {year}.", "She has a {color} {brand} of {year}.")),
    (("flight", "origin", "destination", "time"), ("Flight {flight} from {origin} to {destination} leaves at {time}.",
                                                   "At {time} flight {flight} goes from {origin} to {destination}.")),
    (("origin", "destination", "day"), ("I travel from {origin} to {destination} on {day}.",
    "On {day} the train goes from {origin} to {destination}.")),
    (("name", "room", "day"), ("{name} stays in room {room} until {day}.",
    "Room {room} is booked for {name} on {day}.", "On {day}, {name} moves to room {room}.")),
    (("city", "temperature"), ("It is {temperature} degrees in {city}.", "{city} reports {temperature} degrees.",
    "Today {city} has {temperature} degrees.")),
    (("title", "name", "year"), ("The book {title} was written by {name} in {year}.",
    "{name} published {title} in {year}.", "In {year} {name} wrote {title}.")),
)  # fmt: skip

OTHER_KEYS = {
    "name": ("name", "person", "full_name", "customer"), "city": ("city", "place", "location", "town"), "job": ("job",
    "profession", "occupation"),
    "quantity": ("quantity", "amount", "count"), "item": ("item", "product", "article"), "price": ("price", "total",
    "cost"),
    "event": ("event", "what"), "day": ("day", "weekday"), "time": ("time", "hour"), "title": ("title", "book"),
    "origin": ("origin", "from"),
    "destination": ("destination", "to"), "phone": ("phone", "number"), "email": ("email", "mail"),
}  # fmt: skip


_LINKS = (
    "The {x} is {v}",
    "{x}: {v}",
    "Its {x} is {v}",
    "{v} is the {x}",
    "We chose {v} as {x}",
    "For {x} we have {v}",
    "{x} = {v}",
)


def general(rng: Random) -> tuple[str, dict[str, Any]]:
    """A text about any keys at all, and what it says."""
    keys = rng.sample(NOUNS, rng.randrange(1, 5))
    values: dict[str, Any] = {key: rng.randrange(1000) if rng.random() < 0.3 else phrase(rng) for key in keys}
    link = rng.choice(_LINKS)
    parts = [
        (link if rng.random() < 0.7 else rng.choice(_LINKS)).replace("{x}", k).replace("{v}", str(v))
        for k, v in values.items()
    ]
    return rng.choice((". ", ", ", "; ", " and ")).join(parts) + rng.choice(("", ".")), values


def described(rng: Random) -> tuple[str, dict[str, Any]]:
    """A text of one of the forms, and what it says."""
    kinds, texts = rng.choice(FORMS)
    values = {kind: value(rng, kind) for kind in kinds}
    text = rng.choice(texts)
    text = text.replace("{rel}", rng.choice(RELATIVES))
    for kind, drawn in values.items():
        text = text.replace("{" + kind + "}", str(drawn))
    return text, values


def sample(rng: Random) -> tuple[str, dict[str, Any]]:
    """A request for extraction and the object that answers it."""
    text, values = general(rng) if rng.random() < 0.35 else described(rng)
    asked = list(values)
    if rng.random() < 0.3 and len(asked) > 1:
        asked = rng.sample(asked, rng.randrange(1, len(asked)))
    elif rng.random() < 0.3:
        rng.shuffle(asked)
    keys = {kind: rng.choice(OTHER_KEYS.get(kind, (kind,))) if rng.random() < 0.35 else kind for kind in asked}
    answer = {keys[kind]: values[kind] for kind in asked}
    listed = ", ".join(answer)
    spoken = listed if len(answer) == 1 else f"{', '.join(list(answer)[:-1])} and {list(answer)[-1]}"
    verb = rng.choice(
        (
            "Extract",
            "Get",
            "Take",
            "Read",
            "Find",
            "Collect",
            "Give me",
            "Pick",
            "Return",
            "Write",
            "Show",
            "Gather",
            "Fetch",
            "Draw",
            "List",
            "Grab",
            "Provide",
            "Output",
            "Select",
            "Retrieve",
            "Identify",
        )
    )
    place = rng.choice(
        (" from this", " from the text", " out of the text", " out of the sentence", " of this", " from it", "")
    )
    form = rng.choice((" as JSON", " in JSON", " as a JSON object", " as one JSON object", " in JSON form"))
    built = verb + " {s}" + place + form + rng.choice((": {t}", ".\n{t}", ". {t}", ":\n\n{t}"))
    asked_first = rng.choice(("As JSON, ", "In JSON: ", "", "Please ")) + built
    ask = asked_first if rng.random() < 0.5 else rng.choice(
        ("Extract {s} as JSON: {t}", "Extract {s} from this text as JSON.\n{t}", "{t}\nGive me {s} as a JSON object.",
        "Return JSON with the keys {l}.\n\n{t}",
         "Read the text and write a JSON object with {s}. Text: {t}", "JSON with {l} please: {t}",
         "Turn this into JSON ({l}): {t}",
         "Text: {t}\nKeys: {l}\nJSON:", 'From the sentence "{t}" extract {s}. Answer in JSON.',
         "Parse into JSON with fields {l}: {t}",
         "{t} Write JSON with {s}.", "{t} Reply in JSON with {s}.", "{t} Respond as JSON with the keys {l}.",
         "{t} Return JSON having {s}.", "{t}\nPut {s} into JSON.", "{t} Output JSON: {l}.", "{t} Give JSON for {s}.",
         "Put {s} into a JSON object: {t}", "Create JSON with the fields {s}: {t}", "Build a JSON object with {s}: {t}",
         "Write JSON with keys {s}: {t}", "Fill a JSON object with {s}. {t}", "Make a JSON object of {s}: {t}",
         "Here is a text: {t} Which {s} does it give? JSON please.", "{t} I need JSON with {s} from that.",
         "Copy {s} from the text into JSON: {t}", "Convert to JSON with {s}: {t}", "{t} As JSON: {s}.",
         "Get {s} from this and answer in JSON: {t}", "I need {s} as JSON. {t}",
         "{t}\n\nJSON keys: {l}",
         "Find {s} in the text below and return JSON.\n{t}", "What are {s}? Reply as a JSON object. {t}",
         "Take {s} out of the text. JSON only. {t}")
    )  # fmt: skip
    return ask.replace("{s}", spoken).replace("{l}", listed).replace("{t}", text), answer


def extract(rng: Random) -> list[Exchange]:
    """One extraction."""
    question, answer = sample(rng)
    written = json.dumps(answer, ensure_ascii=False)
    return [Exchange(question, written, f"The keys are {', '.join(answer)}. I take the values from the text.")]
