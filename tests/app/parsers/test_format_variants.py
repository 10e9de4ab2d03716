"""What formats of tool calls allow beside the usual spelling: each in pieces of one, seven and all characters."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.options import ARGUMENTS
from app.parsers.base import StreamingParser
from app.parsers.events import CallArguments, CallBegun, Reasoning, Text
from app.parsers.registry import TOOL_PARSERS, output_format
from app.parsers.tools.constraints import native_calls
from tests.kits.tool_formats import ADD, OSLO, TOOLS, hunyuan, written
from tests.kits.tool_grammars import MarkedTokenizer

NS = "]<]minimax[>["

ORDER: dict[str, dict[str, Any]] = {
    "order": {
        "type": "object",
        "properties": {
            "id": {"type": "integer"},
            "note": {"type": "string"},
            "to": {"$ref": "#/$defs/Place"},
            "items": {"type": "array", "items": {"type": "object", "properties": {"code": {"type": "string"}}}},
            "tags": {"type": "array", "items": {"type": "string"}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "free": {},
        },
        "$defs": {"Place": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}}},
    }
}


def read(name: str, text: str, tools: dict[str, Any] = TOOLS) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, which no division of the text changes."""
    found = []
    for size in (1, 7, len(text)):
        reader = TOOL_PARSERS[name](tools)
        pieces = [reader.read(text[at : at + size]) for at in range(0, len(text), size)]
        content, calls = "", list[list[str]]()
        for event in (event for part in (*pieces, reader.end()) for event in part):
            if isinstance(event, Text):
                content += event.text
            elif isinstance(event, CallBegun):
                calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                calls[event.index][1] += event.text
        found.append((content, [(called, msgspec.json.decode(arguments)) for called, arguments in calls]))
    assert found[0] == found[1] == found[2]
    return found[0]


def element(name: str, inner: str) -> str:
    return f"{NS}<{name}>{inner}{NS}</{name}>"


def order(*members: str) -> str:
    return f'{NS}<tool_call>\n{NS}<invoke name="order">{"".join(members)}{NS}</invoke>\n{NS}</tool_call>'


def test_elements_of_minimax_m3_become_objects_and_lists() -> None:
    text = order(
        element("id", "42"),
        element("note", "a < b\n"),
        element("to", element("city", "5") + element("zip", "018956")[:-1] + ">"),
        element("items", element("item", element("code", "7")) + element("item", element("code", "x"))),
        element("tags", element("item", "1")),
        element("labels", element("source", "8") + element("other", "y")),
        element("free", element("tag", "a") + element("tag", "2") + element("one", "true")),
    )
    assert read("minimax-m3", f"So.\n{text} Done.", ORDER) == (
        "So.\nDone.",
        [
            (
                "order",
                {
                    "id": 42,
                    "note": "a < b\n",
                    "to": {"city": "5", "zip": "018956"},
                    "items": [{"code": "7"}, {"code": "x"}],
                    "tags": ["1"],
                    "labels": {"source": "8", "other": "y"},
                    "free": {"tag": ["a", 2], "one": True},
                },
            )
        ],
    )


def test_values_of_minimax_m3_may_be_json_or_empty() -> None:
    text = order(element("items", '[{"code": "7"}]'), element("tags", ""), element("labels", "\n"), element("note", ""))
    expected = {"items": [{"code": "7"}], "tags": [], "labels": {}, "note": ""}
    assert read("minimax-m3", text, ORDER) == ("", [("order", expected)])


def test_an_empty_value_of_minimax_m3_may_be_of_a_type_that_may_be_null() -> None:
    maybe = {name: {"type": [name, "null"]} for name in ("array", "object", "string")}
    text = order(*(element(name, "") for name in maybe))
    expected = {"array": [], "object": {}, "string": ""}
    assert read("minimax-m3", text, {"order": {"properties": maybe}}) == ("", [("order", expected)])


