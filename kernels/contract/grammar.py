"""A grammar: the form that the text of an answer must have."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Grammar", "GrammarError", "GrammarKind", "GrammarSettings"]

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag"]


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What a request's text must match, from its first token (or the end of its thought) to the end.

    ``text`` by kind. json_schema: the schema as JSON. json_object: empty. regex: the whole text matches it. ebnf: rules
    in GBNF (``root ::= ...``) or in Lark's syntax. choice: a JSON list of strings. structural_tag: an object
    ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`` as JSON.
    ``whitespace``: a regular expression for the white space between the parts of JSON; empty: none,
    None: the server's.
    """

    kind: GrammarKind
    text: str = ""
    whitespace: str | None = None


class GrammarSettings(msgspec.Struct, frozen=True):
    """What a runner needs to follow grammars.

    ``backend``: llguidance | xgrammar. ``tokenizer``: the tokenizer as the JSON of tokenizer.json, or the path of such
    a file. ``eos_ids``: tokens that end a text. ``whitespace``: see ``Grammar``; None: up to 16 characters.
    ``compact``: no white space in JSON.
    """

    backend: str
    tokenizer: str
    eos_ids: tuple[int, ...]
    whitespace: str | None = None
    compact: bool = False


class GrammarError(ValueError):
    """The grammar is wrong, or is more than the backend supports. The message says what."""
