"""The options' choices are the registered formats."""

import pytest

from actors.options.table import ARGUMENTS
from actors.protocol.requests import LIMITS
from app.parsers.reasoning.formats import REASONING_FORMATS
from app.parsers.registry import AUTO, OFF, TOOL_PARSERS, output_format


@pytest.mark.parametrize(
    ("option", "formats"),
    [("tool_call_parser", set(TOOL_PARSERS)), ("reasoning_parser", {"gpt-oss", *REASONING_FORMATS})],
)
def test_choices_of_the_option_are_the_registered_formats(option: str, formats: set[str]) -> None:
    argument = next(each for each in ARGUMENTS if each.field == option)
    assert set(argument.choices) == {AUTO, OFF} | formats


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_a_request_may_name_the_special_tokens_of_every_format(name: str) -> None:
    for thoughts in REASONING_FORMATS:
        shown = output_format(name, thoughts, None, "").special_tokens(True)
        assert len(shown) <= LIMITS.shown_special_tokens
        assert all(0 < len(mark) <= LIMITS.stop_string_chars for mark in shown)


def test_a_template_with_marks_of_the_answer_has_thoughts_with_them() -> None:
    template = "Write your thoughts between <think></think> and your response between <response></response>."
    assert output_format(None, None, template, "").reasoning_format == REASONING_FORMATS["ernie45"]
    assert output_format(None, None, "<think></think>", "").reasoning_format == REASONING_FORMATS["base"]


def test_thoughts_beside_calls_of_qwen3_coder_may_end_with_a_call() -> None:
    template = "<function=example></function></think>"
    assert output_format(None, None, template, "").reasoning_format == REASONING_FORMATS["qwen3"]
