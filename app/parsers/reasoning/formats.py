"""Formats of reasoning: all but one are two marks, so they are data. gpt-oss is in ``app.parsers.harmony``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.options.serving import ThoughtFormat

__all__ = ["REASONING_FORMATS", "ReasoningFormat"]


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model writes its reasoning (its thought) at the beginning of an answer: between two marks.

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


REASONING_FORMATS: Mapping[ThoughtFormat, ReasoningFormat] = {
    "base": ReasoningFormat(),
    "deepseek-r1": ReasoningFormat(always=True),
    "deepseek-v3": ReasoningFormat(),
    "qwen3": ReasoningFormat(),
    "qwen3-thinking": ReasoningFormat(always=True),
    "glm45": ReasoningFormat(),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(interrupted_by=("<|tool_calls_section_begin|>", "<|tool_call_begin|>")),
    "minimax": ReasoningFormat(always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "step3": ReasoningFormat(always=True),
    "gemma": ReasoningFormat("<|channel>", "<channel|>", label="thought\n"),
    "nemotron": ReasoningFormat(),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""By the names of ``--reasoning-parser``."""
