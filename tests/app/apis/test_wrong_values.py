"""Whatever is wrong with a field, the answer names it and says in plain words what it takes."""

from __future__ import annotations

import json
import random
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from app.apis.openai.requests import ChatRequest
from app.route_table import ROUTES
from app.server.decoding import decode
from app.server.errors import ApiError

ROUTES_WITH_BODIES = [route for route in ROUTES if route.body is not None]
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/generate": {"text": "hi"},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
INTERNAL = re.compile(
    r"`|\b(str|int|float|bool|dict|list\[|NoneType|array of length|msgspec|Struct|Expected|regex|enum|\.\.\.\])\b"
)
_EACH = 4  # values for each field
TYPE_NAMES = {"frozenset", "tuple", "Raw", "Traceback"}


def deep(levels: int) -> object:
    value: object = 0
    for _ in range(levels):
        value = {"x": [value]}
    return value


def wrong_values(random_: random.Random) -> list[object]:
    """Values of every JSON type, small and large."""
    return [
        *("", "banana", "x" * 600, "x" * 70_000, True, 0, -1, 2.5, 1e308, 2**70, -(2**70), 10**400),
        *([], {}, [None], [[]], [{}], [2.5], ["x"] * 5000, [-1], [2**70], {"x": {}}, {"": None}, deep(100)),
        {str(number): "x" for number in range(2000)},
        {"type": "banana", "name": 5, "content": 5, "role": "x", "function": {}},
        random_.randrange(-(2**40), 2**40),
        random_.uniform(-1e6, 1e6),
        "".join(chr(random_.randrange(32, 0x3000)) for _ in range(20)),
        [random_.choice(["x", 1, None, 2.5, [], {}]) for _ in range(5)],
    ]


def bodies(kind: Any, random_: random.Random) -> Iterator[tuple[str, object]]:
    """Each field of a struct with each value; a struct inside it is filled with the right fields but for one."""
    for field in msgspec.structs.fields(kind):
        for value in random_.sample(wrong_values(random_), _EACH):
            yield field.encode_name, value
        for inner, listed in structs_in(field.type):
            required = {
                each.encode_name: needed(each.encode_name) for each in msgspec.structs.fields(inner) if each.required
            }
            for name, value in bodies(inner, random_):
                part = {**required, name: value}
                yield field.encode_name, [part] if listed else part


def needed(name: str) -> object:
    return {"role": "assistant", "type": "function", "function": {"name": "f"}, "name": "f"}.get(name, "x")


def structs_in(annotation: Any, listed: bool = False) -> Iterator[tuple[Any, bool]]:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        yield annotation, listed
        return
    listed = listed or typing.get_origin(annotation) is list
    for argument in typing.get_args(annotation):
        yield from structs_in(argument, listed)


@pytest.mark.parametrize("route", ROUTES_WITH_BODIES, ids=lambda route: route.path)
async def test_wrong_values_are_refused_in_plain_words(application: Any, route: Any) -> None:
    client = application.test_client()
    headers = {"Content-Type": "application/json"}
    start = NEEDED.get(route.path.removeprefix("/v1"), NEEDED.get(route.path, {}))
    refused = 0
    sent = set()
    for name, value in bodies(route.body, random.Random(23)):
        data = json.dumps({**start, name: value})
        if data in sent or len(data) > 60_000:
            continue
        sent.add(data)
        answer = await client.post(route.path, data=data, headers=headers)
        if answer.status_code in (200, 404, 409):
            continue
        reported = await answer.get_json()
        where = f"{data[:200]}: {reported}"
        refused += 1
        assert answer.status_code in (400, 403), where
        message, field = message_and_field(reported.get("error", reported))  # Cohere's form has no envelope
        assert field, where
        assert message.isprintable(), where
        # less what the client sent, and the values that it may send
        words = re.sub(r"'[^']*'|\"[^\"]*\"|\([^)]*\)|one of .*, not", "", message.replace(field, ""))
        assert not INTERNAL.search(words), where
        assert not any(name in words for name in TYPE_NAMES), where
        assert len(message) < 800, where
    assert refused > 5 or len(msgspec.structs.fields(route.body)) == 1


def message_and_field(error: Any) -> tuple[str, str]:
    """Ollama's error is the message; it and Anthropic's begin with the field."""
    message = error if isinstance(error, str) else error["message"]
    named = None if isinstance(error, str) else error.get("param")
    return message, named or (message.partition(":")[0] if ": " in message else "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stop": ["x"] * 20}, "stop: at most 16 entries; you gave 20. Send fewer."),
        (
            {"max_tokens": "many"},
            'max_tokens: must be a whole number; you gave a string ("many"). Leave the field out for its default.',
        ),
        (
            {"verbosity": "loud"},
            'verbosity: must be one of high, low, medium, not "loud". Choose one of them.',
        ),
        ({"seed": True}, "seed: must be a whole number; you gave true. Leave the field out for its default."),
        ({"cache_salt": "x" * 257}, "cache_salt: at most 256 characters; you gave 257. Shorten it."),
        ({"messages": []}, "messages: at least 1 entry; you gave 0. Send more."),
        ({"messages": None}, "messages: must be a list; you gave null."),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content: must be a string or a list; you gave a whole number (5).",
        ),
        (
            {"priority": 2**40},
            f"priority: must be at most 2147483647; you gave {2**40}. Send a number within the limit.",
        ),
        ({"reasoning": {"exclude": True}}, "reasoning.exclude: there is no such field here. Leave it out."),
        (
            {"structured_outputs": {"choices": ["a"]}},
            "structured_outputs.choices: there is no such field; the most similar is choice. "
            "Correct the name, or omit it.",
        ),
    ],
)
def test_a_mistake_names_its_field_limit_and_remedy(fields: dict[str, Any], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    with pytest.raises(ApiError) as refused:
        decode(msgspec.json.encode(body), ChatRequest)
    assert refused.value.message == message


def test_a_number_out_of_range_is_not_called_a_wrong_body() -> None:
    with pytest.raises(ApiError, match="a number that is out of range"):
        decode(b'{"messages": [{"role": "user", "content": "a"}], "temperature": 1e999}', ChatRequest)
    with pytest.raises(ApiError, match="must be a JSON object"):
        decode(b"[1]", ChatRequest)


def test_a_missing_field_is_requested() -> None:
    with pytest.raises(ApiError, match=r"messages: this field is required\. Add it\.") as refused:
        decode(b"{}", ChatRequest)
    assert (refused.value.param, refused.value.code) == ("messages", "missing_field")


def test_whole_floats_are_integers_and_others_are_not() -> None:
    given = b'{"max_tokens": 2.0, "n": 1.0, "seed": -7.0, "top_logprobs": 2e0, "stop_token_ids": [3.0], "top_p": 1.0,'
    rest = b'"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f",'
    parameters = b'"parameters": {"minimum": 1.0}}}]}'
    body, _ = decode(given + rest + parameters, ChatRequest)
    assert (body.max_tokens, body.n, body.seed, body.top_logprobs, body.stop_token_ids) == (2, 1, -7, 2, [3])
    assert all(isinstance(value, int) for value in (body.max_tokens, body.n, body.seed, body.top_logprobs))
    assert body.tools is not None
    assert body.tools[0].function.parameters == {"minimum": 1.0}
    assert isinstance(body.tools[0].function.parameters["minimum"], float)
    with pytest.raises(ApiError, match=r"max_tokens: must be a whole number; you gave a number \(2.5\)"):
        decode(b'{"max_tokens": 2.5, ' + rest + parameters, ChatRequest)
