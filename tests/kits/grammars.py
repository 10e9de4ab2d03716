"""Grammars for tests: backends over the tokenizer of the included model, and random texts that they allow."""

from __future__ import annotations

import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from kernels.contract.grammar import Grammar, GrammarSettings
from kernels.grammar.backend import Matcher
from kernels.grammar.compiler import GrammarCompiler

__all__ = ["BACKENDS", "EOS", "FILE", "VOCAB", "SampledTokens", "allowed", "compiler", "sample", "tokenizer"]

FILE = Path(__file__).parents[2] / "app" / "understudy" / "model" / "tokenizer.json"

VOCAB = 4096 + 7
"""Wider than the tokenizer, as many models' logits are."""
EOS = 2

BACKENDS = [
    "llguidance",
    pytest.param("xgrammar", marks=pytest.mark.skipif(find_spec("xgrammar") is None, reason="needs xgrammar")),
]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FILE))


@cache
def compiler(backend: str, whitespace: str | None = None, compact: bool = False) -> GrammarCompiler:
    return GrammarCompiler(GrammarSettings(backend, str(FILE), (EOS, 0), whitespace, compact), VOCAB)


def allowed(matcher: Matcher) -> list[int]:
    row = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), count=VOCAB, bitorder="little")).tolist()


class SampledTokens(str):
    """A text. ``whole``: whether it ended by its grammar, not by its length."""

    whole: bool


def sample(backend: str, grammar: Grammar, seed: int = 0, max_tokens: int = 300) -> SampledTokens:
    """A random text of a grammar: each token is one of those allowed, short texts preferred."""
    rng, matcher, tokens = random.Random(seed), compiler(backend).compile(grammar).result(30)(), []
    for _ in range(max_tokens):
        found = allowed(matcher)
        if not found:
            raise AssertionError(f"nothing may follow {tokenizer().decode(tokens)!r}")
        if EOS in found and (len(found) <= 2 or rng.random() < 0.5):
            text = SampledTokens(tokenizer().decode(tokens, skip_special_tokens=False))
            text.whole = True
            return text
        closing = [token for token in found if tokenizer().id_to_token(token)[:1] in ('"', "}", "]", ",")]
        choice = closing if closing and rng.random() < 0.3 else [token for token in found if token not in (0, EOS)]
        tokens.append(rng.choice(choice))
        if not matcher.accept(tokens[-1]):
            raise AssertionError(f"an allowed token was not accepted after {tokenizer().decode(tokens)!r}")
    text = SampledTokens(tokenizer().decode(tokens, skip_special_tokens=False))
    text.whole = False
    return text
