"""The test set's requests as client packages write them: a JSON schema in the prompt, and tools of data classes.

The sentences around the schemas are not in the training, nor are they any package's own.
"""

import json
from random import Random
from typing import Any

from tests.understudy.lessons.world import FAMILIAR
from tests.understudy.question import Question, calls_of, object_of, tool

__all__ = ["client_questions"]


def _model(title: str, /, **kinds: str) -> dict[str, Any]:
    """The schema of a data class, with a title for each field."""
    properties = {key: {"title": key.capitalize(), "type": kind} for key, kind in kinds.items()}
    return {"properties": properties, "required": list(kinds), "title": title, "type": "object"}


def _json(asked: list[dict[str, Any]], want: dict[str, Any], fenced: bool = False) -> Question:
    def right(answer: str) -> bool:
        text = answer.strip()
        if fenced != (text.startswith("```json\n") and text.endswith("\n```")):
            return False
        return object_of(text.removeprefix("```json\n").removesuffix("\n```")) == want

    return Question("JSON by a schema", asked, right)


def _schemas(rng: Random, name: str, town: str) -> list[Question]:
    age, count, price = rng.randrange(18, 80), rng.randrange(2, 40), rng.randrange(5, 200)
    person = json.dumps(_model("Person", name="string", age="integer"), indent=2)
    order = json.dumps(_model("Order", name="string", quantity="integer", item="string", price="integer"))
    ride = json.dumps(_model("Ride", origin="string", destination="string"), indent=2)
    return [
        _json(
            [
                {"role": "system", "content": "Grasp what you are told and hand over parsed objects in json that "
                 f"conform to this json_schema:\n\n{person}\n\nBe certain to hand over an instance, never the schema"},
                {"role": "user", "content": f"{name} is {age} years old. Who is it?"},
            ],
            {"name": name, "age": age},
        ),
        _json(
            [{"role": "user", "content": f"{name} wants {count} lamps and will pay {price} dollars.\n\nRespond with "
              f"JSON compatible with this schema, no matter what:\n\n{order}\n\nKeep Markdown fencing away from it."}],
            {"name": name, "quantity": count, "item": "lamps", "price": price},
        ),
        _json(
            [
                {"role": "system", "content": f"Hand over JSON which conforms to:\n{ride}"},
                {"role": "user", "content": f"The bus goes from {town} to Vienna.\n\n"
                 "Enclose the correct JSON response in a ```json codeblock."},
            ],
            {"origin": town, "destination": "Vienna"},
            fenced=True,
        ),
    ]  # fmt: skip


def _tools(rng: Random, name: str, town: str) -> list[Question]:
    age, degrees = rng.randrange(18, 80), rng.randrange(-5, 35)
    schema = _model("Person", name="string", age="integer")
    function: dict[str, Any] = {"name": "Person", "description": "Correct details of a Person, every required one",
                "parameters": {key: part for key, part in schema.items() if key != "title"}}  # fmt: skip
    person = {"type": "function", "function": function}
    weather = tool("GetWeather", "Get the weather of a city.", city="string")
    weather["function"]["parameters"]["properties"]["units"] = {"type": "string", "enum": ["metric", "imperial"]}
    flights = tool("book_flight", "Book a flight", start="string", end="string")

    def called(want: str, /, **arguments: Any) -> Any:
        return lambda answer: calls_of(answer) == [{"name": want, "arguments": arguments}]

    country = rng.choice(FAMILIAR)
    said = f"It is {degrees} degrees in {town} and the wind comes from the west."
    question = f"Tell me what the weather in {town} is like at the moment."
    call = {"type": "function", "id": "c", "function": {"name": "GetWeather", "arguments": json.dumps({"city": town})}}
    return [
        Question("tools of clients", [{"role": "user", "content": f"{name} is {age} years old. Who is it?"}],
                 called("Person", name=name, age=age), [person]),
        Question("tools of clients", [{"role": "user", "content": question}], called("GetWeather", city=town),
                 rng.sample([person, weather, flights], 3)),
        Question("tools of clients", [{"role": "user", "content": f"Which capital does {country.name} have, pray?"}],
                 lambda answer: not calls_of(answer) and country.capital in answer, [weather, flights]),
        Question("tools of clients",
                 [{"role": "user", "content": question}, {"role": "assistant", "content": "", "tool_calls": [call]},
                  {"role": "tool", "tool_call_id": "c", "content": said}],
                 lambda answer: said.rstrip(".") in answer, [weather]),
    ]  # fmt: skip


def client_questions(rng: Random, people: tuple[str, ...], towns: tuple[str, ...]) -> list[Question]:
    """Seven questions for each person and town."""
    made: list[Question] = []
    for name, town in zip(people, towns, strict=True):
        made += [*_schemas(rng, name, town), *_tools(rng, name, town)]
    return made
