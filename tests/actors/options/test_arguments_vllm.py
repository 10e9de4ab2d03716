"""Command lines of ``vllm serve``: each name is taken, asks for what is so anyway, or is refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.options import ARGUMENTS, ArgumentError
from app.cli.arguments import load_arguments

_LINES = [
    tuple(line.split(" -> "))
    for line in (Path(__file__).parent / "vllm_names.txt").read_text().splitlines()
    if not line.startswith("#")
]
_FIELDS = {argument.field for argument in ARGUMENTS}


@pytest.mark.parametrize(("words", "becomes"), _LINES, ids=[words for words, _ in _LINES])
def test_a_vllm_option_is_accepted_or_refused_with_a_remedy(words: str, becomes: str) -> None:
    plain = load_arguments(["m"], {})
    if becomes in _FIELDS:
        assert getattr(load_arguments(["m", *words.split(" ")], {}), becomes) != getattr(plain, becomes)
    elif becomes == "=":
        assert load_arguments(["m", *words.split(" ")], {}) == plain
    else:
        with pytest.raises(ArgumentError) as caught:
            load_arguments(["m", *words.split(" ")], {})
        assert becomes in str(caught.value)
        assert "no such argument" not in str(caught.value)


def test_names_that_mean_the_reverse_follow_the_flag() -> None:
    assert not load_arguments(["m", "--disable-log-requests"], {}).log_requests
    assert load_arguments(["m", "--no-disable-log-requests"], {}).log_requests
    assert load_arguments(["m", "--disable-async-output-proc"], {}).disable_overlap_schedule
