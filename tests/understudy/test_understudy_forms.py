"""What is taught of tools and schemas fits them; the test set's questions about both know right from wrong."""

import json
import re
from random import Random
from typing import Any

import pytest
import torch

from tests.understudy.corpus import documents
from tests.understudy.examination import questions
from tests.understudy.lessons.forms import schema_conversation, schema_of
from tests.understudy.lessons.tools import tool_conversation
from tests.understudy.train import blended

TYPES: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "number": (int, float), "array": list}


def asked_first(rng: Random) -> tuple[str, str]:
    return "What is the capital of Peru?", "Lima."


def written_schema(text: str) -> dict[str, Any]:
    """The first JSON object in a prompt that declares properties, or a shape."""
    text = text.replace("{{", "{").replace("}}", "}") if "{{" in text else text
    return json.JSONDecoder().raw_decode(text[text.index("{") :])[0]  # type: ignore[no-any-return]


def test_schemas_have_the_answers_keys_and_types() -> None:
    rng = Random(1)
    answer = {"name": "Anna", "age": 3, "price": 2.5, "items": ["a"], "note": None}
    for _ in range(60):
        schema = schema_of(rng, answer)
        assert list(schema["properties"]) == list(answer)
        assert set(schema["required"]) == {"name", "age", "price", "items"}
        for key, part in schema["properties"].items():
            if answer[key] is None:
                assert {"type": "null"} in part["anyOf"]
            else:
                assert isinstance(answer[key], TYPES[part["type"]])


def test_answers_to_schemas_have_their_keys_and_a_fence_when_requested() -> None:
    rng, fenced = Random(2), 0
    for _ in range(300):
        messages = schema_conversation(rng, lambda _: "Be brief.").messages
        written = messages[-1]["content"]
        prompt = "\n".join(message["content"] for message in messages[:-1])
        assert written[0] == "{" or "```" in prompt or "code block" in prompt
        fenced += written.startswith("```json\n")
        answer = json.loads(written.removeprefix("```json\n").removesuffix("\n```"))
        if "{{" not in prompt:
            schema = written_schema(prompt)
            assert list(schema.get("properties", schema)) == list(answer)
        for value in answer.values():
            for part in value if isinstance(value, list) else [value]:
                assert part is None or str(part) in prompt
    assert 30 < fenced < 150


def test_calls_of_the_corpus_name_a_tool_on_offer_and_its_arguments() -> None:
    rng, calls = Random(3), 0
    for _ in range(400):
        talk = tool_conversation(rng, asked_first, lambda _: "Be brief.", thinking=False)
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in talk.tools}
        for message in talk.messages:
            for call in message.get("tool_calls", ()):
                parameters, given = offered[call["function"]["name"]], call["function"]["arguments"]
                assert set(parameters.get("required", ())) <= set(given) <= set(parameters["properties"])
                assert all(isinstance(v, TYPES[parameters["properties"][k]["type"]]) for k, v in given.items())
                calls += 1
    assert calls > 300


def client_questions(subject: str) -> list[Any]:
    return [question for question in questions() if question.subject == subject]


def test_questions_by_a_schema_want_the_object_and_the_fence_they_ask_for() -> None:
    plain, *_, fenced = client_questions("JSON by a schema")[:3]
    said = plain.messages[-1]["content"]
    name, age = re.findall(r"(\w+) is (\d+)", said)[0]
    right = json.dumps({"name": name, "age": int(age)})
    assert plain.right(right)
    for wrong in (f"```json\n{right}\n```", json.dumps({"name": name}), "I don't know.", right[:-1]):
        assert not plain.right(wrong)
    town = re.findall(r"from (\w+) to", fenced.messages[-1]["content"])[0]
    ride = json.dumps({"origin": town, "destination": "Vienna"})
    assert fenced.right(f"```json\n{ride}\n```")
    assert not fenced.right(ride)


def test_questions_for_tools_want_one_call_or_none_or_the_result() -> None:
    person, weather, none, told = client_questions("tools of clients")[:4]
    name, age = re.findall(r"(\w+) is (\d+)", person.messages[-1]["content"])[0]
    call = json.dumps({"name": "Person", "arguments": {"name": name, "age": int(age)}})
    assert person.right(f"<tool_call>\n{call}\n</tool_call>")
    assert not person.right(f"<tool_call>\n{call}\n</tool_call>" * 2)
    town = re.findall(r"weather in (\w+) is", weather.messages[-1]["content"])[0]
    assert weather.right(json.dumps({"name": "GetWeather", "arguments": {"city": town}}).join(_MARKS))
    extra = {"name": "GetWeather", "arguments": {"city": town, "units": "metric"}}
    assert not weather.right(json.dumps(extra).join(_MARKS))
    assert not none.right(call.join(_MARKS))
    assert told.right(told.messages[-1]["content"])
    assert not told.right("It is warm.")


_MARKS = ("<tool_call>", "</tool_call>")


def test_sentences_around_held_out_schemas_are_not_in_the_corpus() -> None:
    trained = {s.text for d in documents(11, 4000) for s in d if not s.learn}
    for question in client_questions("JSON by a schema"):
        for message in question.messages:
            sentences = [line for line in message["content"].split("\n") if line.endswith((".", ":", "schema"))]
            assert not any(sentence in text for sentence in sentences for text in trained)


@pytest.mark.parametrize(("keep", "mean"), [(0.0, 4.0), (0.25, 3.0), (1.0, 0.0)])
def test_blended_weights_are_the_mean_of_both(keep: float, mean: float) -> None:
    trained, start = ({"w": torch.full((2, 2), value)} for value in (4.0, 0.0))
    assert torch.equal(blended(trained, start, keep)["w"], torch.full((2, 2), mean))
