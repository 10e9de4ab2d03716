"""Sums, differences, products, quotients, comparisons and word problems, with the steps when the model thinks."""

from random import Random

from app.understudy.lessons.conversation import Exchange
from app.understudy.lessons.geography import NUMBERS
from app.understudy.lessons.phrasing import casual, pick_name, polite

__all__ = ["add_steps", "calculate", "compare", "count", "multiply_steps", "word_problem"]

_ADD = (
    "{a} + {b}",
    "{a}+{b}",
    "{a} plus {b}",
    "the sum of {a} and {b}",
    "{a} and {b} added together",
    "{a} added to {b}",
)
_SUBTRACT = ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} take away {b}", "{b} subtracted from {a}", "{a} less {b}")
_MULTIPLY = (
    "{a} * {b}",
    "{a} x {b}",
    "{a} × {b}",
    "{a} times {b}",
    "{a} multiplied by {b}",
    "the product of {a} and {b}",
)
_DIVIDE = ("{a} / {b}", "{a} ÷ {b}", "{a} divided by {b}", "{a}/{b}")
_FRAMES = (
    "What is {x}?", "What is {x}?", "What's {x}?", "Calculate {x}.", "Compute {x}.", "{x}", "{x} =", "{x} = ?", "{x}?",
    "How much is {x}?", "Solve {x}.", "Work out {x}.", "Can you calculate {x}?", "Tell me {x}.", "Please compute {x}.",
    "what does {x} equal?", "What do I get for {x}?", "I need {x}.", "Evaluate {x}.", "Give me the result of {x}.",
)  # fmt: skip


def _split(number: int) -> list[int]:
    """347 -> [300, 40, 7]; zero digits fall away, zero itself stays."""
    digits = str(number)
    parts = [int(digit) * 10 ** (len(digits) - 1 - at) for at, digit in enumerate(digits)]
    return [part for part in parts if part] or [0]


def add_steps(a: int, b: int) -> str:
    """The written steps of a + b, place by place from the ones."""
    if a < 10 and b < 10:
        return f"{a} + {b} = {a + b}."
    steps, carry, place = [], 0, 0
    while a >= 10**place or b >= 10**place:
        x, y = a // 10**place % 10, b // 10**place % 10
        total = x + y + carry
        steps.append(f"{x} + {y}{' + 1' if carry else ''} = {total}")
        carry, place = total // 10, place + 1
    return f"{', '.join(steps)}. So {a} + {b} = {a + b}."


def multiply_steps(a: int, b: int) -> str:
    """The written steps of a * b: split the smaller factor, add the parts."""
    small, large = min(a, b), max(a, b)
    parts = _split(small)
    if len(parts) == 1:
        return f"{a} × {b} = {a * b}."
    split = " + ".join(f"{large} × {part}" for part in parts)
    products = " + ".join(str(large * part) for part in parts)
    return f"{a} × {b} = {split} = {products} = {a * b}."


def _operands(rng: Random, digits: tuple[int, ...]) -> int:
    size = rng.choice(digits)
    return rng.randrange(10 ** (size - 1) if size > 1 else 0, 10**size)


def calculate(rng: Random) -> list[Exchange]:
    """One calculation, sometimes with a follow-up on its result."""
    kind = rng.choices(("add", "subtract", "multiply", "divide"), (4, 4, 3, 2))[0]
    if kind == "add":
        a, b = _operands(rng, (1, 2, 2, 3, 3)), _operands(rng, (1, 2, 2, 3))
        if rng.random() < 0.05:
            a, b = _operands(rng, (4,)), _operands(rng, (2, 3, 4))
        result, sign, forms, steps = a + b, "+", _ADD, add_steps(a, b)
    elif kind == "subtract":
        a, b = _operands(rng, (1, 2, 2, 3, 3)), _operands(rng, (1, 2, 2, 3))
        if a < b and rng.random() < 0.85:
            a, b = b, a
        result, sign, forms = a - b, "-", _SUBTRACT
        steps = f"{a} - {b} = {a - b}."
        if len(parts := _split(b)) > 1 and a > b:
            rest, chain = a, []
            for part in parts:
                chain.append(f"{rest} - {part} = {rest - part}")
                rest -= part
            steps = f"{', '.join(chain)}. So {a} - {b} = {a - b}."
    elif kind == "multiply":
        a, b = rng.randrange(0, 13), rng.randrange(0, 13)
        if rng.random() < 0.35:
            a, b = rng.randrange(2, 100), rng.randrange(2, 10)
        elif rng.random() < 0.25:
            a, b = rng.randrange(11, 100), rng.randrange(11, 100)
        if rng.random() < 0.5:
            a, b = b, a
        result, sign, forms, steps = a * b, "×", _MULTIPLY, multiply_steps(a, b)
    else:
        b, result = rng.randrange(1, 13), rng.randrange(0, 21)
        a, sign, forms = b * result, "÷", _DIVIDE
        steps = f"{b} × {result} = {a}, so {a} ÷ {b} = {result}."
    written = rng.choice(forms).replace("{a}", str(a)).replace("{b}", str(b))
    if a <= 12 and b <= 12 and rng.random() < 0.08:
        written = rng.choice(forms[2:]).replace("{a}", NUMBERS[a]).replace("{b}", NUMBERS[b])
    question = polite(rng, casual(rng, rng.choice(_FRAMES).replace("{x}", written), written))
    # Two large factors have no answer at a glance: the answer itself shows the parts.
    answer = multiply_steps(a, b) if sign == "×" and min(a, b) > 12 else f"{a} {sign} {b} = {result}."
    scene = [Exchange(question, answer, steps, str(result))]
    if rng.random() < 0.15 and 0 <= result < 500:
        c = rng.randrange(1, 20)
        if rng.random() < 0.5 or result < c:
            ask = rng.choice(("And plus {c}?", "Add {c} to that.", "Now add {c}.", "plus {c}?", "And {c} more?"))
            line, after = f"{result} + {c} = {result + c}.", result + c
        else:
            ask = rng.choice(("And minus {c}?", "Subtract {c} from that.", "Now take away {c}.", "minus {c}?"))
            line, after = f"{result} - {c} = {result - c}.", result - c
        scene.append(Exchange(casual(rng, ask.replace("{c}", str(c))), line, line, str(after)))
    return scene