@pytest.mark.parametrize("name", ["glm45", "qwen3_coder", "minimax-m2", "minicpm5", "solar_open2", "minimax-m3"])
def test_a_text_that_may_be_null_keeps_its_newlines(name: str) -> None:
    for schema in ({"type": "string"}, {"type": ["string", "null"]}, {}):
        call = ("write", {"text": "\n\nline\n"})
        assert read(name, written(name, call), {"write": {"properties": {"text": schema}}}) == ("", [call])


def test_a_mark_of_minimax_m3_may_have_space_behind_it() -> None:
    text = order(element("id", "1")).replace(f"{NS}<id>", f"{NS} \n<id>")
    assert read("minimax-m3", text, ORDER) == ("", [("order", {"id": 1})])


def test_alternatives_in_a_schema_give_the_types_of_inner_values() -> None:
    maybe: dict[str, Any] = {
        "to": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "tags": {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
        "note": {"allOf": [{"$ref": "#/$defs/Note"}], "default": "1"},
    }
    places = {"Place": {"type": "object", "properties": {"zip": {"type": "string"}}}, "Note": {"enum": ["1", "2"]}}
    tools: dict[str, Any] = {"order": {"type": "object", "properties": maybe, "$defs": places}}
    members = (element("to", element("zip", "12345")), element("tags", element("item", "5")), element("note", "1"))
    expected = {"to": {"zip": "12345"}, "tags": ["5"], "note": "1"}
    assert read("minimax-m3", order(*members), tools) == ("", [("order", expected)])
    text = written("glm45", ("order", {"note": "1", "to": {"zip": 5}, "tags": None}))
    assert read("glm45", text, tools) == ("", [("order", {"note": "1", "to": {"zip": 5}, "tags": None})])


def test_schemas_that_refer_to_themselves_have_inner_schemas() -> None:
    self_made: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/Self"}, {"$ref": "#/$defs/Self"}]}
    tools = {"order": {"properties": {"to": {"$ref": "#/$defs/Self"}}, "$defs": {"Self": self_made}}}
    text = order(element("to", element("zip", "12345")))
    assert read("minimax-m3", text, tools) == ("", [("order", {"to": {"zip": 12345}})])


@pytest.mark.parametrize(
    ("broken", "rest"),
    [
        (element("to", f"x{element('city', 'Oslo')}"), "Oslo"),  # text beside elements
        (element("to", f"{NS}<city>Oslo{NS}</town>"), "Oslo"),  # another end
        (f"{NS}</to>", "</to"),  # no begin
    ],
)
def test_broken_elements_of_minimax_m3_end_the_call_and_stay_text(broken: str, rest: str) -> None:
    content, calls = read("minimax-m3", order(element("id", "1"), broken), ORDER)
    assert calls == [("order", {"id": 1})]
    assert rest in content


@pytest.mark.parametrize("suffix", ["", ":opensource", ":6124c78e"])
@pytest.mark.parametrize("separator", [True, False])
def test_tags_of_hunyuan_have_the_suffix_of_the_checkpoint(suffix: str, separator: bool) -> None:
    text = hunyuan(OSLO, ADD, suffix=suffix, separator=separator)
    assert read("hy_v3", f"So.{text}\nDone.") == ("So.Done.", [OSLO, ADD])
    assert read("hy_v3", text.replace("\n", "").replace('"é"', '"é"\n')) == ("", [OSLO, ADD])


@pytest.mark.parametrize("suffix", ["", ":opensource", ":6124c78e"])
def test_a_grammar_of_hunyuan_has_the_tags_of_the_vocabulary(suffix: str) -> None:
    parser = TOOL_PARSERS["hy_v3"]
    known = [mark for mark in (*parser.OPEN, *parser.MARKS) if mark.partition(":")[2].rstrip(">") == suffix[1:]]

    marks = {"OPEN": tuple(known[:1]), "MARKS": tuple(mark for mark in known[1:] if "tool_sep" not in mark)}
    vocabulary = MarkedTokenizer(type("Known", (parser,), marks), special=True)
    tokens = {mark: vocabulary.tokens.get(mark) for mark in (*parser.OPEN, *parser.MARKS)}
    compiled = vocabulary.compile(native_calls(parser, {"now": TOOLS["now"]}, tokens, forced=True))
    assert vocabulary.accepts(compiled, hunyuan(("now", {}), suffix=suffix, separator=False))
    assert not vocabulary.accepts(compiled, hunyuan(("now", {}), suffix=":other", separator=False))


def test_longcat_may_write_keys_and_values() -> None:
    text = written("glm45", OSLO, ADD)
    for tag in ("tool_call", "arg_key", "arg_value"):
        text = text.replace(f"<{tag}>", f"<longcat_{tag}>").replace(f"</{tag}>", f"</longcat_{tag}>")
    assert read("longcat", text + "\nDone.") == ("Done.", [OSLO, ADD])


@pytest.mark.parametrize("name", ["seed_oss", "qwen3_coder"])
def test_lists_and_objects_may_be_literals_of_python(name: str) -> None:
    for value, expected in (
        ("['a', {'b': (1, None, True)}]", ["a", {"b": [1, None, True]}]),
        ('["\\/", null]', ["/", None]),
        ("[open('x')]", "[open('x')]"),
        ("[1, 2", "[1, 2"),
    ):
        text = written(name, ("get_weather", {"tags": "VALUE"})).replace("VALUE", value)
        assert read(name, text) == ("", [("get_weather", {"tags": expected})])
    text = written(name, ("get_weather", {"city": "['a']"}))
    assert read(name, text) == ("", [("get_weather", {"city": "['a']"})])


def test_k2_horizon_may_name_types_and_write_json() -> None:
    typed = (
        "<ifm|tool_calls>\n<ifm|tool_call>add\n<ifm|arg_key>a</ifm|arg_key>\n<ifm|arg_type>number</ifm|arg_type>\n"
        "<ifm|arg_value>5</ifm|arg_value>\n<ifm|arg_key>c</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n"
        "<ifm|arg_value>5</ifm|arg_value>\n</ifm|tool_call>\n</ifm|tool_calls>"
    )
    assert read("k2_horizon", typed) == ("", [("add", {"a": 5, "c": "5"})])
    text = f"<ifm|tool_calls><ifm|tool_call>{written('json', ADD)}</ifm|tool_call></ifm|tool_calls>"
    assert read("k2_horizon", text) == ("", [ADD])


def test_dots_may_write_json() -> None:
    text = written("hermes", OSLO).replace("tool_call>", "dots_function_call>")
    assert read("dots", text + "\nDone.") == ("Done.", [OSLO])


def test_a_value_of_minicpm5_may_be_a_section() -> None:
    section = "<![CDATA[a </param> b\n]]>"
    text = f'<function name="get_weather"><param name="city">{section}</param><param name="days"><![CDATA[2]]></param>'
    expected = {"city": "a </param> b\n", "days": 2}
    assert read("minicpm5", f"{text}</function>Done.") == ("Done.", [("get_weather", expected)])


def test_arguments_of_kimi_k3_may_be_one_element_of_json() -> None:
    call = '<|open|>call tool="add" index="1"<|sep|>'
    whole = f'{call}<|open|>json type="object"<|sep|>{{"a": 1}}<|close|>json<|sep|><|close|>call<|sep|>'
    keyed = (
        f'{call}<|open|>argument key="x &quot;&amp;" type="string"<|sep|>5<|close|>argument<|sep|><|close|>call<|sep|>'
    )
    text = f"<|open|>tools<|sep|>{whole}{keyed}<|close|>tools<|sep|><|close|>message<|sep|>"
    assert read("kimi_k3", text) == ("", [("add", {"a": 1}), ("add", {'x "&': "5"})])


@pytest.mark.parametrize(
    ("name", "begun"),
    [("kimi_k3", "<|close|>"), ("kimi_k3", "<|open|>tools"), ("minimax-m3", NS), ("gigachat35", "<｜GCML｜")],
)
def test_a_begun_mark_of_several_tokens_is_no_content(name: str, begun: str) -> None:
    assert read(name, f"Hello{begun}") == ("Hello", [])
    assert read(name, f"Hello{begun}!") == (f"Hello{begun}!", [])


def test_a_begun_mark_of_several_tokens_is_no_thought() -> None:
    form = output_format("off", "kimi_k3", None, "")
    reader = StreamingParser(None, reasoning_format=form.reasoning_format, thinking=True)
    assert [*reader.read("Hm<|close|>think"), *reader.end()] == [Reasoning("Hm")]


def test_gigachat3_may_end_its_text_before_a_call_or_mark_the_call() -> None:
    call = written("gigachat3", ADD)
    assert read("gigachat3", f"I look.<|message_sep|>\n\n{call}") == ("I look.", [ADD])
    marked = call.replace("function call<|role_sep|>\n", "<|function_call|>")
    assert read("gigachat3", f"I look.{marked}<|message_sep|>") == ("I look.", [ADD])
    assert read("gigachat3", "This function call is fine.") == ("This function call is fine.", [])


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_messages_of_inkling_are_thoughts_text_and_calls(size: int) -> None:
    form = output_format("inkling", "inkling", None, "")
    assert form.tools is not None
    text = (
        "<|content_thinking|>Hm<|end_message|><|message_model|><|content_text|>I look.<|end_message|>"
        "<|message_model|><|content_thinking|>So<|end_message|>" + written("inkling", ADD)
    )
    for begin in ("", "<|message_model|>"):
        whole, reader = begin + text, form.tools(TOOLS, reasoning_format=form.reasoning_format)
        parts = [reader.read(whole[at : at + size]) for at in range(0, len(whole), size)]
        events = [event for part in (*parts, reader.end()) for event in part]
        assert "".join(event.text for event in events if isinstance(event, Text)) == "I look."
        assert "".join(event.text for event in events if isinstance(event, Reasoning)) == "Hm\nSo"
        assert reader.calls == 1


def test_a_call_of_inkling_may_begin_in_the_prompt() -> None:
    call = written("inkling", ADD).removeprefix("<|message_model|>")
    assert read("inkling", f"{call}{written('inkling', OSLO)}") == ("", [ADD, OSLO])
    assert read("inkling", "add it") == ("add it", [])


def test_calls_of_apertus_may_stand_in_a_thought() -> None:
    form = output_format("apertus", "apertus", None, "")
    assert form.tools is not None
    reader = form.tools(TOOLS, reasoning_format=form.reasoning_format)
    events = reader.read(f"<|inner_prefix|>Hm{written('apertus', ADD)}<|inner_suffix|>It is.")
    assert [event.text for event in events if isinstance(event, Text)] == ["It is."]
    assert reader.calls == 1


def test_a_line_of_olmo3_that_is_no_call_stays_text() -> None:
    text = written("olmo3", ADD).replace("\n</", "\nopen('x')\n</")
    content, calls = read("olmo3", text)
    assert (content, calls) == ("open('x')\n", [ADD])


NAMES = {
    "hy_v3": ("hunyuan", "hy_v4"),
    "minimax-m3": ("minimax_m3",),
    "hunyuan_a13b": ("jamba",),
    "apertus": ("apertus2509",),
    "glm45": ("poolside_v1", "spark25"),
    "hermes": ("trinity",),
    "json": ("xlam",),
}


def test_names_of_other_engines_are_those_of_the_format() -> None:
    (option,) = (argument for argument in ARGUMENTS if argument.name == "tool-call-parser")
    for name, others in NAMES.items():
        assert [option.synonyms[other] for other in others] == [name] * len(others)
