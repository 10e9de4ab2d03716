"""Our own kernels for Ascend NPUs in Triton's interpreter, against torch."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
import triton

from kernels.core.noise import seed_key
from kernels.core.operators import DRAWS
from kernels.devices.npu_triton import kernels, reference
from kernels.devices.npu_triton.selection import INPUTS, pack_draws
from tests.kernels.devices.cuda.compiled import compiling, empty

interpreted = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="TRITON_INTERPRET=1 runs the kernels")


def numbers(*shape: int, seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "width"), [(4, 2, 128, 128), (5, 1, 64, 128), (3, 3, 24, 24)])
def test_queries_and_caches_are_those_of_torch(normed, heads, kv_heads, dim, width, dtype, monkeypatch):
    monkeypatch.setattr(kernels, "_TILE", 2 * triton.next_power_of_2(dim // 2))  # two heads at a time
    tokens = 5
    qkv = numbers(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    weight = numbers(heads + kv_heads, dim, seed=2, dtype=dtype) if normed else None
    angles = numbers(tokens, 1, dim // 2, seed=3, dtype=torch.float32)
    cos, sin = (torch.cat((part, part), -1).to(dtype) for part in (angles.cos(), angles.sin()))
    index = torch.tensor([17, 3, 40, 8, 22])
    filled = numbers(3, 16, kv_heads, width, seed=4, dtype=dtype)
    close = 1e-5 if dtype == torch.float32 else 0.03  # the interpreter cuts bfloat16 off
    results = []
    for compute, options in ((kernels.split_norm_rope_cache, (2,)), (reference.split_norm_rope_cache, ())):
        caches = filled.clone(), filled.clone()
        queries = compute(qkv, weight, 1e-6, cos, sin, *caches, index, heads, *options)
        results.append((queries, *caches))
    for own, expected in zip(*results, strict=True):
        assert own.shape == expected.shape
        assert torch.allclose(own.float(), expected.float(), rtol=close, atol=close)
    untouched = torch.ones(48, dtype=torch.bool)
    untouched[index] = False
    for cache in results[0][1:]:
        assert torch.equal(cache.view(48, -1)[untouched], filled.view(48, -1)[untouched])


def draws(*rows: tuple[float, int, float, float]) -> np.ndarray:
    """Of temperature, top-k, top-p and min-p."""
    result = np.zeros(len(rows), DRAWS)
    for place, (temperature, top_k, top_p, min_p) in enumerate(rows):
        result[place] = (seed_key(place + 7), temperature, np.log(min_p) if min_p else -np.inf, top_p, top_k)
    return result


ROWS = (
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 20, 1.0, 0.0),
    (1.3, 3, 0.9, 0.0),
    (1.0, 0, 0.3, 0.0),
    (5.0, 0, 0.02, 0.0),
    (2.0, 100, 0.5, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.5, 50, 0.95, 0.1),
    (1.0, 0, 0.0, 0.0),
)


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_drawn_tokens_are_those_of_torch(dtype):
    seen = set()
    for position in range(5):
        logits = (numbers(len(ROWS), 2100, seed=position, dtype=torch.float32) * 3).to(dtype)
        packed = torch.from_numpy(pack_draws(draws(*ROWS)))
        positions = torch.arange(len(ROWS)) + position
        tokens, nonfinite = kernels.draw(logits, packed, positions)
        expected, _ = reference.draw(logits, packed, positions)
        assert tokens.tolist() == expected.tolist()
        assert not nonfinite.any()
        seen |= set(tokens.tolist())
    assert len(seen) > 30  # tokens are sampled, not the argmax alone


@interpreted
def test_equal_logits_are_cut_by_the_lowest_ids():
    logits = torch.zeros(2, 100)
    packed = torch.from_numpy(pack_draws(draws((1.0, 3, 1.0, 0.0), (1.0, 0, 0.025, 0.0))))
    tokens = {tuple(kernels.draw(logits, packed, torch.full((2,), at))[0].tolist()) for at in range(15)}
    assert {first for first, _ in tokens} == {0, 1, 2}
    assert {second for _, second in tokens} == {0, 1, 2}


@interpreted
def test_rows_that_are_not_finite_fail_alone():
    logits = numbers(4, 70, dtype=torch.float32)
    logits[0, 3], logits[1, 69] = torch.nan, torch.inf
    logits[2] = -torch.inf
    packed = torch.from_numpy(pack_draws(draws(*[(1.0, 5, 0.5, 0.1)] * 4)))
    tokens, nonfinite = kernels.draw(logits, packed, torch.arange(4))
    expected, fails = reference.draw(logits, packed, torch.arange(4))
    assert nonfinite.tolist() == fails.tolist() == [True, True, True, False]
    assert tokens.tolist() == expected.tolist()
    assert tokens.tolist()[:3] == [0, 0, 0]


@interpreted
@pytest.mark.parametrize("name", INPUTS)
def test_kernels_pass_the_test_that_selects_them(name):
    own = partial(kernels.split_norm_rope_cache, programs=2) if name != "draw" else kernels.draw
    for inputs in INPUTS[name](2):
        theirs = copy.deepcopy(inputs)
        results, expected = own(*inputs), getattr(reference, name)(*theirs)
        if name == "draw":
            for result, right in zip(results, expected, strict=True):
                assert result.tolist() == right.tolist()
            continue
        for result, right in zip((results, *inputs[5:7]), (expected, *theirs[5:7]), strict=True):
            assert torch.allclose(result, right, rtol=0.03, atol=0.03)  # the interpreter cuts bfloat16 off


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_types_agree_as_a_compiler_wants(dtype, monkeypatch, tmp_path):
    """For a GPU: Triton-Ascend compiles where there is a device alone."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with compiling(monkeypatch, 80) as found:
        cache, cos = empty(9, 128, 8, 128, dtype=dtype), empty(5, 1, 128, dtype=dtype)
        qkv, index = empty(5, 32, 128, dtype=dtype), empty(5, dtype=torch.int64)
        for weight in (None, empty(24, 128, dtype=dtype)):
            kernels.split_norm_rope_cache(qkv, weight, 1e-6, cos, cos, cache, cache, index, 16, 40)
        kernels.draw(empty(5, 3000, dtype=dtype), empty(5, 6, dtype=torch.int32), index)
    assert {each.kernel for each in found} == {"split_norm_rope_cache_kernel", "draw_kernel"}
