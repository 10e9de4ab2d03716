"""Rows with a grammar take draft tokens, and their texts are those without any."""

from __future__ import annotations

import numpy as np
import pytest

from kernels.contract.grammar import Grammar, GrammarSettings
from kernels.contract.step import SlotSampling
from tests.kits.driver import ints
from tests.kits.grammars import EOS, FILE, tokenizer
from tests.kits.speculation.host_loops import draft_rows

SETTINGS = GrammarSettings("llguidance", str(FILE), (EOS, 0))
PROMPT = "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
ROWS = {
    1: SlotSampling(temperature=0.0, grammar=Grammar("regex", "[A-Z][A-Za-z, ]{0,120}[.]( [A-Z][A-Za-z, ]{0,99}[.])*")),
    2: SlotSampling(temperature=0.7, seed=3, grammar=Grammar("regex", "([A-DF-Z][a-z]*[ ,.]*|[a-z]+[ ,.]*)*")),
    3: SlotSampling(temperature=0.0),
    5: SlotSampling(temperature=0.7, top_p=0.8, seed=6, grammar=Grammar("regex", "([A-Z][a-z]*[ ,.]*|[a-z]+[ ,.]*)*")),
    4: SlotSampling(temperature=0.7, seed=5, grammar=Grammar("json_schema", '{"type": "object", "maxProperties": 2}')),
}


@pytest.mark.parametrize("algorithm", ["DFLASH", "EAGLE", "EAGLE3", "MTP", "STANDALONE", "NGRAM"])
def test_draft_tokens_change_no_text_with_a_grammar(algorithm, drive):
    driver, rows = draft_rows(drive, algorithm, grammar=SETTINGS)
    found = []
    for drafts in (0, 5):
        begun = len(rows)
        for slot, sampling in ROWS.items():
            driver.admit(slot, tokenizer().encode(PROMPT).ids, sampling=sampling)
        driver.step([(slot, driver.pending(slot)) for slot in ROWS])
        accepted = []
        for _ in range(60 if not drafts else 40):
            result = driver.step([(slot, 1) for slot in ROWS], dict.fromkeys(ROWS, drafts))
            assert not result.failed
            accepted.append(ints(result.accepted))
        assert bool(drafts) == (len(rows) > begun)
        found.append({slot: driver.tokens[slot][: driver.computed[slot]] for slot in ROWS})
        for slot in ROWS:
            driver.release(slot)
        driver.step([])
    assert np.mean(accepted) > 1.1  # some are accepted in rows with a grammar, too
    assert np.array(accepted)[:, [0, 1, 3, 4]].max(0).min() > 1
    for slot in ROWS:
        shorter = min(len(tokens[slot]) for tokens in found)
        assert found[0][slot][:shorter] == found[1][slot][:shorter]
