"""Weekdays, months and calendar dates."""

from calendar import isleap
from datetime import date, timedelta
from random import Random

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.phrasing import casual, polite

__all__ = ["DAYS", "MONTHS", "calendar_dates", "months", "weekdays"]

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
]  # fmt: skip
_LENGTHS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
_ORDINALS = [
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
]  # fmt: skip


def _asked(rng: Random, forms: tuple[str, ...], **slots: object) -> str:
    text = rng.choice(forms)
    for slot, value in slots.items():
        text = text.replace("{" + slot + "}", str(value))
    return polite(rng, casual(rng, text))


def weekdays(rng: Random) -> list[Exchange]:
    """The day before, after, or some days away."""
    forms: tuple[str, ...]
    at, kind = rng.randrange(7), rng.randrange(4)
    day = DAYS[at]
    if kind == 0:
        other = DAYS[(at + 1) % 7]
        forms = ("What day comes after {d}?", "Which day follows {d}?", "What is the day after {d}?", "day after {d}?",
                 "If today is {d}, what day is tomorrow?", "Today is {d}. What is tomorrow?",
                 "What weekday comes after {d}?")  # fmt: skip
        return [
            Exchange(
                _asked(rng, forms, d=day), f"The day after {day} is {other}.", f"After {day} comes {other}.", other
            )
        ]
    if kind == 1:
        other = DAYS[(at - 1) % 7]
        forms = ("What day comes before {d}?", "Which day is before {d}?", "What is the day before {d}?",
        "day before {d}?",
                 "If today is {d}, what day was yesterday?", "Today is {d}. What was yesterday?")  # fmt: skip
        return [
            Exchange(
                _asked(rng, forms, d=day), f"The day before {day} is {other}.", f"Before {day} comes {other}.", other
            )
        ]
    days = rng.randrange(1, 15)
    back = rng.random() < 0.25
    other = DAYS[(at + (-days if back else days)) % 7]
    unit = "day" if days == 1 else "days"
    forms = (
        ("What day was it {n} {u} before {d}?", "Today is {d}. What day was it {n} {u} ago?",
        "If today is {d}, what day was {n} {u} ago?")
        if back
        else ("What day is {n} {u} after {d}?", "Today is {d}. What day is it in {n} {u}?",
        "If today is {d}, which day is it in {n} {u}?",
              "{n} {u} after {d} is which day?", "It is {d}. What weekday will it be {n} {u} later?")
    )  # fmt: skip
    walk = [DAYS[(at + (-i if back else i)) % 7] for i in range(1, days % 7 + 1)]
    thought = f"{days} {unit} is {days // 7} full weeks and {days % 7} days. " if days >= 7 else ""
    thought += f"From {day}: {', '.join(walk)}." if walk else f"So it is {day} again."
    answer = f"{days} {unit} {'before' if back else 'after'} {day} is {other}."
    return [Exchange(_asked(rng, forms, d=day, n=days, u=unit), answer, thought, other)]


def months(rng: Random) -> list[Exchange]:
    """The order of the months, their lengths, leap years."""
    forms: tuple[str, ...]
    at, kind = rng.randrange(12), rng.randrange(6)
    month = MONTHS[at]
    if kind == 0:
        forms = (
            "How many days are in {m}?",
            "How many days does {m} have?",
            "days in {m}",
            "How long is {m}?",
            "{m} has how many days?",
        )
        extra = ", or 29 in a leap year" if at == 1 else ""
        line = f"{month} has {_LENGTHS[at]} days{extra}."
        return [Exchange(_asked(rng, forms, m=month), line, f"{month} is month {at + 1}.", str(_LENGTHS[at]))]
    if kind == 1:
        other = MONTHS[(at + 1) % 12]
        forms = (
            "Which month comes after {m}?",
            "What month follows {m}?",
            "month after {m}?",
            "What is the month after {m}?",
        )
        return [
            Exchange(
                _asked(rng, forms, m=month),
                f"The month after {month} is {other}.",
                f"After {month} comes {other}.",
                other,
            )
        ]
    if kind == 2:
        other = MONTHS[(at - 1) % 12]
        forms = (
            "Which month comes before {m}?",
            "What month is before {m}?",
            "month before {m}?",
            "What is the month before {m}?",
        )
        return [
            Exchange(
                _asked(rng, forms, m=month),
                f"The month before {month} is {other}.",
                f"Before {month} comes {other}.",
                other,
            )
        ]
    if kind == 3:
        forms = (
            "What is the {o} month of the year?",
            "Which month is the {o}?",
            "Name the {o} month.",
            "{o} month of the year?",
        )
        line = f"The {_ORDINALS[at]} month is {month}."
        return [Exchange(_asked(rng, forms, o=_ORDINALS[at]), line, f"Month {at + 1} is {month}.", month)]
    if kind == 4:
        forms = (
            "Which number is {m} among the months?",
            "What number month is {m}?",
            "{m} is which month of the year?",
        )
        line = f"{month} is the {_ORDINALS[at]} month."
        return [Exchange(_asked(rng, forms, m=month), line, f"{month} is month {at + 1}.", str(at + 1))]
    if rng.random() < 0.3:
        what, count = rng.choice((("days are in a week", "7 days"), ("months are in a year", "12 months"),
        ("hours are in a day", "24 hours"),
                                  ("minutes are in an hour", "60 minutes"), ("seconds are in a minute", "60 seconds"),
                                  ("days are in a year", "365 days"), ("weeks are in a year", "52 weeks")))  # fmt: skip
        whole = {"week": "a week", "year": "a year", "day": "a day", "hour": "an hour", "minute": "a minute"}[
            what.split()[-1]
        ]
        line = f"There are {count} in {whole}."
        return [Exchange(_asked(rng, ("How many " + what + "?",)), line, f"{count} make {whole}.", count.split()[0])]
    year = rng.randrange(1990, 2060)
    leap = isleap(year)
    forms = ("Is {y} a leap year?", "Was {y} a leap year?", "leap year {y}?", "Does February {y} have 29 days?")
    line = f"{'Yes' if leap else 'No'}, {year} is {'' if leap else 'not '}a leap year."
    thought = f"{year} = 4 × {year // 4}{' + ' + str(year % 4) if year % 4 else ''}."
    return [Exchange(_asked(rng, forms, y=year), line, thought, "Yes" if leap else "No")]


