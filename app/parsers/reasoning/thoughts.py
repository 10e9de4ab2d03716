"""Formats of thoughts: all but one are two marks, so they are data. gpt-oss is in ``app.parsers.harmony``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.options.serving import ThoughtFormat

__all__ = ["THOUGHTS", "Thoughts"]


class Thoughts(msgspec.Struct, frozen=True):
    """A thought at the beginning of an answer, between two marks.

    ``label``: what follows the begin mark in every thought. ``always``: the answer begins with a thought even without
    the mark, unless the prompt has ended it. ``interrupted_by``: marks of calls that end a thought without its mark.
    ``signs``: texts in a chat template that tell this format.
    """

    begin: str = "<think>"
    end: str = "</think>"
    label: str = ""
    always: bool = False
    interrupted_by: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end)

    def in_prompt(self, prompt_end: str) -> bool | None:
        """Whether a prompt leaves the model in a thought (True) or behind it (False); None if it says nothing."""
        end = prompt_end.rstrip()
        if end.endswith((self.begin, self.begin + self.label.rstrip())):
            return True
        return False if end.endswith(self.end) else None


THOUGHTS: Mapping[ThoughtFormat, Thoughts] = {
    "base": Thoughts(),
    "deepseek-r1": Thoughts(always=True),
    "deepseek-v3": Thoughts(),
    "qwen3": Thoughts(),
    "qwen3-thinking": Thoughts(always=True),
    "glm45": Thoughts(),
    "kimi": Thoughts("◁think▷", "◁/think▷"),
    "kimi_k2": Thoughts(interrupted_by=("<|tool_calls_section_begin|>", "<|tool_call_begin|>")),
    "minimax": Thoughts(always=True),
    "mistral": Thoughts("[THINK]", "[/THINK]"),
    "step3": Thoughts(always=True),
    "gemma": Thoughts("<|channel>", "<channel|>", label="thought\n"),
    "nemotron": Thoughts(),
    "cohere": Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""By the names of ``--reasoning-parser``."""
