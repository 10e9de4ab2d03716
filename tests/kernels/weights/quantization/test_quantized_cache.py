"""Keys and values in fewer bits: attention over them, and models whose cache is so, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.contract.errors import UnsupportedError
from kernels.contract.speculation import SpeculativeSettings
from kernels.contract.step import SlotSampling
from kernels.core.attention_rows import AttentionRows
from kernels.devices.cpu.cache import CpuCaches
from kernels.devices.cpu.cache_8bit import Pages8bit
from kernels.devices.cpu.capture import CpuCapture
from kernels.devices.cpu.device import CpuDevice
from kernels.weights.quantization.cache import CACHE_DTYPES, LayerScales, round_fixed, round_tokens, widen
from tests.kernels.distributed.ranks import run_ranks
from tests.kernels.weights.quantization.guarded_cache import CASES
from tests.kits.native import require_native
from tests.kits.verifying import made

SCORED = SlotSampling(temperature=0.0, prompt_logprobs=0)
LIMITS = {"bfloat16": 4e-3, "int8": 0.015, "fp8_e4m3": 0.05, "fp8_e5m2": 0.1}
"""The error of attention, relative to its size."""

SHAPES = {
    "decodes": {"decodes": (3, 200, 47, 0)},
    "long": {"decodes": (900,)},
    "mixed": {"decodes": (3, 200), "drafts": ((31, 5), (120, 9)), "prefills": ((0, 12), (40, 30))},
    "drafting": {"drafts": ((45, 9), (16, 9), (0, 9)), "drafted": 5},
}


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(5)


@pytest.fixture(params=["plain", "native"])
def platform(request):
    found = CpuDevice(threads=1)
    if request.param == "native":
        require_native()
        found.select_dtype("bfloat16", None)
    return found


def model_dtype(platform):
    return torch.float32 if platform.native.current is None else torch.bfloat16


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("trees", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CACHE_DTYPES)
def test_attention_over_narrow_pages(name, shape, trees, window, platform, generator):
    dtype = model_dtype(platform)
    if CACHE_DTYPES[name] == dtype:
        pytest.skip("the model's own type")
    platform.cache.dtype = CACHE_DTYPES[name]
    case = made(
        platform, generator, dtype=dtype, heads=6, kv_heads=2, dim=64, page_size=16, window=window,
        trees=trees, **SHAPES[shape],
    )  # fmt: skip
    assert isinstance(case.cache, Pages8bit)
    assert case.cache.values.dtype == CACHE_DTYPES[name]
    found = platform.attention.attend(case.queries, case.cache, platform.attention.plan(case.rows, window), 0.2).float()
    limit = LIMITS[name] + (0 if dtype == torch.float32 else 5e-3)
    assert (found - case.expected).norm() <= limit * case.expected.norm()
    if name != "bfloat16" and dtype == torch.float32:
        assert (found - case.expected).norm() >= 1e-4 * case.expected.norm()


def test_scales_that_were_found_before(platform, generator):
    """Scales of each number of each head, with offsets, as ModelSlim has them."""
    platform.cache.dtype, dtype = torch.int8, model_dtype(platform)
    keys_values = torch.randn(40, 2, 3, 32, generator=generator) * (1 + torch.arange(32)) + 5
    low, high = keys_values.amin(0), keys_values.amax(0)
    scales = (high - low) / 254
    fixed = LayerScales(scales, -((high + low) / 2 / scales).round())
    (cache,) = platform.cache.make(1, 4, 16, 3, 32, dtype, [fixed])
    assert cache.scales is None
    platform.cache.write(cache, torch.arange(16, 56), keys_values.flatten(1, 2).to(dtype))
    read = cache.widened(torch.tensor([1, 2, 3]), torch.float32).view(-1, 2, 3, 32)[:40]
    error = (read - keys_values).abs() - (0 if dtype == torch.float32 else 0.01) * keys_values.abs()
    assert bool((error <= 0.51 * scales).all())
    assert platform.cache.token_bytes(3, 32, dtype, fixed=True) == 2 * 3 * 32
    assert platform.cache.token_bytes(3, 32, dtype) == 2 * 3 * (32 + 2)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_rounding_returns_what_it_was_given(name, generator):
    """Whatever the size of a token, and what is not finite stays so."""
    dtype = CACHE_DTYPES[name]
    x = torch.randn(6, 2, 3, 64, generator=generator) * torch.logspace(-20, 20, 6).view(-1, 1, 1, 1)
    x[5, 1, 2] = 0
    values, scales = round_tokens(x, dtype)
    found = widen(values, scales, None, torch.float32)
    limit = {"int8": 1 / 250, "fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8}[name]
    assert bool(((found - x).abs() <= limit * x.abs().amax(-1, keepdim=True)).all())
    for broken in (torch.nan, torch.inf, -torch.inf):
        x[2, 0, 1, 7] = broken
        found = widen(*round_tokens(x, dtype), None, torch.float32)
        assert not found[2, 0, 1, 7].isfinite()
        assert found[2, 0, 0].isfinite().all()
    large = torch.full((1, 2, 3, 64), 1e6)
    fixed = LayerScales(torch.ones(2, 3, 64))
    most = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}[name]
    assert bool((widen(round_fixed(large, fixed, dtype), None, fixed, torch.float32) == most).all())


def test_what_moves_and_what_is_cleared(generator):
    platform = CpuDevice(threads=1)
    platform.cache.dtype = torch.float8_e4m3fn
    (cache,) = platform.cache.make(1, 5, 16, 2, 8, torch.float32)
    sizes = torch.logspace(-3, 3, 80).view(-1, 1, 1)  # each token has a scale of its own
    platform.cache.write(cache, torch.arange(80), torch.randn(80, 4, 8, generator=generator) * sizes)
    whole = torch.arange(5)
    before = cache.widened(whole, torch.float32).clone().view(80, 2, 2, 8)
    source, target = [70, 21, 22, 20, 0, 0], [20, 22, 21, 33, 0, 0]
    platform.cache.move(cache, torch.tensor(source), torch.tensor(target))
    expected = before.clone()
    for one, other in zip(source, target, strict=True):
        expected[other] = before[one]
    assert torch.equal(cache.widened(whole, torch.float32).view(80, 2, 2, 8), expected)
    platform.cache.clear([cache], [1, 3])
    expected.view(5, 16, 2, 2, 8)[[1, 3]] = 0
    assert torch.equal(cache.widened(whole, torch.float32).view(80, 2, 2, 8), expected)


def scores(driver, prompt):
    driver.admit(1, prompt, sampling=SCORED)
    return np.frombuffer(driver.step([(1, len(prompt))]).prompt_logprobs, np.float32)


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_a_model_over_a_narrow_cache(name, reference, drive, prompts):
    """Nearer with more bits; the same in chunks, behind a prefix of others, and when it comes back."""
    path = reference(name).path
    (prompt,) = prompts(60)
    exact, errors = scores(drive(path), prompt), []
    for kind in ("bfloat16", "int8", "fp8_e4m3", "fp8_e5m2"):
        driver = drive(path, kv_cache_dtype=kind)
        errors.append(float(np.abs(scores(driver, prompt) - exact).mean()))
        assert driver.info.cache_dtype == str(CACHE_DTYPES[kind]).removeprefix("torch.")
    assert 0 < errors[0] < errors[1] < errors[2] < errors[3] < 1
    expected = driver.generate(1, 90)
    other = drive(path, kv_cache_dtype="fp8_e5m2")
    other.admit(1, prompt)
    for count in (16, 16, 9, 19):
        other.step([(1, count)])
    assert other.generate(1, 75) == expected[:75]
    kept = other.release(1, keep_pages=True)
    other.admit(2, prompt, expected[60:70], shared=kept[:2])  # admitted again, from the pages of the first
    other.step([(2, other.pending(2))])
    assert other.generate(2, 90) == expected


def test_twice_as_many_tokens_fit(reference, drive, monkeypatch):
    """Exactly with scales of layers; with those of tokens all but the bytes that they take."""
    options = {"mem_fraction_static": 0.001, "max_total_tokens": 0, "max_slots": 4096}
    path = reference("llama2").path
    wide = drive(path, dtype="bfloat16", **options).info
    token, layer = (
        drive(path, dtype="bfloat16", kv_cache_dtype="fp8_e4m3", kv_cache_quant_method=method, **options).info
        for method in ("", "none")
    )
    assert wide.cache_token_bytes == 3 * 2 * 4 * 12 * 2
    assert layer.cache_token_bytes == wide.cache_token_bytes / 2
    assert token.cache_token_bytes == 3 * 2 * 4 * (12 + 2)
    assert layer.num_pages == pytest.approx(2 * wide.num_pages, rel=0.01)
    assert token.num_pages == pytest.approx(24 / 14 * wide.num_pages, rel=0.01)
    assert token.cache_bytes == token.num_pages * token.page_size * token.cache_token_bytes
    platform = CpuDevice(threads=1)
    platform.cache.dtype = torch.int8
    assert platform.cache.token_bytes(8, 128, torch.bfloat16) < 0.51 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("tree", [(3, 1, 4), (3, 3, 12)])
def test_drafts_over_a_narrow_cache_change_nothing(tree, reference, drive, prompts):
    """A draft of its own and the model itself; what is accepted is moved with its scales."""
    steps, topk, tokens = tree
    path, options = reference("qwen3").path, {"kv_cache_dtype": "int8", "threads": 1}
    settings = SpeculativeSettings("STANDALONE", str(path), num_steps=steps, topk=topk, num_draft_tokens=tokens)
    plain, driver = drive(path, **options), drive(path, speculation=settings, **options)
    accepted = []
    for slot, prompt in enumerate(prompts(9, 30), start=1):
        plain.admit(slot, prompt)
        driver.admit(slot, prompt)
        driver.step([(slot, len(prompt))])
        while len(driver.tokens[slot]) < 80:
            result = driver.step([(slot, 1)], {slot: tokens - 1})
            assert not result.failed
            accepted += np.frombuffer(result.accepted, np.int32).tolist()
        assert driver.tokens[slot][:80] == plain.generate(slot, 80)
    assert np.mean(accepted) > 2.5  # the draft is the model
    assert driver.info.cache_token_bytes == plain.info.cache_token_bytes


def test_two_ranks_keep_their_heads(reference, drive, prompts):
    path, texts = reference("parallel-qwen3").path, prompts(5, 40)
    alone = drive(path, kv_cache_dtype="int8")
    for slot, text in enumerate(texts, start=1):
        alone.admit(slot, text)
        alone.generate(slot, 60)
    job = {"model": str(path), "prompts": texts, "length": 60, "options": {"kv_cache_dtype": "int8"}}
    (first,), (second,) = run_ranks([job])
    assert first["tokens"] == second["tokens"]
    assert first["cache_bytes"] == alone.info.cache_bytes / 2
    same = np.mean(np.array(first["tokens"][1]) == np.array(alone.tokens[2]))
    assert same > 0.75  # a sum over ranks may round a number the other way


def test_narrow_caches_are_refused_where_a_device_has_none(reference, drive, monkeypatch):
    def refuse(self, dtype):
        raise UnsupportedError("no such numbers here")

    monkeypatch.setattr(CpuCaches, "check_dtype", refuse)
    with pytest.raises(UnsupportedError, match="no such numbers here"):
        drive(reference("qwen3").path, kv_cache_dtype="fp8_e4m3")


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("fixed", [False, True])
def test_native_operators_round_as_torch_does(name, fixed, generator):
    """Every number of 8 bits, what lies between them, and what is not finite."""
    both = []
    for found in (CpuDevice(threads=1), CpuDevice(threads=2)):
        found.cache.dtype = CACHE_DTYPES[name]
        both.append(found)
    native = both[1]
    require_native()
    native.select_dtype("bfloat16", None)
    kv_heads, dim = 3, 64
    layers = None
    if fixed:
        offsets = torch.randint(-9, 9, (2, kv_heads, dim), generator=generator).float() if name == "int8" else None
        layers = [LayerScales(torch.rand(2, kv_heads, dim, generator=generator) + 0.5, offsets)]
    numbers = torch.randn(64, 2 * kv_heads, dim, generator=generator) * torch.logspace(-6, 6, 64).view(-1, 1, 1)
    numbers[40, 2, 5], numbers[41, 4, 6] = torch.nan, torch.inf
    numbers = numbers.bfloat16()
    caches = []
    for platform in both:
        (cache,) = platform.cache.make(1, 6, 16, kv_heads, dim, torch.bfloat16, layers)
        platform.cache.write(cache, torch.arange(16, 80), numbers)
        caches.append(cache)
    ours, theirs = (cache.values.view(torch.int8) for cache in reversed(caches))
    different = (ours != theirs).view(96, -1)
    if not fixed:
        different[[56, 57]] = False  # tokens that are not finite: their scales say so
        sound = torch.ones(96, dtype=torch.bool)
        sound[[56, 57]] = False
        assert torch.equal(caches[0].scales.view(96, 2, 3)[sound], caches[1].scales.view(96, 2, 3)[sound])
    assert different.float().mean() < 2e-3  # ties, of fp8 that is rounded twice
    read = caches[1].widened(torch.tensor([1, 2, 3, 4]), torch.bfloat16).view(64, 2, 3, 64)
    assert read[:40].isfinite().all()
    assert not read[40, 0, 2, 5].isfinite()
    assert not read[41, 1, 1, 6].isfinite()
    assert read[40, 0, :2].isfinite().all()


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", ["tokens", "heads", "dims", "offsets"])
def test_native_attention_reads_what_torch_widens(name, scales, generator):
    """Decodes, drafts and prompts, several heads in a tile and one; what is not finite spoils its own row alone."""
    dtype = CACHE_DTYPES[name]
    if scales == "offsets" and name != "int8":
        pytest.skip("floats have no offsets")
    require_native()
    for heads, kv_heads, dim in ((6, 2, 64), (3, 3, 96), (20, 1, 32)):
        native, plain = CpuDevice(threads=2), CpuDevice(threads=1)
        native.select_dtype("bfloat16", None)
        native.cache.dtype = dtype
        fixed = None
        if scales != "tokens":
            factors = torch.rand(2, kv_heads, 1 if scales == "heads" else dim, generator=generator) + 0.5
            offsets = torch.randint(-9, 9, (2, kv_heads, dim), generator=generator).float()
            factors = factors.expand(2, kv_heads, dim).contiguous() / 20
            fixed = [LayerScales(factors, offsets if scales == "offsets" else None)]
        (cache,) = native.cache.make(1, 40, 16, kv_heads, dim, torch.bfloat16, fixed)
        assert (cache.kept.by_head is not None) == (scales == "heads")
        (wide,) = plain.cache.make(1, 40, 16, kv_heads, dim, torch.float32)
        starts, counts = np.array([0, 130, 17, 40, 90]), np.array([1, 1, 7, 60, 1])
        order = [0, 1, 4, 2, 3]
        rows = AttentionRows(starts[order], counts[order], np.zeros((5, 9), np.int32), decodes=3, verifies=1)
        free = iter(torch.randperm(39, generator=generator).add(1).tolist())
        for row, length in enumerate(starts[order] + counts[order]):
            rows.pages[row, : -(-length // 16)] = [next(free) for _ in range(-(-length // 16))]
            index = torch.from_numpy(rows.pages[row, np.arange(length) // 16] * np.int64(16) + np.arange(length) % 16)
            keys_values = torch.randn(length, 2 * kv_heads, dim, generator=generator).bfloat16()
            if row == 2:
                keys_values[33, kv_heads, 1] = torch.inf
            native.cache.write(cache, index, keys_values)
        wide.copy_(cache.widened(torch.arange(40), torch.float32))
        queries = torch.randn(int(counts.sum()), heads, dim, generator=generator).bfloat16()
        found = native.attention.attend(queries, cache, native.attention.plan(rows, 0), 0.2).float()
        expected = plain.attention.attend(queries.float(), wide, plain.attention.plan(rows, 0), 0.2)
        assert not found[2].isfinite().all()
        found[2] = expected[2] = 0
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def test_native_attention_reads_nothing_behind_a_cache():
    """Where columns do not fill a vector's lanes, by a program that would die of it."""
    require_native()
    native = CpuDevice(threads=1)
    native.select_dtype("bfloat16", None)
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.weights.quantization.guarded_cache"]
    done = subprocess.run(command, cwd=Path(__file__).parents[4], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]}: {done.stderr}"
    assert len(lines) == len(CASES)


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3"])
def test_programs_generate_what_steps_generate(name, drive, prompts, monkeypatch):
    """Decodes in recorded programs, and each operator by itself; greedy and sampled, a window's too."""
    from app.understudy import MODEL_DIR

    require_native()
    outputs, recorded = [], []
    record = CpuCapture.record

    def watched(self, *args):
        recorded.append(record(self, *args) if not outputs else None)
        return recorded[-1]

    monkeypatch.setattr(CpuCapture, "record", watched)
    for _ in range(2):
        driver = drive(MODEL_DIR, dtype="bfloat16", kv_cache_dtype=name, max_slots=5)
        for slot, prompt in enumerate(prompts(70, 20, 33), start=1):
            sampling = SlotSampling(temperature=0.0) if slot < 3 else SlotSampling(temperature=0.8, seed=5)
            driver.admit(slot, prompt, sampling=sampling)
            driver.step([(slot, len(prompt))])
        for _ in range(20):
            assert not driver.step([(slot, 1) for slot in (1, 2, 3)]).failed
        driver.release(3)
        for _ in range(10):
            driver.step([(1, 1), (2, 1)])
        outputs.append([driver.tokens[1], driver.tokens[2]])
    assert recorded[0] is not None
    assert outputs[0] == outputs[1]
