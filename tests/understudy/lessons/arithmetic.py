"""Sums, differences, products, quotients, comparisons and word problems, with the steps when the model thinks."""

from random import Random

from tests.understudy.lessons.conversation import Exchange
from tests.understudy.lessons.geography import NUMBERS
from tests.understudy.lessons.phrasing import casual, pick_name, polite, possessive

__all__ = ["add_steps", "calculate", "compare", "count", "multiply_steps", "word_problem"]

_ADD = (
    "{a} + {b}",
    "{a}+{b}",
    "{a} plus {b}",
    "the sum of {a} and {b}",
    "{a} and {b} added together",
    "{a} added to {b}",
)
_ADD_ORDERS = (
    "Add {a} and {b}.",
    "Add {b} to {a}.",
    "Sum up {a} and {b}.",
    "I have {a} and get {b}. How much is that together?",
)
_SUBTRACT = ("{a} - {b}", "{a}-{b}", "{a} minus {b}", "{a} take away {b}", "{b} subtracted from {a}", "{a} less {b}")
_SUBTRACT_ORDERS = (
    "Subtract {b} from {a}.",
    "Take away {b} from {a}.",
    "From {a} remove {b}. How much is it?",
    "What is left of {a} if I take {b} away?",
    "How much of {a} is left after I remove {b}?",
    "How much remains of {a} without {b}?",
    "I take {b} from {a}. How much do I have left?",
    "{a} with {b} taken away is what?",
    "I have {a} and spend {b}. How much remains?",
    "What is left of {a} after {b} is taken off?",
    "How much remains of {a} after you remove {b}?",
    "After taking {b} from {a}, what remains?",
    "What remains when {b} goes from {a}?",
    "{b} is taken away from {a}. What remains?",
    "What stays of {a} after I lose {b}?",
    "What remains of {a} if {b} leaves?",
    "Of {a}, what remains without {b}?",
    "How much of {a} remains once {b} is gone?",
)
_MULTIPLY = (
    "{a}*{b}",
    "{a}x{b}",
    "{a} * {b}",
    "{a} x {b}",
    "{a} × {b}",
    "{a} times {b}",
    "{a} multiplied by {b}",
    "the product of {a} and {b}",
)
_MULTIPLY_ORDERS = (
    "Multiply {a} by {b}.",
    "Multiply {a} and {b}.",
    "Take {a} times {b}.",
    "How much are {a} groups of {b}?",
)
_DIVIDE_ORDERS = (
    "Divide {a} by {b}.",
    "Split {a} into {b} equal parts.",
    "How often does {b} fit into {a}?",
    "Share {a} among {b}.",
    "What is {a} shared by {b}?",
    "{a} split in {b} equal parts is how much?",
)
_DIVIDE = ("{a} / {b}", "{a} ÷ {b}", "{a} divided by {b}", "{a}/{b}")
_FRAMES = (
    "What is {x}?", "What is {x}?", "What's {x}?", "Calculate {x}.", "Compute {x}.", "{x}", "{x} =", "{x} = ?", "{x}?",
    "How much is {x}?", "Solve {x}.", "Work out {x}.", "Can you calculate {x}?", "Tell me {x}.", "Please compute {x}.",
    "what does {x} equal?", "What do I get for {x}?", "I need {x}.", "Evaluate {x}.", "Give me the result of {x}.",
)  # fmt: skip
_STEPWISE = (
    "Calculate {x} step by step.", "Work out {x} step by step.", "Solve {x} in steps.", "Step by step: {x}",
    "{x}, step by step", "What is {x}? Go step by step.", "Find {x} one step at a time.",
    "How much is {x}? Show the steps.",
    "Compute {x} and show every step.", "Do {x} in small steps.", "Tell me {x}, step by step.",
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
    forms: tuple[str, ...]
    orders: tuple[str, ...]
    kind = rng.choices(("add", "subtract", "multiply", "divide"), (4, 4, 3, 2))[0]
    if kind == "add":
        a, b = _operands(rng, (1, 2, 2, 3, 3)), _operands(rng, (1, 2, 2, 3))
        if rng.random() < 0.05:
            a, b = _operands(rng, (4,)), _operands(rng, (2, 3, 4))
        result, sign, forms, orders, steps = a + b, "+", _ADD, _ADD_ORDERS, add_steps(a, b)
    elif kind == "subtract":
        a, b = _operands(rng, (1, 2, 2, 3, 3)), _operands(rng, (1, 2, 2, 3))
        if a < b and rng.random() < 0.85:
            a, b = b, a
        result, sign, forms, orders = a - b, "-", _SUBTRACT, _SUBTRACT_ORDERS
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
        result, sign, forms, orders, steps = a * b, "×", _MULTIPLY, _MULTIPLY_ORDERS, multiply_steps(a, b)
    else:
        b, result = rng.randrange(1, 13), rng.randrange(0, 21)
        a, sign, forms, orders = b * result, "÷", _DIVIDE, _DIVIDE_ORDERS
        steps = f"{b} × {result} = {a}, so {a} ÷ {b} = {result}."
        if b > 1 and rng.random() < 0.15:
            rest = rng.randrange(1, b)
            question = rng.choice(_FRAMES).replace(
                "{x}", rng.choice(forms).replace("{a}", str(a + rest)).replace("{b}", str(b))
            )
            answer = f"{a + rest} ÷ {b} = {result}, remainder {rest}."
            return [
                Exchange(
                    polite(rng, question), answer, f"{b} × {result} = {a}, and {rest} remains.", answer.split("= ")[1]
                )
            ]
    written = rng.choice(forms).replace("{a}", str(a)).replace("{b}", str(b))
    if a <= 12 and b <= 12 and rng.random() < 0.08:
        written = rng.choice(forms[2:]).replace("{a}", NUMBERS[a]).replace("{b}", NUMBERS[b])
    framed = rng.choice(_STEPWISE if rng.random() < 0.12 else _FRAMES).replace("{x}", written)
    if rng.random() < 0.2:
        framed = rng.choice(orders).replace("{a}", str(a)).replace("{b}", str(b))
    question = polite(rng, casual(rng, framed, written))
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


_AGES = (
    "{f} is {b} years old. {s} is {g} years {w} than {f}. ", "{s} is {g} years {w} than {f}, who is {b}. ",
    "{f} is {b}. {s} is {g} years {w}. ", "{f} is {b} years old and {s} is {g} years {w}. ",
    "My friend {f} is {b}. {s} is {g} years {w} than {f}. ", "{f} turned {b}. {s} is {g} years {w} than {f}. ",
)  # fmt: skip
_AGE_QUESTIONS = (
    "How old is {s}?", "How old is {s}?", "How old is {s} now?", "What age is {s}?", "Tell me the age of {s}.",
    "Give me {p} age.", "So how old is {s}?", "What is the age of {s}?", "{p} age is what?", "Work out {p} age.",
    "Which age has {s}?", "I want to know {p} age.", "How many years old is {s}?",
)  # fmt: skip


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
            (
                "What is the {w} of {x}?",
                "Which is the {w}: {x}?",
                "Find the {w} number: {x}",
                "{w} of {x}?",
                "Which of {x} is the {w}?",
                "Which number is the {w} of {x}?",
                "Among {x}, which is {w}?",
                "{x}: which number is the {w}?",
                "Here are {x}. Which is the {w} one?",
                "Of {x}, what is the {w}?",
                "The {w} number among {x}, please.",
                "Between {x}, which number is {w}?",
            )
        )
        question = ask.replace("{w}", word).replace("{x}", ", ".join(map(str, numbers)))
        ordered = ", ".join(map(str, sorted(numbers)))
        if rng.random() < 0.4:
            last = f", {numbers[-1]}"
            question = question.replace(last, rng.choice((" and", " or")) + last[1:], 1)
        return [Exchange(casual(rng, question), f"The {word} is {value}.", f"In order: {ordered}.", str(value))]
    first, second = pick_name(rng), pick_name(rng)
    while second == first:
        second = pick_name(rng)
    base, gap = rng.randrange(5, 60), rng.randrange(1, 15 if rng.random() < 0.6 else 40)
    older = rng.random() < 0.6 or base <= gap
    age = base + gap if older else base - gap
    word = "older" if older else "younger"
    told, ask = rng.choice(_AGES), rng.choice(_AGE_QUESTIONS)
    if rng.random() < 0.2:
        told, ask = "If {f} is {b} and {s} is {g} years {w}, ", "how old is {s}?"
    question = told + ask
    slots = {"f": first, "b": base, "s": second, "g": gap, "w": word, "p": possessive(second)}
    for slot, content in slots.items():
        question = question.replace("{" + slot + "}", str(content))
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
    words = max(start, end) <= 12 and rng.random() < 0.4
    first, last = (NUMBERS[start], NUMBERS[end]) if words else (str(start), str(end))
    question = question.replace("{a}", first).replace("{b}", last).replace("{s}", by)
    answer = ", ".join(map(str, numbers))
    return [Exchange(polite(rng, casual(rng, question)), answer, f"I start at {start} and stop at {end}.")]


