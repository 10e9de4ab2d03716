"""Fill in the middle: prompt and suffix joined in the model's form."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec
from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from actors.protocol.requests import LIMITS, SamplingParams
from app.server.errors import invalid
from app.server.service import Service

__all__ = ["Filling", "ending", "fill_in", "load_completion_template"]


@functools.cache
def load_completion_template(path: str) -> Template:
    """The template, with ``prompt`` and ``suffix`` as its variables. Raises OSError or TemplateError."""
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(Path(path).read_text(encoding="utf-8"))


_FORMS = (
    # Qwen Coder, CodeGemma
    (
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        "<|fim_prefix|>{prompt}<|fim_suffix|>{suffix}<|fim_middle|>",
    ),
    # StarCoder, Granite Code
    (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), "<fim_prefix>{prompt}<fim_suffix>{suffix}<fim_middle>"),
    # DeepSeek Coder
    (
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>{prompt}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    ),
    # Seed-Coder (arXiv 2506.03524, section 2.3)
    (
        ("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"),
        "<[fim-suffix]>{suffix}<[fim-prefix]>{prompt}<[fim-middle]>",
    ),
    # Codestral
    (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{suffix}[PREFIX]{prompt}"),
)
"""Marks of families that were trained to fill in -> the form of their prompts, as their model cards have it."""

_SEPARATORS = ("<|file_separator|>", "<|file_sep|>", "<file_sep>", "<|fim_pad|>", "<fim_pad>")
"""Further marks that a model ends what it fills in with: CodeGemma's, Qwen Coder's, StarCoder's."""


@dataclass(frozen=True)
class Filling:
    """``text``: the prompt whose continuation goes in between. ``ends``: token ids that end it."""

    text: str
    ends: tuple[int, ...] = ()


def ending(params: SamplingParams, filling: Filling) -> SamplingParams:
    """``params`` of what is filled in, which ends where the model says so."""
    room = LIMITS.stop_token_ids - len(params.stop_token_ids)
    return msgspec.structs.replace(params, stop_token_ids=(*params.stop_token_ids, *filling.ends[:room]))


async def fill_in(service: Service, prompt: str | list[int], suffix: str) -> Filling:
    """The text between ``prompt`` and ``suffix``, to be continued: by the operator's template, else in the form
    whose marks are tokens of the model. Raises 400 when that is not possible."""
    if not isinstance(prompt, str):
        raise invalid("suffix: needs the prompt as text, not as token ids.", param="suffix")
    path = service.arguments.completion_template
    if path is not None:
        try:
            return Filling(load_completion_template(path).render(prompt=prompt, suffix=suffix))
        except TemplateError as error:
            raise invalid(f"suffix: the completion template refuses it ({error.message}).", param="suffix") from None
    for marks, form in _FORMS:
        if all([await service.is_special(mark) for mark in marks]):
            ends = [await service.mark_token(mark) for mark in (*marks, *_SEPARATORS) if await service.is_special(mark)]
            return Filling(form.format(prompt=prompt, suffix=suffix), tuple([one for one in ends if one is not None]))
    raise invalid(
        "suffix: this model has no marks for it that are known; start the server with --completion-template.",
        param="suffix",
        code="unsupported_parameter",
    )