def compare(rng: Random) -> list[Exchange]:
    """Which number is larger, sorting, even and odd, who is older."""
    kind = rng.randrange(5)
    if kind == 0:
        a, b = rng.randrange(1000), rng.randrange(1000 if rng.random() < 0.5 else 100)
        if a == b:
            b += 1
        word, value = rng.choice(
            (("larger", max(a, b)), ("smaller", min(a, b)), ("bigger", max(a, b)), ("greater", max(a, b)))
        )
        ask = rng.choice(
            (
                "Which is {w}, {a} or {b}?",
                "Which number is {w}: {a} or {b}?",
                "What is {w}, {a} or {b}?",
                "{a} or {b}, which is {w}?",
            )
        )
        question = ask.replace("{w}", word).replace("{a}", str(a)).replace("{b}", str(b))
        thought = f"{a} is {'more' if a > b else 'less'} than {b}."
        return [Exchange(polite(rng, casual(rng, question)), f"{value} is {word}.", thought, str(value))]
    if kind == 1:
        numbers = rng.sample(range(100 if rng.random() < 0.7 else 1000), rng.choice((3, 3, 4, 5)))
        up = rng.random() < 0.7
        ask = rng.choice(("Sort {x}{d}.", "Sort these numbers{d}: {x}", "Put {x} in order{d}.", "Order {x}{d}."))
        direction = (
            rng.choice((" from small to large", " ascending", ""))
            if up
            else rng.choice((" from large to small", " descending"))
        )
        question = ask.replace("{x}", ", ".join(map(str, numbers))).replace("{d}", direction)
        ordered = ", ".join(map(str, sorted(numbers, reverse=not up)))
        thought = f"The {'smallest' if up else 'largest'} is {(min if up else max)(numbers)}. In order: {ordered}."
        return [Exchange(polite(rng, casual(rng, question)), ordered, thought, ordered)]
    if kind == 2:
        number = rng.randrange(1000)
        even = number % 2 == 0
        word = rng.choice(("even", "odd"))
        ask = rng.choice(("Is {a} {w}?", "Is {a} an {w} number?", "Is the number {a} {w}?"))
        question = ask.replace("{w}", word).replace("{a}", str(number))
        yes = even == (word == "even")
        answer = f"{'Yes' if yes else 'No'}, {number} is {'even' if even else 'odd'}."
        return [Exchange(casual(rng, question), answer, f"{number} ends in {number % 10}.", "Yes" if yes else "No")]
    if kind == 3:
        numbers = rng.sample(range(1, 200), rng.choice((3, 4)))
        word, value = rng.choice((("largest", max(numbers)), ("smallest", min(numbers))))
        ask = rng.choice(
            ("What is the {w} of {x}?", "Which is the {w}: {x}?", "Find the {w} number: {x}", "{w} of {x}?")
        )
        question = ask.replace("{w}", word).replace("{x}", ", ".join(map(str, numbers)))
        ordered = ", ".join(map(str, sorted(numbers)))
        return [Exchange(casual(rng, question), f"The {word} is {value}.", f"In order: {ordered}.", str(value))]
    first, second = pick_name(rng), pick_name(rng)
    while second == first:
        second = pick_name(rng)
    base, gap = rng.randrange(5, 60), rng.randrange(1, 15)
    older = rng.random() < 0.6 or base <= gap
    age = base + gap if older else base - gap
    word = "older" if older else "younger"
    question = rng.choice(
        (f"{first} is {base} years old. {second} is {gap} years {word} than {first}. How old is {second}?",
         f"{second} is {gap} years {word} than {first}, who is {base}. How old is {second}?",
         f"If {first} is {base} and {second} is {gap} years {word}, how old is {second}?")
    )  # fmt: skip
    thought = f"{first} is {base}. {gap} years {word}: {base} {'+' if older else '-'} {gap} = {age}."
    return [Exchange(polite(rng, question), f"{second} is {age} years old.", thought, str(age))]


