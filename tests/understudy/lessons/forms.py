"""Objects that fit a JSON schema in the prompt, the way clients ask for them, and tools that only take down data.

The requests are composed at random from many parts, so that the model heeds the schema and not a sentence around it.
"""

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.understudy.lessons.conversation import Conversation
from tests.understudy.lessons.extraction import OTHER_KEYS, described, general
from tests.understudy.lessons.outside import filled
from tests.understudy.lessons.phrasing import pick_name, sentence_case
from tests.understudy.lessons.words import NOUNS, phrase

__all__ = ["property_of", "schema_conversation", "schema_of", "titled"]

_KINDS = {int: "integer", float: "number", str: "string", list: "array"}
_MODELS = (
    "Person", "Customer", "Order", "Event", "Item", "Contact", "Trip", "Booking", "Record", "Entry", "Result",
    "Answer", "Output", "Info", "Fact", "Report", "Message", "Profile", "Response",
)  # fmt: skip
_THINGS = ("user", "person", "text", "order", "event", "message", "sentence", "answer", "record")
_TAILS = (
    "What does it say?", "Who or what is meant?", "Which one is it?", "Who is that?", "What is this about?",
    "Note it down.", "What do we know?", "Fill in the form.", "Please take it down.", "Tell me the facts.",
    "Who is this?", "What is it?", "Give me the facts.", "Which facts are there?", "Who was it?", "Who are they?",
    "What do you read here?",
)  # fmt: skip

# The parts of a request. {give}, {thing}, {fits} and {schema} are drawn from the lists below.
_TASKS = (
    "Answer in JSON.", "Your answer is a JSON object.", "You read texts and fill in forms.",
    "Reply with JSON and nothing else.", "Take the facts from what the user writes.",
    "You are an expert for facts.", "As an expert, read the text and {give} its content as JSON.",
    "Your task is to read what is written and to {give} {thing} that {fits} {schema}.",
    "{Give} {thing} that {fits} {schema}.", "You always {give} {thing} that {fits} {schema}.",
    "The answer has to be {thing} that {fits} {schema}.", "Turn the text into {thing}. It {fits} {schema}.",
    "Understand the text and {give} it as {thing} that {fits} {schema}.", "From the text, {give} {thing}.",
    "You are an assistant that writes JSON.", "Fill in {schema} with what the text says.",
)  # fmt: skip
_BEFORE = (
    "This is the schema:", "Schema:", "JSON schema:", "Here is {schema}:", "Use {schema}:", "json_schema:",
    "It {fits} {schema}:", "{Give} {thing} that {fits} {schema}:", "The form of the answer:", "Here is a JSON schema:",
    "The object {fits} {schema}:", "", "Follow {schema}:", "Your JSON {fits} {schema}:", "Structure:", "<schema>",
)  # fmt: skip
_AFTER = (
    "Do not write the schema itself.", "{Give} an object and not the schema.", "Write no text before or after it.",
    "Nothing else.", "Only the object, please.", "Do not say the schema again.", "The JSON must be valid.",
    "No explanation.", "Never {do} before you answer.", "Keep {t} out of it.", "Be {a}.", "Say nothing of {t}.",
    "However {a} the text is.", "Let the {p} wait.", "Take care of {t}.", "{do} and then answer.",
    "{Give} {thing}, but not the schema.", "Leave no field out.", "Use no code block.",
    "Do not put a fence around it.", "Plain JSON without a code block.", "No fencing around it, please.",
)  # fmt: skip
_FENCED = (
    "Put it in a ```json block.", "{Give} {thing} in a ```json code block.", "The answer is a code block with JSON.",
    "Write the JSON between ```json and ```.", "Put a ```json fence around it.", "Use a code block for the JSON.",
    "{Give} the right JSON in a ```json fence, not the schema.", "One ```json block.",
)  # fmt: skip
_CHOICES = {
    "{give}": ("return", "write", "give", "produce", "output", "provide", "make", "create", "present", "send"),
    "{thing}": (
        "a JSON object", "one JSON object", "JSON", "an object", "valid JSON", "a JSON instance", "an instance",
        "the parsed object", "parsed JSON", "objects in JSON",
    ),
    "{fits}": (
        "fits", "matches", "follows", "obeys", "suits", "agrees with", "is valid under", "has the form of",
        "goes with", "keeps to",
    ),
    "{schema}": (
        "the schema", "this JSON schema", "the following schema", "this schema", "the given JSON schema",
        "the schema below", "the json_schema", "a JSON schema", "the form below",
    ),
}  # fmt: skip


