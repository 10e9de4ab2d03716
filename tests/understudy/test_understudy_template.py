"""The chat template: what it renders, in transformers and in a sandbox, and that training text is its text."""

import json
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.understudy import MODEL_DIR, TEMPLATE
from tests.understudy.corpus import documents
from tests.understudy.lessons.conversation import Conversation, render

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}


def template() -> str:
    config: dict[str, Any] = json.loads((MODEL_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    text: str = config["chat_template"]
    return text


def rendered(messages: list[dict[str, Any]], *, trim: bool = True, **variables: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=trim, lstrip_blocks=trim)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template()).render(messages=messages, **variables)


def test_the_template_beside_the_scripts_is_the_one_in_the_model() -> None:
    assert template() == TEMPLATE.read_text(encoding="utf-8")


def test_a_question_gets_an_empty_thought_unless_thinking_is_on() -> None:
    asked = [{"role": "user", "content": "Hi"}]
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(asked, add_generation_prompt=True) == f"{turn}<think>\n\n</think>\n\n"
    assert rendered(asked, add_generation_prompt=True, enable_thinking=True) == turn
    assert rendered(asked) == "<|im_start|>user\nHi<|im_end|>\n"


def test_history_repeats_what_was_generated() -> None:
    first = [{"role": "user", "content": "Hi"}]
    later = [*first, {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "Bye"}]
    assert rendered(later).startswith(rendered(first, add_generation_prompt=True) + "Hello!<|im_end|>\n")


def test_thoughts_stay_inside_a_tool_loop_and_leave_with_the_next_question() -> None:
    loop: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "reasoning_content": "I ask.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"temperature": 3}'},
    ]
    text = rendered(loop, tools=[TOOL], add_generation_prompt=True)
    assert "<think>\nI ask.\n</think>\n\n<tool_call>\n" in text
    assert '{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>' in text
    assert '<|im_start|>tool\n<tool_response>\n{"temperature": 3}\n</tool_response><|im_end|>' in text
    assert json.dumps(TOOL["function"]) in text
    after = [*loop, {"role": "assistant", "content": "3 degrees."}, {"role": "user", "content": "Thanks"}]
    assert "I ask." not in rendered(after, tools=[TOOL])


def test_a_thought_inside_the_content_is_recognized() -> None:
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>\n2 and 2\n</think>\n\n4"}]
    assert rendered(said).endswith("<think>\n2 and 2\n</think>\n\n4<|im_end|>\n")
    assert "2 and 2" not in rendered([*said, {"role": "user", "content": "ok"}])


def test_system_comes_before_tools_and_parts_become_text() -> None:
    system = {"role": "system", "content": "Be brief."}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    text = rendered([system, parts], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou have tools.")
    assert "<|im_start|>user\nab<|im_end|>" in text
    assert rendered([system, parts]).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nab")


@pytest.mark.parametrize("trim", [True, False])
def test_block_trimming_makes_no_difference(trim: bool) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": " s "},
        {"role": "user", "content": "  a\n"},
        {"role": "assistant", "content": "b", "tool_calls": [CALL, CALL]},
    ]
    assert rendered(messages, trim=trim, tools=[TOOL]) == rendered(messages, tools=[TOOL])
    assert "<|im_start|>user\n  a\n<|im_end|>" in rendered(messages, trim=trim)


def test_training_text_is_template_text() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": "", "reasoning_content": "I ask.", "tool_calls": [
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}},
            {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Côte"}}}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3 degrees.", "reasoning_content": "It answered."},
    ]  # fmt: skip
    pieces = render(Conversation(messages, [TOOL], thinking=True))
    assert "".join(piece.text for piece in pieces) == rendered(messages, tools=[TOOL])
    plain = [{**message, "reasoning_content": ""} for message in messages]
    pieces = render(Conversation(messages, [TOOL], thinking=False))
    assert "".join(piece.text for piece in pieces) == rendered(plain, tools=[TOOL])
    learned = [piece.text for piece in pieces if piece.learn]
    assert learned[-1] == "3 degrees.<|im_end|>"


def test_corpus_uses_only_the_turns_of_the_template() -> None:
    starts = {s.text.split("\n")[0] for d in documents(2, 400) for s in d if s.text.startswith("<|im_start|>")}
    assert starts == {f"<|im_start|>{role}" for role in ("system", "user", "assistant", "tool")}
