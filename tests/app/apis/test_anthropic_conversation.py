"""Messages of Anthropic's API as turns of a chat template."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from app.apis.anthropic.conversation import chat_of, choice_of
from app.apis.anthropic.requests import MessagesRequest
from app.parsers.tools.hermes import HermesParser
from app.parsers.tools.kimi_k2 import KimiK2Parser
from app.server.errors import ApiError


def body(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    return msgspec.convert({"model": "m", "max_tokens": 5, "messages": messages, **fields}, MessagesRequest)


def turns(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return chat_of(body(*messages, **fields), HermesParser).messages


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": c} if isinstance(c, str) else c for c in content]}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "2"}


def thought(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": "s"}


def test_neighbouring_turns_of_a_role_are_one() -> None:
    found = turns(
        user("a"), {"role": "user", "content": "b"}, assistant(thought("x"), "c"), assistant("d", CALL), user(RESULT)
    )
    assert [turn["role"] for turn in found] == ["user", "assistant", "tool"]
    assert found[0]["content"] == "a\nb"
    assert (found[1]["content"], found[1]["reasoning_content"], len(found[1]["tool_calls"])) == ("cd", "x", 1)
    assert (found[2]["content"], found[2]["name"]) == ("2", "add")


def test_results_come_before_the_text_beside_them() -> None:
    found = turns(
        user("a"), assistant(CALL), user("why?", RESULT, {**RESULT, "content": [{"type": "text", "text": "3"}]})
    )
    assert [(turn["role"], turn["content"]) for turn in found[2:]] == [("tool", "2"), ("tool", "3"), ("user", "why?")]


def test_an_error_of_a_tool_is_reported_once() -> None:
    for text, content in (("no", "Error: no"), ("error: no", "error: no")):
        assert (
            turns(user("a"), assistant(CALL), user({**RESULT, "is_error": True, "content": text}))[-1]["content"]
            == content
        )


def test_a_last_turn_of_the_assistant_is_continued() -> None:
    chat = chat_of(body(user("a"), assistant("The answer is (")), HermesParser)
    assert (chat.continue_final_message, chat.add_generation_prompt) == (True, False)
    with pytest.raises(ApiError, match="add a user turn with its tool_result"):
        turns(user("a"), assistant(CALL))


def test_a_document_of_plain_text_is_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Words."}
    document = {"type": "document", "title": "T", "source": source}
    assert turns(user(document))[0]["content"] == "T\nWords."
    assert turns(user({**document, "citations": {"enabled": False}}))[0]["content"] == "T\nWords."
    with pytest.raises(ApiError, match="answers cite no documents"):
        turns(user({**document, "citations": {"enabled": True}}))


@pytest.mark.parametrize(
    "system",
    ["x-anthropic-billing-header: cch=1;\nBe brief.", [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
                                                       {"type": "text", "text": "Be brief."}]],
)  # fmt: skip
def test_the_line_that_changes_in_each_request_is_left_out(system: Any) -> None:
    assert turns(user("a"), system=system)[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(("keep", "left"), [("all", 3), ({"type": "thinking_turns", "value": 2}, 2), (None, 1)])
def test_thoughts_of_earlier_turns_are_cleared_when_requested(keep: Any, left: int) -> None:
    history = [message for n in range(3) for message in (user("a"), assistant(thought(str(n)), "b"))]
    edit = {"type": "clear_thinking_20251015", **({} if keep is None else {"keep": keep})}
    found = turns(*history, user("c"), context_management={"edits": [edit]})
    kept = [turn["reasoning_content"] for turn in found if "reasoning_content" in turn]
    assert kept == ["0", "1", "2"][3 - left :]


def test_ids_of_calls_are_those_that_the_model_knows() -> None:
    chat = chat_of(body(user("a"), assistant(CALL), user(RESULT)), KimiK2Parser)
    assert chat.messages[1]["tool_calls"][0]["id"] == chat.messages[2]["tool_call_id"] == "functions.add:0"


def test_examples_of_input_are_shown_to_the_model() -> None:
    tool = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}
    request = body(user("a"), tools=[tool], tool_choice={"type": "tool", "name": "add"})
    tools = chat_of(request, HermesParser).tools
    assert tools is not None
    assert tools[0]["function"]["description"] == 'Adds.\nExamples of its input:\n{"a":1}'
    choice, parallel = choice_of(request)
    assert (choice.mode, list(choice.tools), parallel) == ("named", ["add"], True)


def test_thinking_and_effort_are_variables_of_the_template() -> None:
    def kwargs(**fields: Any) -> dict[str, Any]:
        return chat_of(body(user("a"), **fields), HermesParser).template_kwargs

    assert kwargs() == {}
    assert kwargs(thinking={"type": "disabled"}) == {"enable_thinking": False, "thinking": False}
    assert kwargs(output_config={"effort": "low"}) == {"reasoning_effort": "low"}
    own = kwargs(thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True})
    assert own == {"enable_thinking": True}
