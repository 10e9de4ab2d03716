"""The drafts in the box: their files, acceptance, and that the engine accepts as much as plain torch."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

from app.understudy import MODEL_DIR
from app.understudy.drafts import DRAFTS, TOKEN_MAP, draft_path
from kernels.contract.config import RunnerConfig
from kernels.contract.speculation import SpeculativeSettings
from kernels.execution.runner import ModelRunner
from tests.kits.driver import Driver
from tests.understudy.drafts import train
from tests.understudy.drafts.decoder import Decoder, generate, load
from tests.understudy.drafts.dflash import DFlash
from tests.understudy.drafts.heads import Eagle3, unroll
from tests.understudy.drafts.measure import Dialogue, held_out, measure
from tests.understudy.drafts.recipes import CONFIGS, create, load_draft, save_draft
from tests.understudy.drafts.students import loss_of, prepare
from tests.understudy.drafts.texts import Batch, load_texts
from tests.understudy.packing import LEARN

ALGORITHMS = {"EAGLE": "eagle", "EAGLE3": "eagle3", "MTP": "mtp", "DFLASH": "dflash", "STANDALONE": "standalone"}
FLOORS = {"eagle": 3.0, "eagle3": 2.8, "mtp": 3.0, "dflash": 2.8, "standalone": 2.6}
"""Tokens a cycle with chains of three drafts, 4 at most."""
LAYOUT = {
    "eagle": {"fc.weight": (256, 512), "layers.0.self_attn.q_proj.weight": (256, 256)},
    "eagle3": {
        "fc.weight": (256, 768), "midlayer.self_attn.k_proj.weight": (128, 512), "midlayer.hidden_norm.weight": (256,),
        "midlayer.input_layernorm.weight": (256,), "norm.weight": (256,), "lm_head.weight": (2048, 256),
        "d2t": (2048,), "t2d": (4096,),
    },
    "mtp": {
        "model.mtp_layers.0.input_proj.weight": (256, 512), "model.mtp_layers.0.token_layernorm.weight": (256,),
        "model.mtp_layers.0.hidden_layernorm.weight": (256,), "model.mtp_layers.0.final_layernorm.weight": (256,),
    },
    "dflash": {
        "fc.weight": (256, 512), "hidden_norm.weight": (256,), "norm.weight": (256,),
        "layers.0.self_attn.q_norm.weight": (64,),
    },
    "standalone": {"model.embed_tokens.weight": (4096, 128), "model.norm.weight": (128,)},
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Decoder:
    return load(MODEL_DIR, "cpu")


@pytest.fixture(scope="module")
def dialogues(target: Decoder) -> list[Dialogue]:
    return held_out(target, count=24, limit=64, batch=24)


def test_the_drafts_take_at_most_eight_megabytes():
    files = [file for kind in ("*/*.safetensors", "*/*.json", "*.json") for file in DRAFTS.glob(kind)]
    assert len(files) == 11
    assert sum(file.stat().st_size for file in files) <= 8_000_000


def test_every_algorithm_finds_its_draft():
    for algorithm, name in ALGORITHMS.items():
        path = draft_path(algorithm)
        assert path == DRAFTS / name
        assert json.loads((path / "config.json").read_text()) == CONFIGS[name]
    assert draft_path("eagle3") == DRAFTS / "eagle3"
    assert draft_path("NGRAM") is None


@pytest.mark.parametrize("name", LAYOUT)
def test_the_layout_is_the_public_one(name):
    with safe_open(DRAFTS / name / "model.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert LAYOUT[name].items() <= shapes.items()
    floating = {tensor.dtype for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
    assert floating == {torch.bfloat16}
    assert ("layers.0.input_layernorm.weight" in shapes) is (name == "dflash")
    if name == "eagle3":
        chosen = tensors["d2t"] + torch.arange(2048)
        assert tensors["t2d"].nonzero().flatten().tolist() == chosen.tolist()


def test_the_token_map_ranks_tokens_and_starts_with_what_every_answer_has():
    ids = json.loads(TOKEN_MAP.read_text())
    assert len(ids) == len(set(ids)) == 2048
    assert 0 <= min(ids) <= max(ids) < 4096
    assert 2 in ids[:5]  # the end of a turn


@pytest.mark.parametrize("name", FLOORS)
def test_target_accepts_draft_tokens(name, target, dialogues):
    draft = load_draft(DRAFTS / name, "cpu")
    got = measure(draft, target, dialogues, depth=3)
    assert FLOORS[name] < got.chain <= got.comb + 0.1 <= 4.1  # cycles of the two begin at other tokens
    assert list(got.rates) == sorted(got.rates, reverse=True)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_engine_accepts_as_much_and_generates_the_same(algorithm, target, dialogues):
    asked = dialogues[::3]
    settings = SpeculativeSettings(algorithm, str(draft_path(algorithm)), num_steps=3, num_draft_tokens=4, block_size=4)
    runner = ModelRunner(
        RunnerConfig(
            str(MODEL_DIR), dtype="float32", max_total_tokens=4096, max_slots=3, threads=1, speculation=settings
        )
    )
    driver = Driver(runner, runner.load())
    cycles = tokens = 0
    for one in asked:
        driver.admit(1, one.prompt)
        driver.step([(1, len(one.prompt))])
        while len(driver.tokens[1]) < len(one.prompt) + len(one.answer):
            driver.step([(1, 1)], {1: 3})
            cycles += 1
        assert driver.tokens[1][: len(one.prompt) + len(one.answer)] == one.prompt + one.answer
        tokens += len(one.answer) - 1
        driver.release(1)
    draft = load_draft(draft_path(algorithm), "cpu")
    expected = measure(draft, target, asked, depth=3).chain
    short_block = 0.35 if algorithm == "DFLASH" else 0.12  # its draft was trained on blocks of another length
    assert tokens / cycles == pytest.approx(expected, abs=short_block)


def test_the_engine_runs_several_layers_as_they_are_trained(target, dialogues, tmp_path):
    """Layers that differ, each for a step of its own."""
    draft = create("multi_mtp", target, np.arange(4096), seed=3)
    with torch.no_grad():
        for number, layer in enumerate(draft.layers):
            layer.input_proj.weight.mul_(1 - 0.1 * number)
    save_draft(draft, tmp_path / "multi_mtp")
    settings = SpeculativeSettings(
        "MTP", str(tmp_path / "multi_mtp"), num_steps=3, num_draft_tokens=4, multi_layer=True
    )
    runner = ModelRunner(
        RunnerConfig(
            str(MODEL_DIR), dtype="float32", max_total_tokens=4096, max_slots=3, threads=1, speculation=settings
        )
    )
    driver = Driver(runner, runner.load())
    (one,) = dialogues[5:6]
    driver.admit(1, one.prompt)
    driver.step([(1, len(one.prompt))])
    cycles = 0
    while len(driver.tokens[1]) < len(one.prompt) + len(one.answer):
        driver.step([(1, 1)], {1: 3})
        cycles += 1
    assert driver.tokens[1][: len(one.prompt) + len(one.answer)] == one.prompt + one.answer
    expected = measure(load_draft(tmp_path / "multi_mtp", "cpu"), target, [one], depth=5)
    assert len(expected.rates) == 3
    assert expected.chain > 1.3
    assert (len(one.answer) - 1) / cycles == pytest.approx(expected.chain, abs=0.15)


def _batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(9, 4096, (2, 40), generator=generator)
    learned = torch.zeros_like(ids, dtype=torch.bool)
    learned[:, 12:] = True
    return Batch(ids, learned)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "mtp", "multi_mtp"])
def test_a_head_sees_no_token_before_its_time(name, target):
    draft = create(name, target, np.arange(4096), 3) if name == "multi_mtp" else load_draft(DRAFTS / name, "cpu")
    ids = _batch().ids
    changed = ids.clone()
    changed[:, 20:] = 77

    def reads(tokens):
        sums, normed = target(tokens)
        return list(unroll(draft, sums, normed, target.embed(torch.roll(tokens, -1, dims=1)), 3))

    for step, (before, after) in enumerate(zip(reads(ids), reads(changed), strict=True)):
        # Index i reads tokens up to i + 1, and after `step` steps features up to i - step.
        torch.testing.assert_close(before[:, step:19], after[:, step:19])
        assert (before[:, 19] - after[:, 19]).abs().max() > 1e-3


def test_a_block_sees_what_stands_before_it_and_its_first_token(target):
    draft, ids = load_draft(DRAFTS / "dflash", "cpu"), _batch().ids
    assert isinstance(draft, DFlash)
    starts = torch.tensor([[9, 20], [15, 30]])

    def read(tokens):
        sums, _ = target(tokens)
        masked = target.embed(torch.tensor(draft.mask_token))
        return draft(sums, target.embed(tokens.gather(1, starts)), masked, starts)

    changed = ids.clone()
    changed[:, 21:] = 77
    before, after = read(ids), read(changed)
    torch.testing.assert_close(before[0], after[0])
    torch.testing.assert_close(before[1, 0], after[1, 0])
    assert (before[1, 1] - after[1, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", CONFIGS)
def test_training_lowers_the_loss_and_what_is_saved_loads(name, target, tmp_path):
    counts = np.arange(4096)
    draft = create(name, target, counts, seed=3)
    if isinstance(draft, Eagle3):
        assert draft.vocabulary.tolist() == list(range(2048, 4096))
    lesson, loss = prepare(target, _batch()), loss_of(draft)
    torch.manual_seed(0)
    first = float(loss(lesson).detach())
    optimizer = torch.optim.AdamW(draft.parameters(), lr=2e-3)
    for _ in range(6):
        optimizer.zero_grad()
        loss(lesson).backward()
        optimizer.step()
    assert float(loss(lesson).detach()) < 0.9 * first
    save_draft(draft, tmp_path / name)
    again = load_draft(tmp_path / name, "cpu")
    saved = draft.state_dict()
    for key, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor.float(), saved[key].to(torch.bfloat16).float())


def test_drafts_are_trained_further_from_stored_weights(tmp_path):
    np.savez(tmp_path / "t.npz", tokens=np.array([5, 6 | LEARN], dtype=np.uint16), bounds=np.array([0, 2]))
    words = ["drafts", "--start", str(DRAFTS), "--only", "eagle3", "--seconds", "0", "--texts", str(tmp_path / "t.npz")]
    train.main([*words, "--out", str(tmp_path)])
    stored, again = (load_draft(path / "eagle3", "cpu").state_dict() for path in (DRAFTS, tmp_path))
    assert all(torch.equal(tensor, again[name]) for name, tensor in stored.items())
    assert not (tmp_path / TOKEN_MAP.name).exists()  # the stored vocabulary stays


def test_batches_hold_every_text_once_and_know_what_is_learned(tmp_path):
    texts = [[5, 6 | LEARN, 7 | LEARN], list(range(10, 50)), [9 | LEARN] * 33]
    bounds = np.concatenate(([0], np.cumsum([len(text) for text in texts])))
    np.savez(tmp_path / "t.npz", tokens=np.concatenate(texts).astype(np.uint16), bounds=bounds)
    batches = load_texts(tmp_path / "t.npz", "cpu").batches(128, seed=0)
    seen = [next(batches) for _ in range(2)]
    assert sorted(batch.ids.shape for batch in seen) == [(1, 32), (2, 64)]
    rows = [row for batch in seen for row in zip(batch.ids.tolist(), batch.learned.tolist(), strict=True)]
    assert sorted(sum(learned) for _, learned in rows) == [0, 2, 33]
    short = next(ids for ids, learned in rows if sum(learned) == 2)
    assert short[:4] == [5, 6, 7, 0]


def test_generation_is_the_same_alone_and_in_a_batch_and_stops_at_an_end(target, dialogues):
    few = dialogues[::8]
    alone = [generate(target, [one.prompt], [0.0], 64, (0, 2))[0] for one in few]
    assert alone == [one.answer for one in few]
    assert all(answer[-1] == 2 and answer.count(2) == 1 for answer in alone if len(answer) < 64)
