"""Grammars of tool calls for tests: a tokenizer that has a format's marks, and texts of a grammar."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from tokenizers import AddedToken, Tokenizer

from app.parsers.base import StreamingParser
from app.parsers.tools.constraints import ToolConstraint
from kernels.contract.grammar import Grammar, GrammarSettings
from kernels.grammar.backend import Matcher
from kernels.grammar.llguidance_backend import LlGuidance
from tests.kits.grammars import FILE

__all__ = ["MarkedTokenizer"]

_EOS = 2


class MarkedTokenizer:
    """The tokenizer of the included model. ``special``: with the marks of ``form`` as tokens."""

    def __init__(self, form: type[StreamingParser], *, special: bool) -> None:
        self.tokenizer = Tokenizer.from_file(str(FILE))
        marks = [*form.OPEN, *form.MARKS, *form.TOKENS]
        if special:
            text = ("<function=", "</function>", "functools[", '<function name="')
            named = [mark for mark in marks if mark not in text]
            named = [mark for mark in named if not any(part in mark and part != mark for part in form.TOKENS)]
            self.tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in named])
        encoded = {mark: self.encode(mark) for mark in marks}
        self.tokens = {mark: ids[0] if len(ids) == 1 else None for mark, ids in encoded.items()}
        self._size = self.tokenizer.get_vocab_size()
        self._backend = LlGuidance(GrammarSettings("llguidance", self.tokenizer.to_str(), (_EOS,)), self._size)

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def compile(self, constraint: ToolConstraint) -> Callable[[], Matcher]:
        return self._backend.compile(Grammar(constraint.kind, constraint.text, constraint.whitespace))

    def accepts(self, compiled: Callable[[], Matcher], text: str) -> bool:
        state = compiled()
        return all(state.follow(token) for token in [*self.encode(text), _EOS])

    def sample(self, compiled: Callable[[], Matcher], seed: int, max_tokens: int = 600) -> str:
        """A random text of the grammar, which must end."""
        rng, state, ids = random.Random(seed), compiled(), []
        row = np.zeros(-(-self._size // 32), dtype=np.int32)
        for _ in range(max_tokens):
            state.fill(row)
            bits = np.unpackbits(row.view(np.uint8), count=self._size, bitorder="little")
            allowed = [int(token) for token in np.flatnonzero(bits) if token >= _EOS]
            if _EOS in allowed and (len(allowed) == 1 or rng.random() < 0.7):
                break
            marks = [token for token in allowed if token in self.tokens.values()]
            others = [token for token in allowed if token != _EOS]
            ids.append(rng.choice(marks if marks and rng.random() < 0.3 else others))
            assert state.follow(ids[-1])
        else:
            raise AssertionError(f"it does not end: {self.tokenizer.decode(ids, skip_special_tokens=False)[-200:]!r}")
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))
