"""A draft model whose tables have some rows more or fewer than the target's: its draft tokens, and ids that it has
not."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from app.understudy import MODEL_DIR
from app.understudy.drafts import DRAFTS
from kernels.contract.errors import ConfigError
from kernels.contract.speculation import SpeculativeSettings, same_tokens
from kernels.speculation.drafters.standalone import PaddedEmbedding
from tests.kits.native import needs_native

VOCAB = 4096


@pytest.fixture
def draft(tmp_path: Path) -> Callable[[int, bool], str]:
    """The draft in the box with tables of ``rows``, those beyond its own likely to be drafted."""

    def make(rows: int, tied: bool) -> str:
        source = DRAFTS / "standalone"
        config = json.loads((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        table = tensors["model.embed_tokens.weight"]
        head = table if config["tie_word_embeddings"] else tensors.pop("lm_head.weight")
        tensors["model.embed_tokens.weight"] = _rows(table, rows)
        if not tied:
            tensors["lm_head.weight"] = _rows(head, rows)
        (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": rows, "tie_word_embeddings": tied}))
        save_file(tensors, tmp_path / "model.safetensors")
        return str(tmp_path)

    return make


def _rows(table: torch.Tensor, rows: int) -> torch.Tensor:
    more = table[: max(0, rows - len(table))] * 8
    return torch.cat((table[:rows], more)).contiguous()


def _generate(driver, prompt: list[int], steps: int = 12) -> tuple[list[int], list[int]]:
    """What is said, and how many tokens each step said."""
    driver.admit(1, prompt)
    driver.step([(1, driver.pending(1))])
    counts = [int.from_bytes(driver.step([(1, 1)], {1: 3}).accepted[:4], "little") for _ in range(steps)]
    return driver.tokens[1], counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "apart"])
@pytest.mark.parametrize("rows", [VOCAB - 16, VOCAB + 16])
def test_it_drafts_as_with_tables_of_the_same_size(rows, tied, dtype, draft, drive):
    prompt = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode("The capital of France is").ids
    found = []
    for path in (draft(rows, tied), str(DRAFTS / "standalone")):
        driver = drive(MODEL_DIR, dtype=dtype, speculation=SpeculativeSettings("STANDALONE", draft_model_path=path))
        found.append(_generate(driver, prompt))
    assert found[0] == found[1]
    assert sum(found[0][1]) > 18, "12 of them were not drafted"


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native)])
def test_ids_that_the_draft_has_not_are_no_harm(dtype, draft, drive):
    prompt = [1, 300, VOCAB - 1, 301, VOCAB - 2]
    settings = SpeculativeSettings("STANDALONE", draft_model_path=draft(VOCAB - 16, True))
    generated, _ = _generate(drive(MODEL_DIR, dtype=dtype, speculation=settings), prompt)
    plain = drive(MODEL_DIR, dtype=dtype)
    plain.admit(1, prompt)
    assert plain.generate(1, len(generated)) == generated


def test_an_output_layer_that_is_cut_is_not_held_twice(draft, drive):
    rows = VOCAB + 8  # of no other test's tensors
    driver = drive(MODEL_DIR, speculation=SpeculativeSettings("STANDALONE", draft_model_path=draft(rows, False)))
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape[:1] == (rows,)]
    assert driver.info.draft_weight_bytes
    assert len(held) == 1, "the table, and no output layer"


def test_other_vocabularies_are_refused(draft, drive):
    with pytest.raises(ConfigError, match="4000 tokens, the model 4096"):
        drive(MODEL_DIR, speculation=SpeculativeSettings("STANDALONE", draft_model_path=draft(4000, True)))


def test_the_tables_of_one_family_have_the_same_tokens():
    assert same_tokens(151_936, 152_064)
    assert same_tokens(152_064, 151_936)
    assert not same_tokens(32_000, 32_768)


def test_rows_of_zeros_are_looked_up_and_never_drafted():
    class Source:
        def table(self, module):
            return torch.ones(5, 3)

    padded = PaddedEmbedding(Source(), 7, tied=True)
    table = padded.table("model.embed_tokens")
    assert table.shape == (7, 3)
    assert not table[5:].any()
    assert torch.equal(padded.projection(["lm_head"]), torch.ones(5, 3))