def count(rng: Random) -> list[Exchange]:
    """Counting up and down, in ones or in larger steps."""
    start, length, step = (
        rng.choice((0, 1, 1, 1, rng.randrange(60))),
        rng.randrange(3, 11),
        rng.choice((1, 1, 1, 2, 5, 10)),
    )
    end = start + (length - 1) * step
    numbers = list(range(start, end + 1, step))
    by = f" in steps of {step}" if step > 1 else ""
    question = rng.choice(
        ("Count from {a} to {b}{s}.", "Please count from {a} to {b}{s}.", "Write the numbers from {a} to {b}{s}.")
    )
    if start == 1 and step == 1 and rng.random() < 0.5:
        question = rng.choice(("Count to {b}.", "Can you count to {b}?", "count up to {b}"))
    if rng.random() < 0.2:
        numbers.reverse()
        start, end = end, start
        question = rng.choice(("Count down from {a} to {b}{s}.", "Count backwards from {a} to {b}{s}."))
    question = question.replace("{a}", str(start)).replace("{b}", str(end)).replace("{s}", by)
    answer = ", ".join(map(str, numbers))
    return [Exchange(polite(rng, casual(rng, question)), answer, f"I start at {start} and stop at {end}.")]


_THINGS = ("apples", "books", "coins", "pens", "stamps", "marbles", "cards", "cookies", "shells", "tickets", "eggs", "stickers",
           "flowers", "balls", "keys", "stones", "pears", "photos")  # fmt: skip


def word_problem(rng: Random) -> list[Exchange]:
    """One or two steps of arithmetic in a little story."""
    name, thing = pick_name(rng), rng.choice(_THINGS)
    a, b, c = rng.randrange(5, 60), rng.randrange(2, 30), rng.randrange(2, 20)
    kind = rng.randrange(6)
    if kind == 0:
        story = rng.choice(
            (
                "{n} has {a} {t} and buys {b} more.",
                "{n} has {a} {t}. A friend gives {n} {b} more.",
                "{n} finds {b} {t} and had {a} before.",
            )
        )
        result, steps, verb = a + b, f"{a} + {b} = {a + b}.", "has"
    elif kind == 1:
        a += b
        story = rng.choice(
            (
                "{n} has {a} {t} and gives away {b}.",
                "{n} had {a} {t} and lost {b} of them.",
                "{n} has {a} {t}. {b} are sold.",
            )
        )
        result, steps, verb = a - b, f"{a} - {b} = {a - b}.", "has"
    elif kind == 2:
        a, b = rng.randrange(2, 13), rng.randrange(2, 13)
        story = rng.choice(
            (
                "{n} has {a} boxes with {b} {t} in each.",
                "{n} buys {a} bags. Each bag holds {b} {t}.",
                "There are {a} rows of {b} {t}, all of {n}.",
            )
        )
        result, steps, verb = a * b, f"{a} × {b} = {a * b}.", "has"
    elif kind == 3:
        b, result = rng.randrange(2, 11), rng.randrange(2, 13)
        a = b * result
        question = f"{name} shares {a} {thing} equally among {b} friends. How many {thing} does each friend get?"
        steps = f"{a} ÷ {b} = {result}."
        return [Exchange(polite(rng, question), f"Each friend gets {result} {thing}.", steps, str(result))]
    elif kind == 4:
        a += c
        story = "{n} has {a} {t}, gets {b} more and then gives away {c}."
        result, steps, verb = a + b - c, f"{a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}.", "has"
    else:
        a, b = rng.randrange(2, 11), rng.randrange(2, 11)
        story = "{n} buys {a} bags with {b} {t} each and finds {c} more {t}."
        result, steps, verb = a * b + c, f"{a} × {b} = {a * b}. {a * b} + {c} = {a * b + c}.", "has"
    ask = rng.choice(("How many {t} does {n} have now?", "How many {t} does {n} have?", "How many {t} are there now?"))
    question = f"{story} {ask}"
    for slot, value in (("{n}", name), ("{a}", str(a)), ("{b}", str(b)), ("{c}", str(c)), ("{t}", thing)):
        question = question.replace(slot, value)
    answer = f"{name} {verb} {result} {thing}."
    if kind >= 4:  # two steps: the answer shows them, thinking or not
        answer = f"{steps} {answer}"
    return [Exchange(polite(rng, question), answer, steps, str(result))]
