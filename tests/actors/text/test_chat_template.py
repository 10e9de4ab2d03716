from __future__ import annotations

from typing import Any

import pytest

from actors.protocol.requests import Chat, InvalidRequest
from actors.text.chat_template import ChatTemplate, check_template

SIMPLE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat(*contents: str, **options: object) -> Chat:
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return Chat(messages=messages, **options)  # type: ignore[arg-type]


def test_renders_roles_and_the_generation_prompt() -> None:
    template = ChatTemplate(SIMPLE, {})
    assert template.render(chat("hi", "yo", "so")) == "[user]hi[assistant]yo[user]so[assistant]"
    assert template.render(chat("hi", add_generation_prompt=False)) == "[user]hi"


def test_the_final_message_can_be_continued() -> None:
    template = ChatTemplate(SIMPLE + "<end>", {})
    assert template.render(chat("hi", "Once up", continue_final_message=True)) == "[user]hi[assistant]Once up"


def test_tojson_writes_plain_json_with_the_spaces_models_were_trained_on() -> None:
    template = ChatTemplate("{{ tools | tojson }}", {})
    tools = [{"name": "f", "note": 'a<b>, "c": é'}]
    assert template.render(chat("x", tools=tools)) == '[{"name": "f", "note": "a<b>, \\"c\\": é"}]'


def test_the_template_may_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        template.render(chat("x"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize("refusal", ["'x' * 10000000", "['x' * 10000000]"])
def test_a_refusal_of_any_length_becomes_a_short_message(refusal: str) -> None:
    with pytest.raises(InvalidRequest, match="refuses these messages") as caught:
        ChatTemplate(f"{{{{ raise_exception({refusal}) }}}}", {}).render(chat("x"))
    assert len(str(caught.value)) < 600


def test_a_syntax_error_with_a_long_name_becomes_a_short_message() -> None:
    with pytest.raises(ValueError, match="does not compile") as caught:
        check_template("{% " + "x" * 100_000 + " %}")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_refuses_what_a_template_has_no_business_with(source: str) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render(chat("x"))


@pytest.mark.parametrize("source", ["{{ '{0} {1}'.format(messages[0].content) }}", "{{ 'x' * (10 ** 30) }}"])
def test_whatever_a_template_raises_is_the_request_s_own(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        ChatTemplate(source, {}).render(chat("x"))


def test_an_endless_output_is_cut_off() -> None:
    inner = "{% for j in range(99999) %}{{ 'x' * 999 }}{% endfor %}"
    template = ChatTemplate("{% for i in range(99999) %}" + inner + "{% endfor %}", {})
    with pytest.raises(InvalidRequest, match="more than"):
        template.render(chat("x"))


@pytest.mark.parametrize("name", ["messages", "bos_token", "self"])
def test_reserved_names_cannot_be_set_by_a_request(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(SIMPLE, {"bos_token": "<s>"}).render(chat("x", template_kwargs={name: []}))
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_other_template_kwargs_reach_the_template() -> None:
    template = ChatTemplate("{% if enable_thinking %}<think>{% endif %}", {})
    assert template.render(chat("x", template_kwargs={"enable_thinking": True})) == "<think>"


def test_a_broken_template_names_the_place() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("ok\n{% if %}", {})


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"city": 'Os"lo', "n": [1]}}}


@pytest.mark.parametrize(
    "arguments",
    ["arguments | tojson", "'' + arguments", "arguments + ''", "arguments ~ ''", "arguments"],
)
def test_a_template_may_take_arguments_as_object_or_as_text(arguments: str) -> None:
    source = "{% for m in messages %}{% for call in m.tool_calls %}{% set arguments = call.function.arguments %}"
    source += "{{ " + arguments + " }} {{ arguments.city }} {{ arguments is mapping }}{% endfor %}{% endfor %}"
    chat = Chat(messages=[{"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert ChatTemplate(source, {}).render(chat) == '{"city": "Os\\"lo", "n": [1]} Os"lo True'


def test_content_is_null_where_the_template_asks_for_it() -> None:
    chat = Chat(messages=[{"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "user", "content": ""}])
    source = "{% for m in messages %}{{ 'calls' if m['content'] is none else 'text' }} {% endfor %}"
    assert ChatTemplate(source, {}).render(chat) == "calls text "
    assert ChatTemplate("{{ messages[0].content + 'x' }}", {}).render(chat) == "x"


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "é", "c": [None]}}}
        ],
    },
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
]
CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set f = c.function %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # tags for each parameter: GLM, Qwen3-Coder, MiniMax
        (
            CALLS
            + "{% for k, v in f.arguments.items() %}<{{ k }}>{{ v if v is string else v | tojson }}{% endfor %}"
            + END,
            "<a>1<b>é<c>[null]",
        ),
        ("{% set ns = namespace(a='') %}" + CALLS + "{% for k in f.arguments %}{{ k }}{% endfor %}" + END, "abc"),
        # tags with a type: DeepSeek-V3.2
        (
            CALLS
            + "{% for k, v in f.arguments | items %}{{ k }}={{ 'true' if v is string else 'false' }};{% endfor %}"
            + END,
            "a=false;b=true;c=false;",
        ),
        # JSON, from an object or joined to text: Llama, Hermes, DeepSeek-V3, Kimi
        (CALLS + "{{ f.name }}{{ f.arguments | tojson }}" + END, 'add{"a": 1, "b": "é", "c": [null]}'),
        (CALLS + "{{ f.name + '<sep>' + f.arguments }}" + END, 'add<sep>{"a": 1, "b": "é", "c": [null]}'),
        (
            CALLS + "{{ f.arguments if f.arguments is string else f.arguments | tojson }}" + END,
            '{"a": 1, "b": "é", "c": [null]}',
        ),
        # the thought and the answer's name: Qwen3, GLM, Kimi; gpt-oss
        (
            "{% for m in messages %}{{ m.reasoning_content }}|{{ m.name }}|{{ m.tool_call_id }};{% endfor %}",
            "||;Hm||;|add|c1;",
        ),
        ("{% for m in messages %}{{ m.thinking }}|{{ m.content }};{% endfor %}", "|Hi;Hm\nI look.|;|2;"),
    ],
)
def test_calls_of_the_history_suit_every_kind_of_template(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).render(Chat(messages=HISTORY)) == expected


def test_a_description_that_is_joined_to_text_may_be_missing() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    joined = "{% for tool in tools %}{{ tool.function.name + ': ' + tool.function.description }}{% endfor %}"
    assert ChatTemplate(joined, {}).render(Chat(messages=[], tools=[tool])) == "f: "
    whole = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    assert "description" not in ChatTemplate(whole, {}).render(Chat(messages=[], tools=[tool]))
