"""The options' choices are the registered formats."""

import pytest

from actors.options.table import ARGUMENTS
from app.parsers.reasoning.formats import REASONING_FORMATS
from app.parsers.registry import AUTO, OFF, TOOL_PARSERS


@pytest.mark.parametrize(
    ("option", "formats"),
    [("tool_call_parser", set(TOOL_PARSERS)), ("reasoning_parser", {"gpt-oss", *REASONING_FORMATS})],
)
def test_choices_of_the_option_are_the_registered_formats(option: str, formats: set[str]) -> None:
    argument = next(each for each in ARGUMENTS if each.field == option)
    assert set(argument.choices) == {AUTO, OFF} | formats