def calendar_dates(rng: Random) -> list[Exchange]:
    """The next day of the calendar, ISO dates, which of two dates is earlier."""
    forms: tuple[str, ...]
    first = date(1990, 1, 1) + timedelta(days=rng.randrange(25000))
    if rng.random() < 0.3:  # the last days of a month are where it gets hard
        first = (first.replace(day=28) + timedelta(days=4)).replace(day=1) - timedelta(days=rng.randrange(1, 3))
    long = f"{first.day} {MONTHS[first.month - 1]} {first.year}"
    american = f"{MONTHS[first.month - 1]} {first.day}, {first.year}"
    kind = rng.randrange(4)
    if kind == 0:
        forms = ("Write {d} as an ISO date.", "What is {d} in ISO format?", "{d} as YYYY-MM-DD",
        "Convert {d} to ISO format.",
                 "Write {e} as an ISO date.", "Give {e} in the form YYYY-MM-DD.")  # fmt: skip
        line = first.isoformat()
        thought = f"The year is {first.year}, the month is {first.month:02}, the day is {first.day:02}."
        return [Exchange(_asked(rng, forms, d=long, e=american), line, thought, line)]
    if kind == 1:
        forms = (
            "Write {i} in words.",
            "What date is {i}?",
            "{i} as a long date",
            "Spell out the date {i}.",
            "Read this date: {i}",
        )
        thought = f"Month {first.month} is {MONTHS[first.month - 1]}."
        return [Exchange(_asked(rng, forms, i=first.isoformat()), long, thought, long)]
    if kind == 2:
        after = first + timedelta(days=1)
        then = f"{after.day} {MONTHS[after.month - 1]} {after.year}"
        forms = (
            "What date comes after {d}?",
            "What is the day after {d}?",
            "Today is {d}. What is the date tomorrow?",
            "the date after {d}?",
        )
        thought = f"{MONTHS[first.month - 1]} {first.year} has {_length(first)} days."
        return [Exchange(_asked(rng, forms, d=long), f"The day after {long} is {then}.", thought, then)]
    second = date(1990, 1, 1) + timedelta(days=rng.randrange(25000))
    if rng.random() < 0.5:
        second = first + timedelta(days=rng.choice((-200, -40, -3, 2, 17, 60, 300)))
    if second == first:
        second += timedelta(days=1)
    other = f"{second.day} {MONTHS[second.month - 1]} {second.year}"
    word = rng.choice(("earlier", "later"))
    right = long if (first < second) == (word == "earlier") else other
    forms = ("Which date is {w}, {d} or {o}?", "Which is {w}: {d} or {o}?", "{d} or {o}, which comes {w}?")
    thought = f"{first.isoformat()} is {'before' if first < second else 'after'} {second.isoformat()}."
    return [Exchange(_asked(rng, forms, w=word, d=long, o=other), f"{right} is {word}.", thought, right)]


def _length(day: date) -> int:
    return 29 if day.month == 2 and isleap(day.year) else _LENGTHS[day.month - 1]
