"""Results on a simulated NPU that are the same, bit by bit, whatever else a step runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.contract.config import RunnerConfig
from kernels.contract.errors import UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.devices.select import select_device
from tests.kits.driver import VOCAB, ints
from tests.kits.speculation.layouts import make_layout
from tests.kits.verifying import made

NPU = torch.device("npu:0")
OPTIONS = {"device": "npu", "invariant": True, "page_size": 128, "max_step_tokens": 256, "max_total_tokens": 16 * 128}


def make(**options):
    platform = select_device(RunnerConfig(model_path="", device="npu", invariant=True, page_size=128, **options))
    platform.select_dtype("bfloat16", None)
    platform.bind_thread()
    return platform


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
def test_invariant_attention_finds_what_each_query_sees(trees, window):
    platform = make()
    case = made(
        platform, torch.Generator().manual_seed(3), dtype=torch.bfloat16, heads=6, kv_heads=2, dim=64, page_size=128,
        window=window, trees=trees, put=lambda tensor: tensor.to(NPU), fill=1e3,
        decodes=(3, 200), drafts=((31, 5), (120, 9)), prefills=((0, 12), (40, 30)),
    )  # fmt: skip
    found = platform.attention.attend(case.queries, case.cache, platform.attention.plan(case.rows, window), 0.2)
    torch.testing.assert_close(found.float().cpu(), case.expected, atol=0.02, rtol=0.02)


def test_invariant_npu_refuses_int8_caches_and_several_ranks():
    with pytest.raises(UnsupportedError, match="--kv-cache-dtype bfloat16"):
        make().cache.check_dtype(torch.int8)
    with pytest.raises(UnsupportedError, match="with one NPU"):
        make(tp_size=2)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"dtype": "bfloat16"}),
        ("llama-biased", {"dtype": "float32"}),
        ("mistral", {"dtype": "float16"}),
        ("qwen2-moe", {"dtype": "bfloat16", "quantization": "int8"}),
        ("deepseek-v3", {"dtype": "bfloat16"}),
    ],
)
def test_a_token_on_an_npu_is_the_same_in_any_batch(family, options, reference, drive):
    """Alone in one piece, and with others in chunks that end anywhere."""
    driver = drive(reference(family).path, max_slots=6, **OPTIONS, **options)
    prompts = [
        np.random.default_rng(seed).integers(0, VOCAB, length).tolist() for seed, length in enumerate((3, 40, 150))
    ]
    samplings = [SlotSampling(temperature=0.8 * (slot % 2), top_p=0.9, seed=slot, logprobs=2) for slot in range(3)]
    alone = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        driver.admit(1, prompt, sampling=sampling)
        bits = [driver.step([(1, driver.pending(1))]).logprobs for _ in range(6)]
        alone.append((driver.tokens[1][len(prompt) :], bits))
        driver.release(1)
    for slot, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True), 1):
        driver.admit(slot, prompt, sampling=sampling)
    found = {slot: [] for slot in (1, 2, 3)}
    for chunk in (7, 20, 1, 64, 100, *[1] * 40):
        rows = [(slot, min(chunk, driver.pending(slot))) for slot in found if len(found[slot]) < 6]
        if not rows:
            break
        ends = [slot for slot, count in sorted(rows, key=lambda row: row[1] != 1) if count == driver.pending(slot)]
        result = driver.step(rows)
        for slot, one in zip(ends, np.frombuffer(result.logprobs, np.float32), strict=True):
            found[slot].append(one.tobytes())
    for slot, prompt in enumerate(prompts, 1):
        assert (driver.tokens[slot][len(prompt) :], found[slot]) == alone[slot - 1]


@pytest.mark.parametrize("algorithm", ["EAGLE3", "NGRAM"])
def test_draft_tokens_on_an_npu_change_no_bit(algorithm, drive, tmp_path):
    """By trees of a draft, and by n-grams of a prompt that repeats itself."""
    _, _, target, draft, _, _ = make_layout("eagle3", tmp_path)
    prompt, sampling, given = (
        [5, 6, 7, 8] * 6,
        SlotSampling(temperature=0.7, seed=3, logprobs=2, allowed_ids=(5, 6, 7, 8)),  # n-grams find these
        OPTIONS | {"max_slots": 3},
    )
    plain = drive(target, dtype="bfloat16", **given)
    plain.admit(1, prompt, sampling=sampling)
    bits = [plain.step([(1, plain.pending(1))]).logprobs for _ in range(8)]
    tree = algorithm == "EAGLE3"
    settings = SpeculativeSettings(
        algorithm, str(draft) if tree else "", num_steps=3, topk=3 if tree else 1, num_draft_tokens=6
    )
    driver = drive(target, dtype="bfloat16", speculation=settings, **given)
    driver.admit(1, prompt, sampling=sampling)
    found, drafted = [driver.step([(1, len(prompt))]).logprobs], 0
    while len(driver.tokens[1]) < len(plain.tokens[1]):
        result = driver.step([(1, 1)], {1: 5})
        found.append(result.logprobs)
        drafted += sum(ints(result.drafted))
    assert driver.tokens[1][: len(plain.tokens[1])] == plain.tokens[1]
    assert b"".join(found)[: 4 * len(bits)] == b"".join(bits)
    assert drafted
