"""Formats of reasoning: all but one are two marks, so they are data. gpt-oss is in ``app.parsers.harmony``."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from actors.options.serving import ThoughtFormat

__all__ = ["REASONING_FORMATS", "ReasoningFormat"]


class ReasoningFormat(msgspec.Struct, frozen=True):
    """How a model writes its reasoning (its thought) at the beginning of an answer: between two marks.

    ``label``: what follows the begin mark in every thought. ``always``: the answer begins with a thought even without
    the mark, unless the prompt has ended it. ``interrupted_by``: marks that end a thought without its mark,
    those of calls only where calls are read. ``others``: other spellings of both marks, which are read, too.
    ``answer``: marks around the answer, which are dropped. ``tokens``: special tokens that are parts of marks.
    ``inline``: the thought stays in the answer, with the begin mark where the prompt has it.
    """

    begin: str = "<think>"
    end: str = "</think>"
    label: str = ""
    always: bool = False
    interrupted_by: tuple[str, ...] = ()
    others: tuple[tuple[str, str], ...] = ()
    answer: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    inline: bool = False

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin + self.label, *(begin for begin, _ in self.others))

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end, *(end for _, end in self.others))

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, *(mark for pair in self.others for mark in pair))

    @property
    def shown(self) -> tuple[str, ...]:
        """Marks, and what may be special tokens in them, which must reach the parser."""
        return (*self.marks, *self.answer, *self.tokens)

    def spelled(self, template: str) -> ReasoningFormat:
        """This format with those of its marks that a chat template has as the first spelling."""
        pairs = [(self.begin, self.end), *self.others]
        begin, end = next((pair for pair in pairs if any(mark in template for mark in pair)), pairs[0])
        if begin == self.begin:
            return self
        return msgspec.structs.replace(
            self, begin=begin, end=end, others=tuple(pair for pair in pairs if pair != (begin, end))
        )

    def in_prompt(self, prompt_end: str) -> bool | None:
        """Whether a prompt leaves the model in a thought (True) or after it (False); None if it has no mark."""
        end = prompt_end.rstrip()
        if end.endswith((self.begin, *(begin.rstrip() for begin in self.begins))):
            return True
        return False if end.endswith((*self.ends, *self.answer[:1])) else None


_HY_SUFFIXES = (":opensource", ":6124c78e")
"""Of the names of all tags in the vocabularies of published checkpoints of Hunyuan 3 and 4."""

REASONING_FORMATS: Mapping[ThoughtFormat, ReasoningFormat] = {
    "base": ReasoningFormat(),
    "deepseek-r1": ReasoningFormat(always=True),
    "deepseek-v3": ReasoningFormat(),
    "qwen3": ReasoningFormat(interrupted_by=("<tool_call>",)),
    "qwen3-thinking": ReasoningFormat(always=True, interrupted_by=("<tool_call>",)),
    "glm45": ReasoningFormat(interrupted_by=("<tool_call>",)),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(interrupted_by=("<|tool_calls_section_begin|>", "<|tool_call_begin|>")),
    "minimax": ReasoningFormat(always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "step3": ReasoningFormat(always=True),
    "gemma": ReasoningFormat("<|channel>", "<channel|>", label="thought\n"),
    "nemotron": ReasoningFormat(interrupted_by=("<tool_call>",)),
    "cohere": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "minimax-m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "minimax-append-think": ReasoningFormat(always=True, inline=True),
    "hy_v3": ReasoningFormat(others=tuple((f"<think{suffix}>", f"</think{suffix}>") for suffix in _HY_SUFFIXES)),
    "hunyuan_a13b": ReasoningFormat(answer=("<answer>", "</answer>")),
    "ernie45": ReasoningFormat(answer=("<response>", "</response>")),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "granite": ReasoningFormat(
        "Here is my thought process:",
        "Here is my response:",
        others=(("Here's my thought process:", "Here's my response:"),),
    ),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", interrupted_by=("<|tools_prefix|>",)),
    "solar_open2": ReasoningFormat("<|think:start|>", "<|think:end|>", interrupted_by=("<|tool_call:start|>",)),
    "k2_horizon": ReasoningFormat(
        "<ifm|think>",
        "</ifm|think>",
        others=(("<ifm|think_fast>", "</ifm|think_fast>"), ("<ifm|think_faster>", "</ifm|think_faster>")),
    ),
    "inkling": ReasoningFormat(
        "<|content_thinking|>",
        "<|end_message|>",
        others=(("<|message_model|><|content_thinking|>", "<|end_message|>"),),
        tokens=("<|message_model|>",),
    ),
    "kimi_k3": ReasoningFormat(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        interrupted_by=("<|open|>tools<|sep|>", "<|open|>response<|sep|>"),
        answer=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        tokens=("<|open|>", "<|close|>", "<|sep|>"),
    ),
}
"""By the names of ``--reasoning-parser``."""
