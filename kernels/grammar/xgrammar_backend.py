"""Grammars by xgrammar (Dong et al., "XGrammar: Flexible and Efficient Structured Generation Engine", 2024).

Masks of tokens that do not depend on the parser's stack are computed at compile time.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import torch
import xgrammar
from tokenizers import Tokenizer

from kernels.contract.grammar import Grammar, GrammarError, GrammarSettings
from kernels.grammar.backend import MAX_WHITESPACE, Bits, Compiled, read_tags, tokenizer_json
from kernels.grammar.keywords import adapt_schema

__all__ = ["XGrammar"]

_ANY_OBJECT = '{"type": "object"}'


class XGrammar:
    """See ``GrammarBackend``."""

    def __init__(self, settings: GrammarSettings, vocab_size: int) -> None:
        self._settings, self._vocab_size = settings, vocab_size
        text = tokenizer_json(settings)
        result: dict[str, Any] = xgrammar.TokenizerInfo._detect_metadata_from_hf(text)
        tokenizer = msgspec.json.decode(text)
        self._tokenizer = Tokenizer.from_str(text)
        vocabulary = [""] * vocab_size  # an empty token is never allowed
        for token, at in _tokens(tokenizer).items():
            if at < vocab_size:
                vocabulary[at] = token
        for added in tokenizer.get("added_tokens", ()):
            if added["id"] < vocab_size:
                vocabulary[added["id"]] = "" if added.get("special") else added["content"]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            result["vocab_type"],
            vocab_size=vocab_size,
            stop_token_ids=list(settings.eos_ids),
            add_prefix_space=result["add_prefix_space"],
        )
        # Its own cache is off: ``GrammarCompiler`` has one with a bound on entries.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> Compiled:
        try:
            compiled = self._compile(grammar)
        except GrammarError:
            raise
        except Exception as error:  # of many types
            raise GrammarError(_readable(str(error))) from error
        return lambda: XMatcher(xgrammar.GrammarMatcher(compiled), self._tokenizer)

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        text, compiler = grammar.text, self._compiler
        if grammar.kind == "regex":
            return compiler.compile_regex(text)
        if grammar.kind == "ebnf":
            if "::=" not in text:
                raise GrammarError("xgrammar takes GBNF, whose rules are written with ::=")
            return compiler.compile_grammar(text)
        if grammar.kind == "choice":
            # It takes the two halves of an escaped surrogate pair for two characters.
            choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(text))
            return compiler.compile_grammar(f"root ::= {choices}")
        if grammar.kind == "structural_tag":
            tags = read_tags(text)
            for tag in tags.structures:
                adapt_schema(tag.schema)
            items = [
                xgrammar.StructuralTagItem(begin=t.begin, schema=_schema(t.schema), end=t.end) for t in tags.structures
            ]
            return compiler.compile_structural_tag(items, tags.triggers)
        if grammar.whitespace or self._settings.whitespace:
            raise GrammarError("xgrammar takes no pattern of white space; use --grammar-backend llguidance")
        schema = msgspec.json.decode(text or _ANY_OBJECT)
        adapt_schema(schema)
        text = msgspec.json.encode(schema).decode()
        if self._settings.compact or grammar.whitespace == "":
            return compiler.compile_json_schema(text, any_whitespace=False, separators=(",", ":"), strict_mode=False)
        return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE, strict_mode=False)


class XMatcher:
    """See ``Matcher``."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, tokenizer: Tokenizer) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    follow = accept

    def forced(self) -> list[int]:
        text = self._matcher.find_jump_forward_string()
        result: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids if text else []
        return result

    def certain(self) -> list[int]:
        return []  # it allows other tokens of a forced text

    def rollback(self, tokens: int) -> None:
        self._matcher.rollback(tokens)

    def fill(self, row: Bits) -> None:
        self._matcher.fill_next_token_bitmask(torch.from_numpy(row[None]), 0)


def _tokens(tokenizer: dict[str, Any]) -> dict[str, int]:
    """The model's vocabulary: by token, or a list of them with scores."""
    result = tokenizer["model"]["vocab"]
    return result if isinstance(result, dict) else {entry[0]: at for at, entry in enumerate(result)}


def _schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return schema if isinstance(schema, dict) else {}


def _readable(message: str) -> str:
    """Without the time and the place in the library's source."""
    return re.sub(r"\[\d\d:\d\d:\d\d\] \S+: ", "", message).strip()
