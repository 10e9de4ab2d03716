"""Compiled grammars are kept, apart from those that are wrong."""

from __future__ import annotations

import time

import pytest

from kernels.contract.grammar import Grammar, GrammarError
from kernels.grammar import compiler
from tests.kits.grammars import EOS, FILE, VOCAB

SETTINGS = compiler.GrammarSettings("llguidance", str(FILE), (EOS, 0))


def test_wrong_grammars_push_out_no_good_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_KEPT", 2)
    monkeypatch.setattr(compiler, "_KEPT_ERRORS", 3)
    made = compiler.GrammarCompiler(SETTINGS, VOCAB)
    good = made.compile(Grammar("regex", "ab"))
    good.result(30)
    wrong = []
    for count in range(1, 7):
        wrong.append(made.compile(Grammar("regex", "(" * count)))
        with pytest.raises(GrammarError):
            wrong[-1].result(30)
        while wrong[-1] in made._results.values():  # the future is done a moment before its callback
            time.sleep(0.001)
    assert made.compile(Grammar("regex", "ab")) is good
    assert len(made._errors) == 3
    assert made.compile(Grammar("regex", "(" * 6)) is wrong[-1]
    made.close()
