"""Kinds of tools: what they are called, what they do, how people ask for them and what they return.

Names of tools and arguments vary, invented ones among them, so that the model copies the schema rather than knows it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.understudy.lessons.dates import DAYS, MONTHS
from tests.understudy.lessons.extraction import FORMS, OTHER_KEYS, RELATIVES
from tests.understudy.lessons.extraction import value as value_of
from tests.understudy.lessons.phrasing import invented_name, pick_name
from tests.understudy.lessons.words import NOUNS, VERBS, message, phrase, word
from tests.understudy.lessons.world import COUNTRIES

__all__ = ["TRADES", "Trade", "any_trade", "city", "form_trade"]


def city(rng: Random) -> str:
    """A capital, or a town that does not exist."""
    return invented_name(rng) if rng.random() < 0.5 else rng.choice(COUNTRIES).capital


_LANGUAGES = ["French", "German", "Spanish", "Italian", "Polish", "Turkish", "Dutch", "Greek", "Swedish", "Danish"]
_CURRENCIES = ["USD", "EUR", "JPY", "GBP", "CHF", "SEK", "PLN", "INR", "CNY", "BRL"]
_TOPICS = (
    "solar panels", "old castles", "jazz music", "electric cars", "bread recipes", "steam engines", "whales",
    "chess openings", "garden birds", "volcanoes", "bicycles", "theatre history", "mushrooms", "comets",
    "sailing boats", "language models",
)  # fmt: skip
_SONGS = [
    "Moonlight",
    "Blue River",
    "Long Way Home",
    "Silver Rain",
    "The Curtain",
    "Summer Train",
    "Paper Boats",
    "Northern Star",
]
_ROOMS = ("kitchen", "bedroom", "bathroom", "office", "garage", "hall", "garden", "living room")
_NOTES = (
    "buy milk",
    "call the doctor",
    "water the plants",
    "send the letter",
    "feed the cat",
    "pay the rent",
    "book a table",
    "clean the stage",
)


@dataclass(frozen=True, slots=True)
class Trade:
    """A kind of tool: its names, what it does, its arguments, how people ask for it, what it returns, what to answer.

    An argument is (names, JSON type, description, draw). In `asks`, `returns` and `answer`, {0},
    {1} stand for the values.
    """

    names: tuple[str, ...]
    description: str
    arguments: tuple[tuple[tuple[str, ...], str, str, Callable[[Random], Any]], ...]
    asks: tuple[str, ...]
    returns: Callable[[Random], dict[str, Any]]
    answer: str


_CITY_NAMES = ("city", "location", "place", "town", "city_name")

TRADES: tuple[Trade, ...] = (
    Trade(
        ("get_weather", "weather", "get_current_weather", "weather_lookup", "fetch_weather", "current_weather"),
        "Get the current weather in a city",
        ((_CITY_NAMES, "string", "The city", city),),
        ("What is the weather in {0}?", "How is the weather in {0}?", "weather in {0}", "Is it raining in {0}?",
        "How warm is it in {0}?",
         "What's the weather like in {0} today?", "Do I need an umbrella in {0}?", "Tell me the weather in {0}."),
        lambda r: {"temperature": r.randrange(-12, 39), "condition": r.choice(("sunny", "rainy", "cloudy", "snowy",
        "windy", "foggy"))},
        "It is {temperature} degrees and {condition} in {0}.",
    ),
    Trade(
        ("get_time", "current_time", "time_in", "get_local_time", "clock"), "Get the current time in a city",
        ((_CITY_NAMES, "string", "The city", city),),
        ("What time is it in {0}?", "What's the time in {0}?", "time in {0}", "Tell me the time in {0}.",
        "How late is it in {0}?"),
        lambda r: {"time": f"{r.randrange(24):02}:{r.randrange(60):02}"}, "It is {time} in {0}.",
    ),
    Trade(
        ("calculator", "calculate", "math", "evaluate", "compute"), "Calculate an arithmetic expression",
        ((("expression", "formula", "input", "expr"), "string", "The expression",
          lambda r: f"{r.randrange(2, 5000)} {r.choice('+-*/')} {r.randrange(2, 500)}"),),
        ("What is {0}?", "Calculate {0}.", "How much is {0}?", "compute {0}", "Work out {0} with the tool.", "{0} = ?"),
        lambda r: {"result": r.randrange(2, 100000)}, "The result is {result}.",
    ),
    Trade(
        ("search", "web_search", "search_web", "find", "lookup"), "Search the web",
        ((("query", "q", "text", "search_query"), "string", "What to search for",
        lambda r: phrase(r) if r.random() < 0.5 else r.choice(_TOPICS)),),
        ("Search for {0}.", "Look up {0}.", "Find something about {0}.", "Search the web for {0}.", "google {0}",
        "What does the web say about {0}?"),
        lambda r: {"title": r.choice(("A guide", "All about it", "The basics", "A short history"))},
        "I found this page: {title}.",
    ),
    Trade(
        ("set_timer", "start_timer", "timer", "create_timer"), "Start a timer",
        ((("minutes", "duration", "length_minutes"), "integer", "Minutes", lambda r: r.randrange(1, 90)),),
        ("Set a timer for {0} minutes.", "Timer: {0} minutes", "Wake me in {0} minutes.",
        "Start a timer of {0} minutes.", "Remind me in {0} minutes."),
        lambda r: {"status": "ok"}, "The timer is set for {0} minutes.",
    ),
    Trade(
        ("translate", "translate_text", "translator", "translate_word"), "Translate a text into another language",
        ((("text", "word", "phrase"), "string", "The text", word),
         (("language", "target", "to_language", "target_language"), "string", "The language",
         lambda r: r.choice(_LANGUAGES))),
        ("Translate {0} into {1}.", "What is {0} in {1}?", "How do you say {0} in {1}?", "{0} in {1}, please",
        "Say {0} in {1}."),
        lambda r: {"translation": invented_name(r).lower()}, "{0} in {1} is {translation}.",
    ),
    Trade(
        ("convert_currency", "currency_converter", "exchange", "convert_money"), "Convert an amount of money",
        ((("amount", "value", "sum"), "number", "The amount", lambda r: r.randrange(1, 1000)),
         (("from", "source", "from_currency"), "string", "Currency code", lambda r: r.choice(_CURRENCIES[:5])),
         (("to", "target", "to_currency"), "string", "Currency code", lambda r: r.choice(_CURRENCIES[5:]))),
        ("Convert {0} {1} to {2}.", "How much is {0} {1} in {2}?", "{0} {1} in {2}", "Change {0} {1} into {2}.",
        "What are {0} {1} in {2}?"),
        lambda r: {"amount": r.randrange(1, 90000) / 100}, "{0} {1} are {amount} {2}.",
    ),
    Trade(
        ("send_email", "send_mail", "email", "write_email", "send_message", "send_text", "text", "message_person"),
        "Send a message to a person",
        ((("to", "recipient", "person"), "string", "Who gets it", pick_name),
         (("text", "body", "message", "content"), "string", "The text",
         lambda r: message(r) if r.random() < 0.6 else r.choice(_NOTES))),
        ("Send {0} this message: {1}", "Write to {0}: {1}", "Tell {0}: {1}", "Send a mail to {0} saying: {1}",
        'Message {0}: "{1}"', "Text {0}: {1}", "Write {0} that {1}", "Please message {0}: {1}", "Let {0} know: {1}",
        "Please tell {0} that {1}", "Text this to {0}: {1}", "Send {0} a text: {1}"),
        lambda r: {"status": "sent"}, "The message to {0} is sent.",
    ),
    Trade(
        ("get_stock_price", "stock_price", "quote", "get_stock", "share_price"), "Get the price of a stock",
        ((("symbol", "ticker", "stock", "company"), "string", "The stock",
        lambda r: "".join(r.choice("ABCDEFGKLMNPRSTVX") for _ in range(r.choice((3, 4))))),),
        ("What is the stock price of {0}?", "How is {0} doing on the stock market?", "price of {0} stock",
        "Tell me the share price of {0}.", "stock {0}"),
        lambda r: {"price": r.randrange(100, 90000) / 100}, "The price of {0} is {price}.",
    ),
    Trade(
        ("play_song", "play_music", "play", "start_song"), "Play a song",
        ((("title", "song", "name", "track"), "string", "The song",
        lambda r: phrase(r) if r.random() < 0.5 else r.choice(_SONGS)),),
        ("Play {0}.", "I want to hear {0}.", "Play the song {0}.", "put on {0}", "Can you play {0}?"),
        lambda r: {"status": "playing"}, "Now playing {0}.",
    ),
    Trade(
        ("switch_light", "set_light", "light", "turn_light", "control_light"), "Switch the light of a room on or off",
        ((("room", "where", "area"), "string", "The room", lambda r: r.choice(_ROOMS)),
         (("state", "status", "action"), "string", "on or off", lambda r: r.choice(("on", "off")))),
        ("Turn the {0} light {1}.", "Switch {1} the light in the {0}.", "Turn {1} the {0} light.",
        "light {1} in the {0}", "Please switch the light in the {0} {1}."),
        lambda r: {"status": "done"}, "The light in the {0} is {1}.",
    ),
    Trade(
        ("add_event", "create_event", "calendar_add", "schedule", "add_to_calendar"), "Put an event into the calendar",
        ((("title", "event", "name"), "string", "What", lambda r: r.choice(("dentist", "lunch", "rehearsal", "meeting",
        "yoga", "dinner", "exam"))),
         (("day", "weekday", "when"), "string", "The day", lambda r: r.choice(DAYS))),
        ("Put {0} on {1} into my calendar.", "Add {0} on {1}.", "I have {0} on {1}, note it.", "Schedule {0} for {1}.",
        "calendar: {0} {1}"),
        lambda r: {"status": "created"}, "{0} is in your calendar on {1}.",
    ),
    Trade(
        ("find_flights", "search_flights", "flights", "flight_search"), "Find flights between two cities",
        ((("origin", "from", "departure"), "string", "City of departure", city), (("destination", "to", "arrival"),
        "string", "City of arrival", city)),
        ("Find flights from {0} to {1}.", "I want to fly from {0} to {1}.", "flights {0} to {1}",
        "Are there flights from {0} to {1}?", "Search a flight from {0} to {1}."),
        lambda r: {"flight": f"TR{r.randrange(10, 999)}", "price": r.randrange(40, 900)},
        "Flight {flight} from {0} to {1} costs {price}.",
    ),
    Trade(
        ("create_note", "add_note", "save_note", "remember", "take_note"), "Save a note",
        ((("text", "note", "content"), "string", "The note",
        lambda r: message(r) if r.random() < 0.6 else r.choice(_NOTES)),),
        ("Note: {0}", "Make a note: {0}", "Write down: {0}", "Save this note: {0}", "Take a note: {0}"),
        lambda r: {"status": "saved"}, "I saved the note: {0}.",
    ),
    Trade(
        ("get_population", "population", "country_population", "count_people"), "Get the population of a country",
        ((("country", "nation", "name"), "string", "The country", lambda r: r.choice(COUNTRIES).title),),
        ("What is the population of {0}?", "How many people live in {0}?", "population {0}",
        "How many inhabitants does {0} have?"),
        lambda r: {"population": r.randrange(10000, 99000000)}, "{0} has {population} inhabitants.",
    ),
    Trade(
        ("get_holiday", "holidays", "public_holidays", "list_holidays"), "Get the public holidays of a month",
        ((("month", "month_name"), "string", "The month", lambda r: r.choice(MONTHS)), (("year",), "integer",
        "The year", lambda r: r.randrange(2020, 2040))),
        ("Which holidays are in {0} {1}?", "holidays in {0} {1}", "Are there holidays in {0} {1}?",
        "List the public holidays of {0} {1}."),
        lambda r: {"count": r.randrange(0, 6)}, "There are {count} holidays in {0} {1}.",
    ),
)  # fmt: skip


def any_trade(rng: Random) -> Trade:
    """A tool that exists nowhere else: it gets some property of something, or does something with it."""
    thing, what = rng.choice(NOUNS), rng.choice(NOUNS) if rng.random() < 0.85 else invented_name(rng).lower()
    first = ((thing, thing, "name", "id", "value", "input", rng.choice(NOUNS)), "string", f"The {thing}", phrase)
    names: tuple[str, ...]
    asks: tuple[str, ...]
    kind = rng.randrange(4)
    if kind <= 1:
        names = (
            f"get_{what}",
            f"{what}_lookup",
            f"find_{what}",
            f"{what}_of_{thing}",
            f"{thing}_{what}",
            f"read_{what}",
            f"{what}_report",
            what,
        )
        asks = (f"What is the {what} of {{0}}?", f"Get the {what} of {{0}}.",
        f"Could you look up the {what} of {{0}}?", f"{what} of {{0}}",
                f"Tell me the {what} of {{0}}.", f"I need a {what} for {{0}}.",
                f"Find the {what} for the {thing} {{0}}.", f"Check the {what} of {{0}} for me.",
                f"Which {what} does {{0}} have?", f"What is {{0}}'s {what}?", f"Does {{0}} have a {what}?",
                f"Is there a {what} for {{0}} anywhere?",
                f"I wonder which {what} {{0}} has.", f"What does {{0}} have as {what}?",
                f"What {what} belongs to the {thing} {{0}}?",
                f"Can {{0}} get a {what} soon?", f"What would the {what} of the {thing} {{0}} be?",
                f"How does {{0}} look in {what}?", f"How about the {what} of {{0}}?",
                f"I would like the {what} of {{0}}.", f"Which {what} does the {thing} {{0}} have?",
                f"What {what} does {{0}} need?", f"What does the {thing} {{0}} give as {what}?",
                f"Has {{0}} got a {what}?", f"What does {{0}} {rng.choice(VERBS)}?",
                    f"What does the {thing} {{0}} {rng.choice(VERBS)}?",
                f"How does the {thing} {{0}} {rng.choice(VERBS)}?",
                    f"Which {what} would {{0}} {rng.choice(VERBS)}?")  # fmt: skip
        return Trade(
            names,
            f"Get the {what} of a {thing}",
            (first,),
            asks,
            lambda r: {what: phrase(r)},
            f"The {what} of {{0}} is {{{what}}}.",
        )
    if kind == 2:
        verb = rng.choice(VERBS)
        key = rng.choice([noun for noun in NOUNS if noun != thing])
        second = (
            (key, "to", "value", "detail", "target"),
            "string",
            f"The {key}",
            lambda r: message(r) if r.random() < 0.4 else phrase(r),
        )
        names = (f"{verb}_{thing}", f"{thing}_{verb}", f"{verb}_{thing}_{key}", verb, f"do_{verb}")
        asks = (f"{verb.capitalize()} the {thing} {{0}} with {key} {{1}}.", f"Please {verb} {{0}}, {key} {{1}}",
        f"{verb} {{0}}: {{1}}", f"Can you {verb} {{0}} with {{1}}?",
                f"I want to {verb} the {thing} {{0}} to {{1}}.")  # fmt: skip
        return Trade(
            names,
            f"{verb.capitalize()} a {thing} with a {key}",
            (first, second),
            asks,
            lambda r: {"status": "ok"},
            "Done: {0}.",
        )
    start = (("start", "from", "first", "a", "begin", "source"), "string", "The first", phrase)
    finish = (("end", "to", "second", "b", "finish", "target"), "string", "The second", phrase)
    names = (f"get_{what}", f"{what}_between", f"compare_{what}", f"{what}_lookup", f"measure_{what}")
    asks = (f"What is the {what} between {{0}} and {{1}}?", f"{what} from {{0}} to {{1}}",
    f"How is the {what} from {{0}} to {{1}}?", f"Get the {what} of {{0}} and {{1}}.",
            f"How much {what} is it from {{0}} to {{1}}?")  # fmt: skip
    return Trade(
        names,
        f"Get the {what} between two {thing}s",
        (start, finish),
        asks,
        lambda r: {what: r.randrange(1000)},
        f"The {what} is {{{what}}}.",
    )


_MODELS = {
    "name": ("Person", "Contact", "Customer", "Character", "UserInfo", "UserDetail"), "event": ("Event", "Appointment"),
    "quantity": ("Order", "Purchase", "Item"), "color": ("Car", "Vehicle"), "flight": ("Flight", "Trip"),
    "origin": ("Trip", "Route"), "city": ("Report", "WeatherReport"), "title": ("Book", "Publication"),
}  # fmt: skip
_TAILS = ("", "", "", "", " Who is that?", " What does it say?", " Note it down.", " Take it down, please.",
          " Who is meant?", " Fill in the form.", " What do we know?", " Save this.")  # fmt: skip


def form_trade(rng: Random) -> Trade:
    """A tool that takes down what a text says, as clients declare one for a data class."""
    kinds, texts = rng.choice(FORMS)
    model = rng.choice((*_MODELS[kinds[0]], rng.choice(NOUNS).capitalize(), "Data", "Record"))
    thing = model.lower()
    names = (
        model, model, model, "final_result", f"save_{thing}", f"extract_{thing}", f"record_{thing}", f"{thing}_data",
        f"submit_{thing}", "respond", "output", f"make_{thing}",
    )  # fmt: skip
    text = rng.choice(texts).replace("{rel}", rng.choice(RELATIVES))
    for at, kind in enumerate(kinds):
        text = text.replace("{" + kind + "}", "{" + str(at) + "}")
    types = [
        "number" if kind == "price" else "integer" if isinstance(value_of(rng, kind), int) else "string"
        for kind in kinds
    ]
    arguments = tuple(
        ((kind, kind, *OTHER_KEYS.get(kind, ())), types[at], f"The {kind}", lambda r, kind=kind: value_of(r, kind))
        for at, kind in enumerate(kinds)
    )
    description = rng.choice(
        (
            f"A {thing}", f"A {thing}", f"The data of a {thing}", f"Take down a {thing}", "The final answer",
            f"Save what the text says of a {thing}",
        )
    )  # fmt: skip
    asks = (*(text + tail for tail in _TAILS), f"Extract: {text}", f"Take this down: {text}")
    return Trade(names, description, arguments, asks, lambda r: {"status": "ok"}, "It is noted.")
