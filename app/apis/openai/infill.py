"""Fill in the middle: prompt and suffix joined in the model's form."""

from __future__ import annotations

import functools
from pathlib import Path

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.server.errors import invalid
from app.server.service import Service

__all__ = ["fill_in", "load_completion_template"]


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
    # Codestral
    (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]{suffix}[PREFIX]{prompt}"),
)
"""Marks of families that were trained to fill in -> the form of their prompts, as their model cards have it."""


async def fill_in(service: Service, prompt: str | list[int], suffix: str) -> str:
    """The text whose continuation goes between ``prompt`` and ``suffix``: by the operator's template, else in the form
    whose marks are tokens of the model. Raises 400 when that is not possible."""
    if not isinstance(prompt, str):
        raise invalid("suffix: needs the prompt as text, not as token ids.", param="suffix")
    path = service.arguments.completion_template
    if path is not None:
        try:
            return load_completion_template(path).render(prompt=prompt, suffix=suffix)
        except TemplateError as error:
            raise invalid(f"suffix: the completion template refuses it ({error.message}).", param="suffix") from None
    for marks, form in _FORMS:
        if all([await service.is_special(mark) for mark in marks]):
            return form.format(prompt=prompt, suffix=suffix)
    raise invalid(
        "suffix: this model has no marks for it that are known; start the server with --completion-template.",
        param="suffix",
        code="unsupported_parameter",
    )
