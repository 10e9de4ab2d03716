"""Fill in the middle: prompt and suffix joined by the operator's template (``--completion-template``)."""

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


def fill_in(service: Service, prompt: str | list[int], suffix: str) -> str:
    """The text whose continuation goes between ``prompt`` and ``suffix``. Raises 400 when that is not possible."""
    path = service.arguments.completion_template
    if path is None:
        raise invalid(
            "suffix: this model has no template for it; start the server with --completion-template.",
            param="suffix",
            code="unsupported_parameter",
        )
    if not isinstance(prompt, str):
        raise invalid("suffix: needs the prompt as text, not as token ids.", param="suffix")
    try:
        return load_completion_template(path).render(prompt=prompt, suffix=suffix)
    except TemplateError as error:
        raise invalid(f"suffix: the completion template refuses it ({error.message}).", param="suffix") from None