def titled(key: str) -> str:
    """`start_time` as "Start Time", as libraries of data classes title a field."""
    return " ".join(part.capitalize() for part in key.split("_"))


def property_of(rng: Random, key: str, value: Any, style: int) -> dict[str, Any]:
    """The schema of one key with this value; `style` 0: its type alone, 1: with a title, 2: with a description."""
    if value is None:
        kind = rng.choice(("string", "integer"))
        chosen: dict[str, Any] = {"anyOf": [{"type": kind}, {"type": "null"}], "default": None}
    else:
        chosen = {"type": _KINDS[type(value)]}
        if isinstance(value, list):
            chosen = {"type": "array", "items": {"type": "string"}}
        elif isinstance(value, int) and rng.random() < 0.1:
            chosen["type"] = "number"
    if style == 1:
        chosen = {"title": titled(key)} | chosen if rng.random() < 0.6 else chosen | {"title": titled(key)}
    elif style == 2:
        text = rng.choice((f"The {key}", f"{titled(key)} of the {rng.choice(_THINGS)}", f"the {key} in the text"))
        chosen = {"description": text} | chosen if rng.random() < 0.5 else chosen | {"description": text}
    return chosen


def schema_of(rng: Random, answer: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema that `answer` fits, its parts in one of the usual orders."""
    style = rng.choice((0, 1, 1, 2))
    properties = {key: property_of(rng, key, value, style) for key, value in answer.items()}
    required = [key for key, value in answer.items() if value is not None]
    if rng.random() < 0.3:
        rng.shuffle(required)
    parts: dict[str, Any] = {"properties": properties, "required": required}
    if style == 1 or rng.random() < 0.3:
        parts["title"] = rng.choice(_MODELS)
    if rng.random() < 0.3:
        parts["description"] = f"A {rng.choice(_THINGS)}."
    parts["type"] = "object"
    if rng.random() < 0.25:
        parts["additionalProperties"] = False
    order = list(parts)
    if rng.random() < 0.3:
        order = ["type", *(key for key in order if key != "type")]
    elif rng.random() < 0.4:
        order.sort()
    return {key: parts[key] for key in order}


def _example(answer: dict[str, Any]) -> dict[str, Any]:
    """The shape of an answer, types in place of values."""
    return {key: _KINDS.get(type(value), "string or null") for key, value in answer.items()}


def _said(rng: Random, part: str) -> str:
    """A part of a request, its slots filled; it starts with a large letter."""
    for slot, words in _CHOICES.items():
        drawn = rng.choice(words)
        part = part.replace(slot, drawn).replace("{Give}", drawn.capitalize() if slot == "{give}" else "{Give}")
    return sentence_case(filled(rng, part)) if part[:1] != "<" and "```" not in part else part


def _facts(rng: Random) -> tuple[str, dict[str, Any]]:
    """A text, and the object of what it says."""
    roll = rng.random()
    if roll < 0.12:
        who, key = pick_name(rng), rng.choice(("likes", "items", "tags", "words", "list", "things"))
        things = [rng.choice(NOUNS) if rng.random() < 0.7 else phrase(rng) for _ in range(rng.randrange(2, 5))]
        text = rng.choice(("{n} likes {l}.", "{n} has {l}.", "{n} bought {l}.", "The list of {n}: {l}.")).replace(
            "{l}", f"{', '.join(things[:-1])} and {things[-1]}"
        )
        answer: dict[str, Any] = {"name": who, key: things}
        return text.replace("{n}", who), answer
    text, values = general(rng) if roll < 0.35 else described(rng)
    keys = list(values)
    if rng.random() < 0.25:
        keys = rng.sample(keys, rng.randrange(1, len(keys) + 1))
    answer = {
        rng.choice(OTHER_KEYS.get(key, (key,))) if rng.random() < 0.35 else key.replace(" ", "_"): values[key]
        for key in keys
    }
    if rng.random() < 0.1:
        key = rng.choice([noun for noun in NOUNS if noun not in answer and noun not in text])
        answer[key] = None
    return text, answer


def _shown(rng: Random, answer: dict[str, Any]) -> str:
    """The schema as text: on many lines, on one, or only a shape."""
    schema = _example(answer) if rng.random() < 0.15 else schema_of(rng, answer)
    if rng.random() < 0.5:
        return json.dumps(schema, indent=rng.choice((2, 2, 4)))
    written = json.dumps(schema, separators=rng.choice(((", ", ": "), (", ", ": "), (",", ":"))))
    if rng.random() < 0.15:  # as templates leave them that double the braces of their slots
        written = written.replace("{", "{{").replace("}", "}}")
    return written


def _set_in(rng: Random, request: str) -> str:
    """The request as it stands in somebody's source: its lines moved to the right, blank lines around it."""
    blanks = " " * rng.choice((2, 4, 8, 12))
    lines = [blanks + line if line and line[0] not in ' "}]' else line for line in request.split("\n")]
    return f"\n{chr(10).join(lines)}\n"


def schema_conversation(rng: Random, extra: Callable[[Random], str]) -> Conversation:
    """A text whose facts are asked for in a schema's form. `extra` draws other words of a system prompt."""
    text, answer = _facts(rng)
    if rng.random() < 0.35:
        text = f"{text} {rng.choice(_TAILS)}"
    fenced = rng.random() < 0.25
    tasks = [_said(rng, task) for task in rng.sample(_TASKS, rng.choice((0, 1, 1, 2)))]
    closing = [_said(rng, part) for part in rng.sample(_AFTER, rng.choice((0, 1, 1, 2)))]
    if fenced:
        closing = [part for part in closing if not any(word in part for word in ("fenc", "code"))]
    fence = _said(rng, rng.choice(_FENCED)) if fenced else ""
    gap = rng.choice(("\n", "\n\n", "\n\n", "\n\n\n"))
    before = rng.choice(_BEFORE)
    shown = _shown(rng, answer) + ("\n</schema>" if before == "<schema>" else "")
    opening = " ".join(part for part in (*tasks, _said(rng, before)) if part)
    apart = fenced and rng.random() < 0.5
    rest = " ".join(closing if apart or not fenced else [*closing, fence])
    request = gap.join(part for part in (opening, shown, rest) if part)
    if rng.random() < 0.2:
        request = _set_in(rng, request)
    messages: list[dict[str, Any]] = []
    place = rng.random()
    if place < 0.55:
        system = f"{extra(rng)}{gap}{request}" if rng.random() < 0.2 else request
        messages.append({"role": "system", "content": system})
        asked = text
    else:
        if rng.random() < 0.2:
            messages.append({"role": "system", "content": extra(rng)})
        asked = f"{text}{gap}{request}" if place < 0.8 else f"{request}{gap}{rng.choice(('Text: ', '', ''))}{text}"
    if apart:
        asked = f"{asked}{gap}{fence}"
    messages.append({"role": "user", "content": asked})
    written = json.dumps(answer, ensure_ascii=False)
    if fenced:
        written = f"```json\n{written}\n```"
    thought = f"The keys are {', '.join(answer)}. I take the values from the text."
    messages.append({"role": "assistant", "content": written, "reasoning_content": thought})
    return Conversation(messages, [], rng.random() < 0.1)