_THINGS = [
    "apples", "books", "coins", "pens", "stamps", "marbles", "cards", "cookies", "shells", "tickets", "eggs",
    "stickers", "flowers", "balls", "keys", "stones", "pears", "photos", "hats", "spoons", "ropes", "bottles",
    "letters", "chairs", "candles", "maps", "bells", "plates", "ribbons", "nuts",
]  # fmt: skip
_GAINS = ("gets", "receives", "finds", "buys", "wins", "picks up", "collects", "is given")
_LOSSES = ("gives away", "loses", "sells", "throws away", "lends", "drops", "hands out", "uses")
_HOLDERS = ("boxes", "bags", "baskets", "rows", "shelves", "drawers", "tables", "jars")


def word_problem(rng: Random) -> list[Exchange]:
    """One or two steps of arithmetic in a little story."""
    name, thing, holder = pick_name(rng), rng.choice(_THINGS), rng.choice(_HOLDERS)
    gain, loss = rng.choice(_GAINS), rng.choice(_LOSSES)
    has = rng.choice(("has", "had", "owns", "starts with", "keeps"))
    more = rng.choice((" more", "", " others"))
    a, b, c = rng.randrange(5, 100), rng.randrange(2, 40), rng.randrange(2, 20)
    kind = rng.randrange(8)
    if kind == 0:
        result, steps = a + b, f"{a} + {b} = {a + b}."
        story = rng.choice(
            (
                f"{name} {has} {a} {thing} and {gain} {b}{more}.",
                f"{name} {has} {a} {thing}. Then {name} {gain} {b}{more}.",
            )
        )
    elif kind == 1:
        a += b
        result, steps = a - b, f"{a} - {b} = {a - b}."
        story = rng.choice(
            (f"{name} {has} {a} {thing} and {loss} {b}.", f"{name} {has} {a} {thing}. Then {name} {loss} {b} of them.")
        )
    elif kind in (2, 3):
        a, b = rng.randrange(2, 13), rng.randrange(2, 13) if kind == 2 else rng.randrange(2, 30)
        result, steps = a * b, f"{a} × {b} = {a * b}."
        if rng.random() < 0.5:
            story = rng.choice((f"{a} {holder} with {b} {thing} each.",
            f"Here are {a} {holder}, and in each one are {b} {thing}.",
                                f"Each of {a} {holder} has {b} {thing}."))  # fmt: skip
            ask = rng.choice(
                (
                    f"How many {thing} are there?",
                    f"How many {thing} are there in all?",
                    f"How many {thing} is that together?",
                )
            )
            return [Exchange(polite(rng, f"{story} {ask}"), f"There are {result} {thing}.", steps, str(result))]
        story = f"{name} {has} {a} {holder} with {b} {thing} in each."
    elif kind == 4:
        b, result = rng.randrange(2, 11), rng.randrange(2, 13)
        a = b * result
        question = f"{name} shares {a} {thing} equally among {b} friends. How many {thing} does each friend get?"
        return [
            Exchange(
                polite(rng, question), f"Each friend gets {result} {thing}.", f"{a} ÷ {b} = {result}.", str(result)
            )
        ]
    elif kind in (5, 6):
        a += c
        then = rng.choice(("and then", "then", "and later"))
        if rng.random() < 0.6:
            story = f"{name} {has} {a} {thing}, {gain} {b}{more} {then} {loss} {c}."
            result, steps = a + b - c, f"{a} + {b} = {a + b}. {a + b} - {c} = {a + b - c}."
        else:
            story = f"{name} {has} {a} {thing}, {loss} {c} {then} {gain} {b}{more}."
            result, steps = a - c + b, f"{a} - {c} = {a - c}. {a - c} + {b} = {a - c + b}."
    else:
        a, b = rng.randrange(2, 11), rng.randrange(2, 11)
        story = f"{name} {has} {a} {holder} with {b} {thing} each and {gain} {c}{more}."
        result, steps = a * b + c, f"{a} × {b} = {a * b}. {a * b} + {c} = {a * b + c}."
    ask = rng.choice((f"How many {thing} does {name} have now?", f"How many {thing} does {name} have?",
    f"How many {thing} are there now?",
                      f"How many {thing} does {name} have in the end?", f"How many {thing} is that?"))  # fmt: skip
    answer = f"{name} has {result} {thing}."
    if kind >= 5:  # two steps: the answer shows them, thinking or not
        answer = f"{steps} {answer}"
    return [Exchange(polite(rng, f"{story} {ask}"), answer, steps, str(result))]
