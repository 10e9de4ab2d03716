"""Token maps are read in every format, and everything else says what is wrong with it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from kernels.contract.errors import LoadError
from kernels.contract.speculation import SpeculativeSettings
from kernels.speculation.drafters.eagle import EagleDrafter
from kernels.speculation.token_map import read_token_map
from tests.kits.speculation.drafting import HIDDEN, VOCAB, Drafting, make_target, seeded, write
from tests.kits.speculation.layouts import DRAFT, PlainEagle, eagle_shapes

IDS = [5, 0, 17, 3]


def write_map(path, ids):
    match path.suffix:
        case ".json":
            path.write_text(json.dumps(ids))
        case ".safetensors":
            save_file({"ids": torch.tensor(ids, dtype=torch.int32)}, path)
    return path


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_formats(suffix, tmp_path):
    found = read_token_map(write_map(tmp_path / f"map{suffix}", IDS), 18)
    assert found.dtype == torch.int64
    assert found.tolist() == IDS


@pytest.mark.parametrize(
    ("ids", "reported"),
    [
        ([5, 18], "the model has 0 to 17: is it the map of another model"),
        ([5, -1], "ids from -1 to 5"),
        ([5, 5], "contains a token twice"),
        ([], "must be a list of token ids"),
        ([[5], [6]], r"of shape \[2, 1\]"),
        ([0.5], "is torch.float32"),
        ([True], "is torch.bool"),
        ({"a": 1}, "must be a list of token ids"),
        (["a"], "must be a list of token ids"),
        (None, "must be a list of token ids"),
    ],
)
def test_what_is_no_map(ids, reported, tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(ids))
    with pytest.raises(LoadError, match=reported):
        read_token_map(tmp_path / "map.json", 18)


@pytest.mark.parametrize("held", [tuple(IDS), torch.tensor(IDS, dtype=torch.int32)], ids=type)
def test_a_map_that_torch_has_saved_is_read(held, tmp_path):
    """A list is read in ``test_a_map_is_unpickled_in_another_process``."""
    torch.save(held, tmp_path / "map.pt")
    found = read_token_map(tmp_path / "map.pt", 18)
    assert found.dtype == torch.int64
    assert found.tolist() == IDS


class Explosive:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (self.mark, "w")


def test_a_map_that_runs_code_is_refused_and_runs_none(tmp_path):
    mark = tmp_path / "mark"
    torch.save([Explosive(str(mark))], tmp_path / "map.pt")
    with pytest.raises(LoadError, match=r"cannot be read as a list .* make it a JSON list"):
        read_token_map(tmp_path / "map.pt", 18)
    assert not mark.exists()


def test_a_map_is_unpickled_in_another_process(tmp_path, monkeypatch):
    torch.save(IDS, tmp_path / "map.pt")
    monkeypatch.setattr(torch, "load", None)
    assert read_token_map(tmp_path / "map.pt", 18).tolist() == IDS


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("none.json", "does not exist"),
        ("map.txt", "must be a .json"),
        ("map.pt", "cannot be read as a list"),
        ("map.json", "cannot be read"),
    ],
)
def test_files_that_are_none(name, reported, tmp_path):
    for nonfinite in ("map.txt", "map.json", "map.pt"):
        (tmp_path / nonfinite).write_text("[1")
    with pytest.raises(LoadError, match=reported):
        read_token_map(tmp_path / name, 18)


def test_two_tensors_are_refused(tmp_path):
    save_file({"a": torch.tensor([1]), "b": torch.tensor([2])}, tmp_path / "map.safetensors")
    with pytest.raises(LoadError, match="must have one tensor, and has 2"):
        read_token_map(tmp_path / "map.safetensors", 18)


def test_the_rows_of_a_head_of_its_own_are_read_again(tmp_path):
    """The target's packed head cannot be cut down; its file can."""
    (tmp_path / "target").mkdir()
    target, own = make_target(tmp_path / "target", tie_word_embeddings=False)
    weights = seeded(eagle_shapes(), 21)
    draft = write(tmp_path / "draft", DRAFT, weights)
    options = {"num_steps": 1, "num_draft_tokens": 2, "token_map": str(write_map(tmp_path / "map.json", IDS))}
    made = Drafting(EagleDrafter, target, HIDDEN, algorithm="EAGLE", draft_model_path=str(draft), **options)
    made.observe((0, 7))
    ((tokens, _),) = made.draft(0)
    plain = PlainEagle(weights, own)
    state = plain.run(made.tokens[0, 1:8], made.features[0, :7])[-1]
    assert tokens[1] == IDS[int((own["lm_head.weight"][IDS] @ state).argmax())]


@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_model_of_its_own_has_the_tokens_of_the_map(tied, drive, tmp_path):
    (tmp_path / "target").mkdir()
    target, _ = make_target(tmp_path / "target", tie_word_embeddings=tied)
    ids = list(range(0, VOCAB, 3))
    settings = SpeculativeSettings("STANDALONE", str(target), token_map=str(write_map(tmp_path / "map.json", ids)))
    driver = drive(target, speculation=settings)
    plain = drive(target)
    for made in (driver, plain):
        made.admit(1, [5, 6, 7])
    expected = plain.generate(1, 40)
    driver.step([(1, 3)])
    reported = []
    while len(driver.tokens[1]) < 40:
        known = len(driver.tokens[1])
        driver.step([(1, 1)], {1: 3})
        reported += [(known, len(driver.tokens[1]) - known)]
    assert driver.tokens[1][:40] == expected
    for known, count in reported:  # the target itself draft tokens: all that the map has is right
        run = [token % 3 == 0 for token in driver.tokens[1][known : known + 3]]
        assert count == 1 + (run.index(False) if False in run else 3)
