"""Rows with a grammar take draft tokens, and their texts are those without any."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from app.understudy import MODEL_DIR
from kernels.contract.grammar import Grammar, GrammarSettings
from kernels.contract.step import SlotSampling
from tests.kits.driver import ints
from tests.kits.executors import remove_executor
from tests.kits.grammars import BACKENDS, EOS, FILE, tokenizer
from tests.kits.speculation.native_loops import OPTIONS, draft_rows, drafting

SETTINGS = GrammarSettings("llguidance", str(FILE), (EOS, 0))
PROMPT = "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
ROWS = {
    1: SlotSampling(temperature=0.0, grammar=Grammar("regex", "[A-Z][A-Za-z, ]{0,120}[.]( [A-Z][A-Za-z, ]{0,99}[.])*")),
    2: SlotSampling(temperature=0.7, seed=3, grammar=Grammar("regex", "([A-DF-Z][a-z]*[ ,.]*|[a-z]+[ ,.]*)*")),
    3: SlotSampling(temperature=0.0),
    5: SlotSampling(temperature=0.7, top_p=0.8, seed=6, grammar=Grammar("regex", "([A-Z][a-z]*[ ,.]*|[a-z]+[ ,.]*)*")),
    4: SlotSampling(temperature=0.7, seed=5, grammar=Grammar("json_schema", '{"type": "object", "maxProperties": 2}')),
}


ALGORITHMS = ["DFLASH", "EAGLE", "EAGLE3", "MTP", "STANDALONE", "NGRAM"]


def compare(driver, drafts):
    """The texts without draft tokens and with them are equal; the accepted numbers of the rows."""
    found = []
    for most in (0, drafts):
        for slot, sampling in ROWS.items():
            driver.admit(slot, tokenizer().encode(PROMPT).ids, sampling=sampling)
        driver.step([(slot, driver.pending(slot)) for slot in ROWS])
        accepted = []
        for _ in range(60 if not most else 40):
            result = driver.step([(slot, 1) for slot in ROWS], dict.fromkeys(ROWS, most))
            assert not result.failed
            accepted.append(ints(result.accepted))
        found.append({slot: driver.tokens[slot][: driver.computed[slot]] for slot in ROWS})
        for slot in ROWS:
            driver.release(slot)
        driver.step([])
    for slot in ROWS:
        shorter = min(len(tokens[slot]) for tokens in found)
        assert found[0][slot][:shorter] == found[1][slot][:shorter]
    return np.array(accepted)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_draft_tokens_change_no_text_with_a_grammar(algorithm, drive):
    driver, rows = draft_rows(drive, algorithm, grammar=SETTINGS)
    accepted = compare(driver, 5)
    assert rows
    assert np.mean(accepted) > 1.1  # some are accepted in rows with a grammar, too
    assert accepted[:, [0, 1, 3, 4]].max(0).min() > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("algorithm", "topk"), [*((each, 0) for each in ALGORITHMS), ("EAGLE", 3)])
def test_masks_after_draft_tokens_change_no_text_on_a_device(algorithm, topk, backend, drive):
    """As on a device, where sampled tokens come with a copy, and the grammar of a tree's nodes masks their logits."""
    settings = drafting(algorithm)
    if topk:
        settings = msgspec.structs.replace(settings, topk=topk)
    forms = msgspec.structs.replace(SETTINGS, backend=backend)
    driver = drive(MODEL_DIR, speculation=settings, grammar=forms, **OPTIONS)
    for name in ("NativeDecode", "NativeChains", "NativePrefill"):
        remove_executor(driver.runner, name)
    driver.runner._loaded.grammars._table = None
    accepted = compare(driver, 11 if topk else 5)
    assert accepted[:, [0, 1, 3, 4]].max(0).min() > 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("on_device", [False, True])
def test_forced_tokens_are_drafted_that_were_never_seen(on_device, backend, drive):
    forms = msgspec.structs.replace(SETTINGS, backend=backend)
    driver = drive(MODEL_DIR, speculation=drafting("NGRAM"), grammar=forms, **OPTIONS)
    if on_device:
        for name in ("NativeDecode", "NativeChains", "NativePrefill"):
            remove_executor(driver.runner, name)
        driver.runner._loaded.grammars._table = None
    forced = " jolly quartz sphinxes vow to judge my xylophone"
    grammar, found = Grammar("regex", f"(A|B){forced}[0-9]{{9}}"), []
    for most in (0, 11):
        driver.admit(1, tokenizer().encode(PROMPT).ids, sampling=SlotSampling(seed=2, grammar=grammar))
        driver.step([(1, driver.pending(1))])
        accepted = [ints(driver.step([(1, 1)], {1: most}).accepted)[0] for _ in range(20 - most)]
        found.append(driver.tokens[1][len(tokenizer().encode(PROMPT).ids) : driver.computed[1]])
        driver.release(1)
        driver.step([])
    assert max(accepted) > (9 if backend == "llguidance" else 2)  # xgrammar allows other tokens of the same text
    shorter = min(map(len, found))
    assert found[0][:shorter] == found[1][:shorter]
    assert shorter > 15
