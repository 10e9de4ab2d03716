"""Grammars by llguidance (github.com/guidance-ai/llguidance): derivatives of regular expressions and an Earley parser.

Almost nothing is computed at compile time, so that a new schema costs a millisecond.
"""

from __future__ import annotations

import json
import re
from ctypes import addressof, c_char

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from kernels.contract.grammar import Grammar, GrammarError, GrammarSettings
from kernels.grammar.backend import MAX_WHITESPACE, Bits, Compiled, read_tags, tokenizer_json

__all__ = ["LlGuidance"]


class LlGuidance:
    """See ``GrammarBackend``."""

    def __init__(self, settings: GrammarSettings, vocab_size: int) -> None:
        self._settings = settings
        self._tokenizer = llguidance.LLTokenizer(
            tokenizer_json(settings), n_vocab=vocab_size, eos_token=list(settings.eos_ids)
        )
        # Defaults bound the work of a step; messages must not print the parser's state.
        self._limits = llguidance.LLParserLimits(verbose_errors=False)

    def compile(self, grammar: Grammar) -> Compiled:
        try:
            text = self._translate(grammar)
        except GrammarError:
            raise
        except Exception as error:  # the library's converters raise bare exceptions
            raise GrammarError(str(error)) from error
        first = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if first.is_error():
            raise GrammarError(_first_lines(first.get_error()))
        return lambda: LlMatcher(first.deep_copy())

    def _translate(self, grammar: Grammar) -> str:
        """The grammar in the library's own form."""
        text, library = grammar.text, llguidance.LLMatcher
        if grammar.kind == "regex":
            return library.grammar_from_regex(text)
        if grammar.kind == "ebnf":
            return library.grammar_from_lark(any_to_lark(text))
        if grammar.kind == "choice":
            return library.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in json.loads(text)))
        if grammar.kind == "structural_tag":
            return self._tags(text)
        if text == "false":
            raise GrammarError("no text matches the schema false")
        text = {"": '{"type": "object"}', "true": "{}"}.get(text, text)  # the library takes objects only
        return library.grammar_from_json_schema(text, overrides=self._json(grammar))

    def _json(self, grammar: Grammar) -> llguidance._lib.JsonCompileOptions:
        whitespace = self._settings.whitespace if grammar.whitespace is None else grammar.whitespace
        if whitespace == "" or (whitespace is None and self._settings.compact):
            return {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
        return {"whitespace_pattern": whitespace or rf"[\x20\x0A\x0D\x09]{{0,{MAX_WHITESPACE}}}"}

    def _tags(self, text: str) -> str:
        tags = read_tags(text)
        options = self._json(Grammar("json_schema"))
        result = [
            llguidance.StructTag(
                trigger=next(trigger for trigger in tags.triggers if trigger and tag.begin.startswith(trigger)),
                begin=tag.begin,
                grammar=(tag.schema if isinstance(tag.schema, dict) else {}) | {"x-guidance": options},
                end=tag.end,
            )
            for tag in tags.structures
        ]
        return llguidance.StructTag.to_grammar(result, assume_special=False)


class LlMatcher:
    """See ``Matcher``."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._certain: list[int] = matcher.compute_ff_tokens()

    def follow(self, token: int) -> bool:
        result = self._matcher.consume_token(token)
        self._certain = self._matcher.compute_ff_tokens()
        return result

    def accept(self, token: int) -> bool:
        # The library consumes any tokens of forced bytes, but its mask allows their canonical one alone.
        certain = self._certain
        if (certain and token != certain[0]) or self._matcher.try_consume_tokens([token]) != 1:
            return False
        # Now its state is in the processor's cache. To find the tokens of a long text takes longer than to take them.
        self._certain = certain[1:] or self._matcher.compute_ff_tokens()
        return True

    def certain(self) -> list[int]:
        return self._certain

    forced = certain

    def rollback(self, tokens: int) -> None:
        self._matcher.rollback(tokens)
        self._certain = self._matcher.compute_ff_tokens()

    def fill(self, row: Bits) -> None:
        address = addressof(c_char.from_buffer(row.data))  # a fifth of the time of row.ctypes.data
        self._matcher.unsafe_compute_mask_ptr(address, row.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_first_lines(self._matcher.get_error()))


def _first_lines(message: str) -> str:
    result = re.split("<state>|<non-verbose/>", message)[0].strip()
    return "no text matches it" if result == "NoExtensionBias" else result
