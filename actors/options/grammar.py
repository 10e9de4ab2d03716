"""The arguments of constrained output. Names are SGLang's."""

from __future__ import annotations

from typing import Annotated, Literal

from actors.options.argument import Group
from actors.options.declaration import ArgumentSpec
from actors.options.quantization import QuantizationArguments

__all__ = ["GrammarArguments"]

_GROUP: Group = "Grammar"
_OTHER = "this backend is not built; use llguidance or xgrammar"


class GrammarArguments(QuantizationArguments, frozen=True, kw_only=True):
    """The arguments of constrained output. Names are SGLang's."""

    grammar_backend: Annotated[
        Literal["auto", "llguidance", "xgrammar", "none"],
        ArgumentSpec(
            group=_GROUP,
            aliases=("guided-decoding-backend",),
            synonyms={"guidance": "llguidance"},
            unbuilt_choices=dict.fromkeys(("outlines", "lm-format-enforcer"), _OTHER),
            help="Library that constrains answers to a JSON schema, a regular expression or a grammar. auto is "
            'llguidance; xgrammar needs pip install -e ".[xgrammar]". none refuses such requests.',
        ),
    ] = "auto"

    constrained_json_whitespace_pattern: Annotated[
        str | None,
        ArgumentSpec(
            group=_GROUP,
            metavar="REGEX",
            default_text="up to 16 characters",
            help="Regular expression for the white space between the parts of constrained JSON, with llguidance only.",
        ),
    ] = None

    constrained_json_disable_any_whitespace: Annotated[
        bool,
        ArgumentSpec(
            group=_GROUP,
            aliases=("guided-decoding-disable-any-whitespace",),
            help="Allow no white space between the parts of constrained JSON.",
        ),
    ] = False
